"""What a framework adapter is: it enumerates, resets and completes the state of one framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from hotswap.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the part that a slot holds lies in the whole tensor: the shape of the whole, and the part's first index in each dimension."""

    whole: tuple[int, ...]
    offset: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Form of a saved tensor: enough to make an empty one of its kind. ``place``: None if the slot has it as a whole."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device_type: str
    is_dtensor: bool
    place: Place | None = None


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor that is part of a slot's state.

    ``tensor`` is an ordinary dense tensor (the local part of a DTensor). ``shared``: the adapter's peers hold identical
    bytes, so it is copied for local undo only and is fetched from a peer when its slot is lost. ``volatile``: forward
    or backward changes it, so even a slot that is at the right step must roll it back.
    """

    name: str
    tensor: torch.Tensor
    shared: bool = False
    volatile: bool = False
    is_dtensor: bool = False
    place: Place | None = None

    def spec(self) -> TensorSpec:
        """Form of this tensor."""
        return TensorSpec(
            dtype=self.tensor.dtype,
            shape=tuple(self.tensor.shape),
            device_type=self.tensor.device.type,
            is_dtensor=self.is_dtensor,
            place=self.place,
        )


class StateAdapter(Protocol):
    """State of one part of the training program (a model with its optimizers, the random generators, a loader).

    Only `synchronise` and `materialise` communicate, and `objects` may, once, at the first boundary: torch's DDP agrees
    on its final buckets there.
    """

    name: str

    def tensors(self) -> Sequence[TensorEntry]:
        """All tensors of the state, in an order that is equal in every process with the same program."""

    def fingerprint(self) -> object:
        """A cheap value that differs whenever the tensors that `tensors` would return are other objects."""

    def check(self, wanted: Mapping[str, TensorSpec]) -> None:
        """Raise LayoutMismatch, and change nothing, unless `arrange` can make the state fit ``wanted``."""

    def arrange(self, wanted: Mapping[str, TensorSpec]) -> None:
        """Drop lazily made tensors that are not in ``wanted`` and make the missing ones, with arbitrary content."""

    def objects(self) -> dict[str, Any]:
        """Everything that is not a tensor of `tensors`, as a plain tree (see hotswap.replication.plaintree).

        What is under the key ``runtime`` is restored but is no part of the digest.
        """

    def load_objects(self, tree: dict[str, Any]) -> None:
        """Put back what `objects` returned."""

    def peers(self) -> tuple[int, ...]:
        """Other slots (global ranks) that hold the tensors marked as shared."""

    def compared(self) -> Sequence[tuple[tuple[int, ...], Sequence[TensorEntry]]]:
        """Tensors that hold the same bytes on other slots, with those slots, once forward and backward of a step are done."""

    def begin_rehearsal(self) -> None:
        """Get ready for a step on detached groups, whose collectives do nothing; `reset` ends it."""

    def reset(self) -> None:
        """Throw away what a failed attempt may have left: gradients, pending handles, half-done collectives."""

    def synchronise(self) -> None:
        """At the very first start: what constructors would have made equal, had their groups been connected."""

    def materialise(self) -> None:
        """After a restore, on connected groups: rebuild what follows from the restored tensors."""

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Inner optimizers, whose step hooks tell when state is being changed."""

    def role(self) -> str:
        """Hash of what this slot does: equal for slots that do the same with other data, whatever they hold of it."""

    def shape(self) -> str:
        """Hash of names, shapes and dtypes: slots with equal hashes run the same program."""

    def obstacle(self) -> str | None:
        """Why this state cannot be given to a job with another number of slots, and what to do instead; None if it can."""


class AdapterBase:
    """An adapter without tensors: what most methods are for most adapters."""

    def __init__(self, name: str) -> None:
        """``name`` is unique among the adapters of a process."""
        self.name = name

    def tensors(self) -> Sequence[TensorEntry]:
        """None."""
        return ()

    def fingerprint(self) -> object:
        """Constant."""
        return None

    def check(self, wanted: Mapping[str, TensorSpec]) -> None:
        """Nothing is wanted from an adapter without tensors."""

    def arrange(self, wanted: Mapping[str, TensorSpec]) -> None:
        """Nothing to arrange."""

    def peers(self) -> tuple[int, ...]:
        """Nobody."""
        return ()

    def compared(self) -> Sequence[tuple[tuple[int, ...], Sequence[TensorEntry]]]:
        """None."""
        return ()

    def begin_rehearsal(self) -> None:
        """Nothing to get ready."""

    def reset(self) -> None:
        """Nothing is left behind."""

    def synchronise(self) -> None:
        """Nothing to make equal."""

    def materialise(self) -> None:
        """Nothing follows from this state."""

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """None."""
        return ()

    def role(self) -> str:
        """The name."""
        return self.name

    def shape(self) -> str:
        """The name: the content may differ from slot to slot."""
        return self.name

    def obstacle(self) -> str | None:
        """None: what a slot has of this, its successor in a job of another size can take over."""
        return None


def place_of(tensor: torch.Tensor) -> Place | None:
    """Where this process's part of a DTensor lies in the whole; None for any other tensor, and where the placements don't tell.

    Parts are those of ``torch.chunk``, cut once for each mesh dimension that shards, as DTensor's documentation has it for Shard. Others
    (strided ones, of FSDP on top of tensor parallel) can be saved and restored all the same.
    """
    if not isinstance(tensor, DTensor) or (coordinate := tensor.device_mesh.get_coordinate()) is None:
        return None
    size, offset = list(tensor.shape), [0] * tensor.ndim
    for mesh_dim, placement in enumerate(tensor.placements):
        if type(placement) is Shard:
            dim = placement.dim
            chunk = -(-size[dim] // tensor.device_mesh.size(mesh_dim))
            begin = min(size[dim], coordinate[mesh_dim] * chunk)
            offset[dim] += begin
            size[dim] = min(chunk, size[dim] - begin)
        elif type(placement) is not Replicate:
            return None
    if size != list(tensor._local_tensor.shape):
        return None
    return Place(whole=tuple(tensor.shape), offset=tuple(offset))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that holds this process's bytes. UsageError for wrappers other than DTensor."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and not isinstance(tensor, torch.nn.Parameter):
        kind = type(tensor)
        raise UsageError(
            f"a tensor of type {kind.__module__}.{kind.__qualname__} cannot be captured bit for bit: "
            "keep quantized or wrapped tensors out of the protected model and optimizer"
        )
    return tensor
