"""The NCCL adapter.

Communicators are made when a group is first used, as in plain torch, except for those that were in use before a swap:
they are made and used once while the job stands still anyway, all at the same time. One after the other they would take
seconds, because peers connect at the first use (``benchmarks/nccl_connect.py``).
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from hotswap.comm.formation import Formation
from hotswap.comm.port import GroupSpec, Link, Meeting
from hotswap.errors import PeerFault

log = logging.getLogger("hotswap.comm")
TOPIC = "nccl"
RETIRE_S = 30.0
"""How long the end of one aborted communicator is waited for before its memory is given up."""
SETTINGS = {
    # Torch's own watchdog would end this process because of a peer's death, or abort behind our back.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # Its monitor ends the process when an abort takes long.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
}


class NcclLink:
    """One NCCL group."""

    def __init__(self, spec: GroupSpec, backend: Any, store: Store) -> None:
        """*store* is kept, for C++ would call into a dead object otherwise."""
        self._spec = spec
        self._backend = backend
        self._store = store
        self.aborted = False

    @property
    def spec(self) -> GroupSpec:
        """The group."""
        return self._spec

    @property
    def backends(self) -> Mapping[str, Any]:
        """For tensors on GPUs."""
        return {"cuda": self._backend}

    def issued(self) -> int:
        """Collectives started since the group was formed, but for the one that connected it."""
        return int(self._backend._get_sequence_number_for_group())

    def intact(self) -> bool:
        """Whether no abort touched it. What all members have issued the same number of, all of them also finish."""
        return not self.aborted

    def abort(self) -> None:
        """End its kernels, here; frees what the communicator holds on the device."""
        self._backend.abort()


class NcclAdapter:
    """Forms NCCL groups over the rendezvous of a generation."""

    def __init__(self, *, device: torch.device, timeout_s: float) -> None:
        """*device* is this process' GPU; *timeout_s* is how long a peer may take to come to the first use of a group."""
        for name, value in SETTINGS.items():
            if os.environ.get(name, value) != value:
                log.warning("%s=%s is not compatible with hotswap: set to %s", name, os.environ[name], value)
            os.environ[name] = value
        self._device = device
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._used: set[str] = set()
        self._abandoned: list[Formation[NcclLink]] = []
        self._aborting: list[threading.Thread] = []

    def form(self, specs: Sequence[GroupSpec], meeting: Meeting) -> Mapping[str, Link]:
        """Make all groups, and connect those that some member has used in an earlier generation."""
        wanted = self._wanted(specs, meeting)
        later = meeting.later(self._timeout.total_seconds())
        links: dict[str, Link] = {spec.key: self._make(spec, later) for spec in specs if spec.key not in wanted}
        busy = [spec for spec in specs if spec.key in wanted]
        made = {spec.key: self._make(spec, later) for spec in busy}
        formation = Formation(lambda spec: self._connect(made[spec.key]), busy)
        try:
            links.update({link.spec.key: link for link in formation.wait(meeting)})
        except PeerFault:
            self.abort(made.values())
            self._abandoned.append(formation)
            raise
        return links

    def abort(self, links: Iterable[Link]) -> None:
        """Abort all of them at the same time: one after the other they deadlock, since peers abort in another order.

        Kernels end at once. What else an abort does takes half a second (NCCL's proxy threads look for it that often) and
        is nothing to wait for.
        """
        for link in links:
            assert isinstance(link, NcclLink), link
            if not link.aborted:
                link.aborted = True  # here, and not when the thread gets to it: nobody may take it for whole meanwhile
                thread = threading.Thread(target=link.abort, name=f"hotswap-abort-{link.spec.key}", daemon=True)
                thread.start()
                self._aborting.append(thread)

    def settle(self, links: Iterable[Link]) -> None:
        """End what still runs on the device in these groups, and wait for it."""
        links = list(links)
        self._used.update(link.spec.key for link in links if link.issued())
        self.abort(links)
        torch.cuda.synchronize(self._device)

    def retire(self, links: list[Link]) -> None:
        """Wait for the aborts, then drop the backends; their destructors join torch's watchdog threads."""
        while self._aborting:
            self._aborting.pop().join(RETIRE_S)
        while links:
            links.pop()
        while self._abandoned:
            self._abandoned.pop()

    def _wanted(self, specs: Sequence[GroupSpec], meeting: Meeting) -> set[str]:
        """Groups that any of their members has used before: a replacement does not know."""
        shared = [spec for spec in specs if len(spec.members) > 1]
        meeting.publish(TOPIC, json.dumps(sorted(self._used)).encode())
        used = {slot: self._used if slot == meeting.slot else set() for slot in {s for x in shared for s in x.members}}
        for slot in used:
            if slot != meeting.slot:
                used[slot] = set(json.loads(meeting.lookup(TOPIC, slot)))
        return {spec.key for spec in shared if any(spec.key in used[slot] for slot in spec.members)}

    def _make(self, spec: GroupSpec, meeting: Meeting) -> NcclLink:
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        options.global_ranks_in_group = list(spec.members)
        options.group_name = spec.key
        store = _MeetingStore(spec.key, meeting)
        return NcclLink(spec, dist.ProcessGroupNCCL(store, spec.rank, len(spec.members), options), store)

    def _connect(self, link: NcclLink) -> NcclLink:
        """Make the communicator and use it, for the first use is what takes time."""
        torch.cuda.set_device(self._device)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            link.backends["cuda"].allreduce([torch.ones(1, device=self._device)]).wait()
        stream.synchronize()
        return link


class _MeetingStore(Store):
    """What NCCL groups exchange their identities through: one member sets a value, the others get it."""

    def __init__(self, group: str, meeting: Meeting) -> None:
        super().__init__()
        self._group = group
        self._meeting = meeting

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._meeting.post(f"{TOPIC}/{self._group}/{key}", bytes(value))

    def get(self, key: str) -> bytes:
        return self._meeting.read(f"{TOPIC}/{self._group}/{key}")

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        for key in keys:
            self.get(key)
