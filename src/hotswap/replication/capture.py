"""A slot's state into a snapshot buffer, and back: what is copied, where it lies, and what may be put back.

In steady state nothing is looked at per tensor but its identity, size and type; the copies themselves are one
multi-tensor call. Only when a tensor is another object than last time (the first update has made the optimizer's
state, a script has replaced a buffer) is a new layout made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, cast

import torch

from hotswap.errors import LayoutMismatch, UsageError
from hotswap.integrations.base import StateAdapter, TensorEntry, TensorSpec
from hotswap.replication import plaintree
from hotswap.replication.layout import (
    Header,
    Layout,
    Row,
    header_nbytes,
    lay_out,
    read_header,
    views,
    write_header,
)

Buffer = memoryview | bytearray | torch.Tensor
_DTYPE = attrgetter("dtype")
_VIEWS_MAX = 8
"""Buffers whose views are kept; there are two or three, and a few more while a reservation is replaced."""


class Capture:
    """The state of one process, through its adapters."""

    def __init__(self, adapters: Sequence[StateAdapter]) -> None:
        """Adapters are asked in order, for objects too, so the random generators belong at the end."""
        names = [adapter.name for adapter in adapters]
        if len(set(names)) != len(names):
            raise UsageError(f"two parts of the state have the same name ({', '.join(names)}): rename one")
        self.adapters = list(adapters)
        self._layout: Layout | None = None
        self._sources: list[torch.Tensor] = []
        self._check: object = None
        self._views: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._stream: torch.cuda.Stream | None = None
        self._begun: torch.cuda.Event | None = None
        self._copied: torch.cuda.Event | None = None
        self._fenced: torch.cuda.Event | None = None
        self._lanes: tuple[list[int], ...] = ()

    # --- size -----------------------------------------------------------------------------------------------------

    def plan(self) -> Layout:
        """The layout for the state as it is now."""
        return self._plan(self._objects())

    def nbytes(self) -> int:
        """Bytes a snapshot of the state as it is now needs."""
        return self.plan().nbytes

    def specs(self) -> dict[str, TensorSpec]:
        """Name and form of each tensor of the state as it is now."""
        return {entry.name: entry.spec() for entry in self._entries()}

    def require_resizable(self) -> None:
        """UsageError, saying what to do instead, if another number of slots could not take this state over."""
        for adapter in self.adapters:
            obstacle = adapter.obstacle()
            if obstacle is not None:
                raise UsageError(f"this job cannot go on with another number of slots: {obstacle}")

    def peers(self) -> tuple[int, ...]:
        """Other slots whose shared section is identical to this one's."""
        return next((adapter.peers() for adapter in self.adapters if adapter.peers()), ())

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """All inner optimizers."""
        return [optimizer for adapter in self.adapters for optimizer in adapter.optimizers()]

    # --- write ----------------------------------------------------------------------------------------------------

    def write(
        self,
        buffer: Buffer | Callable[[int], Buffer],
        *,
        slot: int,
        generation: int,
        step: int,
        asynchronous: bool = False,
    ) -> tuple[int, int]:
        """Copy the state into ``buffer``; return the lengths of its shared and its unique section.

        Instead of a buffer it may be what gives one, called with the number of bytes that are needed.
        If ``asynchronous``, CUDA tensors are copied behind the work queued so far: the snapshot is whole after the
        event `copied`, and an update may begin after `fence`. What forward or backward change is copied on the current
        stream, all else on a side stream. UsageError if the buffer is too small (see `nbytes`).
        """
        objects = self._objects()
        layout = self._plan(objects)
        raw = _bytes_of(buffer(layout.nbytes) if callable(buffer) else buffer)
        if raw.numel() < layout.nbytes:
            raise UsageError(f"a snapshot of {layout.nbytes} bytes does not fit a buffer of {raw.numel()}")
        with torch.no_grad():
            self._copy_out(self._views_in(raw, layout))
        unique = _view_of(raw)[layout.shared_nbytes : layout.nbytes]
        write_header(unique, layout, objects, slot=slot, generation=generation, step=step)
        if self._copied is not None and not asynchronous:
            self._copied.synchronize()
        return layout.shared_nbytes, layout.unique_nbytes

    @property
    def copied(self) -> torch.cuda.Event | None:
        """When the copies of the last `write` are in the buffer; None if they already are."""
        return self._copied

    def fence(self) -> None:
        """Make the current CUDA stream wait for the last `write`: call it before the state is updated."""
        if self._copied is not None:
            stream = torch.cuda.current_stream()
            self._fenced = self._fenced or stream.record_event(_timed())
            stream.wait_event(self._copied)

    def copy_s(self) -> tuple[float, float] | None:
        """Seconds that the device took to copy the last `write` aside, and stood still for that at the first `fence` after it.

        None as long as they are unknown.
        """
        begun, copied, fenced = (cast("Any", event) for event in (self._begun, self._copied, self._fenced))
        if copied is None or fenced is None or not (copied.query() and fenced.query()):
            return None
        return float(begun.elapsed_time(copied)) / 1000, max(0.0, float(fenced.elapsed_time(copied)) / 1000)

    def _copy_out(self, targets: list[torch.Tensor]) -> None:
        on_host, on_stream, aside = self._lanes
        self._copy(on_host, targets)
        if not (on_stream or aside):
            return
        self._copy(on_stream, targets)
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._begun = self._stream.record_event(_timed())
            self._copy(aside, targets)
            self._copied, self._fenced = self._stream.record_event(_timed()), None

    def _copy(self, rows: list[int], targets: list[torch.Tensor]) -> None:
        if rows:
            torch._foreach_copy_(
                [targets[row] for row in rows], [self._sources[row] for row in rows], non_blocking=True
            )

    # --- read -----------------------------------------------------------------------------------------------------

    def read(
        self, buffer: Buffer, shared_nbytes: int, unique_nbytes: int, *, slot: int, step: int, heavy: bool
    ) -> None:
        """Put a snapshot back, in place: all of it if ``heavy``, else only what forward and backward change.

        Raises IntegrityError for damaged bytes and LayoutMismatch for a snapshot of another slot or step, or of another
        program; the state is as it was then.
        """
        raw = _bytes_of(buffer)
        if shared_nbytes < 0 or unique_nbytes < 0 or shared_nbytes + unique_nbytes > raw.numel():
            raise LayoutMismatch(f"sections of {shared_nbytes} and {unique_nbytes} bytes in a buffer of {raw.numel()}")
        unique = _view_of(raw)[shared_nbytes : shared_nbytes + unique_nbytes]
        known = self._layout if self._is_current() else None
        header, capacity = read_header(unique, shared_nbytes, known)
        self._require_identity(header, slot=slot, step=step)
        if known is not None and header.rows is known.rows:
            live = {row.name: tensor for row, tensor in zip(known.rows, self._sources, strict=True)}
        else:
            live = self._fitted(header.rows, heavy=heavy)
        rows = [row for row in header.rows if heavy or row.volatile]
        saved = views(raw, rows, unique_start=shared_nbytes, header_capacity=capacity)
        self._require_present(rows, live)
        if rows:
            with torch.no_grad():
                torch._foreach_copy_([live[row.name] for row in rows], saved)
            if any(live[row.name].is_cuda for row in rows):
                torch.cuda.current_stream().synchronize()
        for adapter in self.adapters:
            adapter.load_objects(header.objects[adapter.name])

    def _require_identity(self, header: Header, *, slot: int, step: int) -> None:
        if (header.slot, header.step) != (slot, step):
            raise LayoutMismatch(
                f"the snapshot is of slot {header.slot} at step {header.step}, wanted was slot {slot} at step {step}"
            )
        expected = [adapter.name for adapter in self.adapters]
        if list(header.objects) != expected:
            raise LayoutMismatch(f"the snapshot has parts {list(header.objects)}, this process protects {expected}")

    def _fitted(self, rows: Sequence[Row], *, heavy: bool) -> dict[str, torch.Tensor]:
        """Make the live state fit ``rows``, or refuse before anything is changed; return its tensors by name."""
        parts = self._by_adapter(rows)
        for adapter, specs in parts:
            adapter.check(specs)
        if heavy:
            for adapter, specs in parts:
                adapter.arrange(specs)
        return {entry.name: entry.tensor for entry in self._entries()}

    def _by_adapter(self, rows: Sequence[Row]) -> list[tuple[StateAdapter, Mapping[str, TensorSpec]]]:
        specs: dict[str, dict[str, TensorSpec]] = {adapter.name: {} for adapter in self.adapters}
        for row in rows:
            owner, _, name = row.name.partition("/")
            if owner not in specs:
                raise LayoutMismatch(f"the snapshot has {row.name}, which no part of this process's state owns")
            specs[owner][name] = row.spec
        return [(adapter, specs[adapter.name]) for adapter in self.adapters]

    def _require_present(self, rows: Sequence[Row], live: Mapping[str, torch.Tensor]) -> None:
        for row in rows:
            tensor = live.get(row.name)
            assert tensor is not None, f"{row.name} was checked and arranged, but is not there"
            found = (tensor.dtype, tuple(tensor.shape))
            assert found == (row.spec.dtype, row.spec.shape), f"{row.name} was arranged as {row.spec}, but is {found}"

    # --- identity -------------------------------------------------------------------------------------------------

    def digests(self) -> dict[str, str]:
        """SHA-256 of each adapter's part of the live state; equal states give equal digests in any process."""
        return {adapter.name: self._digest_of(adapter) for adapter in self.adapters}

    def digest(self) -> str:
        """SHA-256 of the whole live state."""
        return hashlib.sha256(repr(sorted(self.digests().items())).encode()).hexdigest()

    def _digest_of(self, adapter: StateAdapter) -> str:
        total = hashlib.sha256()
        for entry in sorted(adapter.tensors(), key=lambda entry: entry.name):
            form = (entry.name, str(entry.tensor.dtype), tuple(entry.tensor.shape))
            total.update(repr(form).encode())
            flat = entry.tensor.detach().reshape(-1).contiguous().cpu()
            if flat.numel():
                total.update(flat.view(torch.uint8).numpy().data)
        objects = {key: value for key, value in adapter.objects().items() if key != "runtime"}
        total.update(plaintree.encode(_ordered(objects), name=adapter.name))
        return total.hexdigest()

    # --- layout ---------------------------------------------------------------------------------------------------

    def _objects(self) -> bytes:
        tree = {adapter.name: adapter.objects() for adapter in self.adapters}
        return plaintree.encode(tree, name="state")

    def _entries(self) -> list[TensorEntry]:
        return [
            TensorEntry(
                name=f"{adapter.name}/{entry.name}",
                tensor=entry.tensor,
                shared=entry.shared,
                volatile=entry.volatile,
                is_dtensor=entry.is_dtensor,
                place=entry.place,
            )
            for adapter in self.adapters
            for entry in adapter.tensors()
        ]

    def _plan(self, objects: bytes) -> Layout:
        """The current layout; a new one if tensors are other objects or forms, or the header has outgrown its room."""
        layout = self._layout
        if layout is None or not self._is_current() or header_nbytes(layout, objects) > layout.header_capacity:
            entries = self._entries()
            layout = self._layout = lay_out(entries, len(objects))
            # Holding on to the tensors themselves is what makes comparing identities sound: no id is used twice.
            self._sources = [entry.tensor for entry in entries]
            self._lanes = _lanes(entries)
            self._check = self._fingerprint()
            self._views.clear()
        return layout

    def _is_current(self) -> bool:
        return self._layout is not None and self._check == self._fingerprint()

    def _fingerprint(self) -> object:
        forms = list(map(torch.Tensor.numel, self._sources)), list(map(_DTYPE, self._sources))
        return [adapter.fingerprint() for adapter in self.adapters], forms

    def _views_in(self, raw: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
        key = (raw.data_ptr(), raw.numel())
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= _VIEWS_MAX:
                self._views.clear()
            found = self._views[key] = views(
                raw, layout.rows, unique_start=layout.shared_nbytes, header_capacity=layout.header_capacity
            )
        return found


def _lanes(entries: Sequence[TensorEntry]) -> tuple[list[int], ...]:
    """Numbers of the tensors in host memory, of those on a device that are volatile, and of all others on a device."""
    on_host = [row for row, entry in enumerate(entries) if not entry.tensor.is_cuda]
    on_stream = [row for row, entry in enumerate(entries) if entry.tensor.is_cuda and entry.volatile]
    aside = [row for row, entry in enumerate(entries) if entry.tensor.is_cuda and not entry.volatile]
    return on_host, on_stream, aside


def _timed() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def pin(buffer: Buffer) -> Callable[[], None]:
    """Pin a mapped buffer for CUDA: copies run at bus speed and behind the computation. Return how to unpin it.

    Unpin before unmapping: CUDA refuses the address range otherwise when it is mapped again. UsageError if the driver
    refuses.
    """
    raw = _bytes_of(buffer)
    address, nbytes = raw.data_ptr(), raw.numel()
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = cudart.cudaHostRegister(address, nbytes, 0)
    if int(code) != 0:
        raise UsageError(f"cudaHostRegister refused {nbytes} bytes ({code}): raise the locked-memory limit (ulimit -l)")

    def unpin() -> None:
        cudart.cudaHostUnregister(address)

    return unpin


def _ordered(value: Any) -> Any:
    """The same tree with the keys of its dicts in an order that does not depend on how they were filled."""
    if isinstance(value, dict):
        items = [(key, _ordered(item)) for key, item in value.items()]
        return sorted(items, key=lambda pair: plaintree.encode(pair[0]))
    if isinstance(value, list | tuple):
        return type(value)(_ordered(item) for item in value) if type(value) in (list, tuple) else value
    return value


def _bytes_of(buffer: Buffer) -> torch.Tensor:
    if isinstance(buffer, torch.Tensor):
        return buffer.view(torch.uint8).reshape(-1)
    return torch.frombuffer(buffer, dtype=torch.uint8) if len(buffer) else torch.empty(0, dtype=torch.uint8)


def _view_of(raw: torch.Tensor) -> memoryview:
    view: memoryview = raw.numpy().data
    return view
