"""Process groups that stay the same objects while the backends inside them are replaced."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, Store
from torch.distributed import ProcessGroup

from hotswap.comm import p2p, sockets
from hotswap.comm.gloo import REBUILD, GlooAdapter, GlooLink
from hotswap.comm.meeting import DeadlineMeeting
from hotswap.comm.plug import Plug
from hotswap.comm.port import AbortReport, Adapter, ConnectReport, GroupSpec, Link, Rendezvous
from hotswap.comm.refusal import Refusal
from hotswap.comm.rouse import rouse
from hotswap.comm.transports import JoinedLink, Transports
from hotswap.core.keep import GroupState
from hotswap.core.progress import GroupProgress
from hotswap.core.types import Generation, Slot
from hotswap.errors import Fenced, PeerUnreachable, UsageError

BACKEND_NAME = "hotswap"
DEVICES = ("cuda", "cpu")
"""Types of device whose collectives go through hotswap; a group's default backend is that of the first."""
CONTROL_KEY = "hotswap.control"
"""Key of the private group of all slots that the gate uses."""
CONNECT_TIMEOUT_S = 60.0
PARK_GRACE_S = 0.02
"""How long a main thread may take to park once its own groups are shut, before all others are shut as well."""
REFUSE_GRACE_S = 0.005
"""How long a main thread may take to run into groups that refuse, and out of an operation it has begun, before they are shut."""
ROUSE_INTERVAL_S = 0.05
"""How often a main thread that has not parked, all its groups being shut, is freed from operations that gloo forgot."""
RETIRE_THREAD = "hotswap-retire"


@dataclass(frozen=True, kw_only=True)
class _Recorded:
    group: ProcessGroup
    spec: GroupSpec


class Groups:
    """All process groups of this process; ``rank == slot`` for ever.

    The main thread calls everything but ``abort``, which belongs to the thread that hears of the end of a generation.
    The order of a swap: ``abort`` -> the main thread parks -> ``counts`` -> ``detach`` -> ``connect`` -> ``retire``.
    """

    def __init__(
        self,
        *,
        slot: Slot,
        world_size: int,
        host: str = "127.0.0.1",
        timeout_s: float = 600.0,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        allow_release: bool = True,
        device: torch.device | None = None,
    ) -> None:
        """*host* is the numeric address at which the other slots reach this one; *timeout_s* bounds each operation.

        *device* is this process' GPU: its tensors travel by NCCL, those in host memory by gloo. None: all by gloo.
        *allow_release* = False makes every swap use a new backend type value (see ``plug``).
        """
        if not 0 <= slot < world_size:
            raise UsageError(f"slot {slot} is not in a world of {world_size}")
        _check_numeric(host)
        self._slot = slot
        self._world_size = world_size
        self._host = host
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._device = device
        self._plug = Plug(DEVICES, backends_max=1 if device is None else 2, allow_release=allow_release)
        self._refusal = Refusal()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._created: list[Any] = []
        self._links: dict[str, Link] = {}
        self._old: list[Link] = []
        self._adapter: Adapter | None = None
        self._generation: Generation | None = None
        self._gate: tuple[Any, torch.Tensor] | None = None
        self._gate_options: Any = dist.AllreduceOptions()
        self._gate_options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._no_store: Store = _NoStore()  # c10d keeps the C++ half only

    # ---- setting up ---------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Make ``torch.distributed`` ready without any communication; all groups created from now on are detached."""
        if dist.is_initialized():
            raise UsageError(
                "torch.distributed is already initialised; call hotswap.init() instead of init_process_group(), and before it"
            )
        if BACKEND_NAME not in dist.Backend.backend_list:
            dist.Backend.register_backend(BACKEND_NAME, _create_detached, extended_api=True, devices=list(DEVICES))
        _installed[:] = [self]
        p2p.install()
        gloo = GlooAdapter(
            host=self._host, timeout_s=self._timeout_s, devices=DEVICES if self._device is None else ("cpu",)
        )
        self._adapter = gloo if self._device is None else Transports([self._nccl(self._device), gloo])
        timeout = datetime.timedelta(seconds=self._timeout_s)
        dist.init_process_group(
            BACKEND_NAME, store=self._no_store, rank=self._slot, world_size=self._world_size, timeout=timeout
        )
        self._self_test()

    def _nccl(self, device: torch.device) -> Adapter:
        if not dist.is_nccl_available():
            raise UsageError(f"this torch build has no NCCL, which tensors on {device} need; hide the GPUs to use gloo")
        from hotswap.comm.nccl import NcclAdapter  # its names are missing in torch builds without NCCL

        return NcclAdapter(device=device, timeout_s=self._timeout_s)

    def swaps_left(self) -> int | None:
        """How many more times backends can be replaced in this process; None is unlimited."""
        return self._plug.swaps_left()

    def close(self) -> None:
        """Undo ``install``: end all groups of this process. The peers' operations fail."""
        self.detach()
        dist.destroy_process_group()
        self._created.clear()
        self.retire().join()

    def _self_test(self) -> None:
        """Show on the world group that operations reach a backend that was plugged in."""
        group = dist.group.WORLD
        assert group is not None
        gloo = GlooAdapter(host=self._host, timeout_s=self._timeout_s, devices=DEVICES, swap=REBUILD)
        link = gloo.form_alone(GroupSpec(key="self-test", members=(self._slot,), rank=0))
        self._plug.put([(group, link.backends)])
        dist.all_reduce(torch.ones(1))
        reached = link.issued()
        self._plug.put([(group, _detached(self._slot, self._world_size))])
        dist.all_reduce(torch.ones(1))
        if reached != 1 or link.issued() != 1:
            raise UsageError(
                f"with torch {torch.__version__} a replaced backend does not take effect; use a torch version that hotswap's tests cover"
            )
        gloo.retire([link])

    # ---- the life of a generation -------------------------------------------------------------------------------

    def connect(
        self, generation: Generation, rendezvous: Rendezvous, keep: frozenset[str] = frozenset()
    ) -> ConnectReport:
        """Give all groups real backends, except those in *keep*, which go on with theirs. Collective over all slots.

        Raises PeerUnreachable when a peer does not come, and Fenced when this generation ends meanwhile; in both cases
        no group has changed and the way on is ``detach`` and the next generation.
        """
        began = time.monotonic()
        assert self._adapter is not None, "connect before install"
        recorded = self._live()
        specs = [item.spec for item in recorded]
        if self._world_size > 1:
            specs.append(GroupSpec(key=CONTROL_KEY, members=tuple(range(self._world_size)), rank=self._slot))
        kept = [spec.key for spec in specs if spec.key in keep and spec.key in self._links]
        missing = keep.intersection(spec.key for spec in specs).difference(kept)
        if missing:
            raise UsageError(f"groups {sorted(missing)} can not be kept: slot {self._slot} has no connection in them")
        meeting = DeadlineMeeting(
            rendezvous, generation=generation, slot=self._slot, timeout_s=self._connect_timeout_s, stop=self._stop
        )
        meeting.check()
        self._adapter.settle(self._old)
        formed = self._adapter.form([spec for spec in specs if spec.key not in kept], meeting)
        self._adopt(formed, recorded)
        self._generation = generation
        ms = (time.monotonic() - began) * 1e3
        return ConnectReport(generation=generation, formed=tuple(formed), kept=tuple(kept), ms=ms)

    def check(self) -> None:
        """Safe point: raise Fenced when this generation has ended."""
        if self._stop.is_set():
            raise Fenced(f"generation {self._generation} has ended")

    def gate(self, proposal: int = 0) -> int:
        """Return only when every slot has come here in this generation; the largest of all slots' proposals."""
        self.check()
        self.begin_gate(proposal)
        return self.pass_gate()

    def begin_gate(self, proposal: int) -> None:
        """Take part in the gate without waiting for the others. From any thread, but not while this slot is in one."""
        link = self._links.get(CONTROL_KEY)
        # A tensor of its own: what an aborted gate still writes must not reach the next one.
        tensor = torch.tensor([proposal], dtype=torch.int64)
        work = None if link is None else link.backends["cpu"].allreduce([tensor], self._gate_options)
        self._gate = work, tensor

    def pass_gate(self) -> int:
        """Return when every slot has begun this gate; the largest proposal. Fenced if the generation ends, PeerUnreachable at the time-out."""
        assert self._gate is not None, "pass_gate comes after begin_gate"
        work, tensor = self._gate
        self.check()
        try:
            if work is not None:
                work.wait()
        except RuntimeError as error:
            self.check()
            raise PeerUnreachable(
                f"a slot did not come to the gate of generation {self._generation}: {error}"
            ) from error
        self._gate = None
        return int(tensor[0])

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """As many 64-bit numbers of every slot, in the order of the slots."""
        self.check()
        link = self._links.get(CONTROL_KEY)
        if link is None:
            return [[*numbers]]
        own = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        found = [torch.empty_like(own) for _ in range(self._world_size)]
        try:
            link.backends["cpu"].allgather([found], [own]).wait()
        except RuntimeError as error:
            self.check()
            raise PeerUnreachable(
                f"a slot did not come to the comparison of generation {self._generation}: {error}"
            ) from error
        return [row.tolist() for row in found]

    def abort(
        self,
        *,
        parked: threading.Event,
        replaced: frozenset[Slot],
        settle_s: float,
        deadline_s: float,
        grace_s: float = PARK_GRACE_S,
    ) -> AbortReport:
        """End this generation's communication from another thread, so that the main thread gets to park.

        First the stop flag, then *settle_s* for every slot to run into a safe point or a blocking operation: a rank that
        is writing when its connection goes down may not notice. Then the groups of *replaced* slots are shut, and all
        others only when the main thread does not park within *grace_s* after that. Groups refuse new operations before
        they are shut (see ``refusal``), until ``detach``.
        """
        began = time.monotonic()
        self._stop.set()
        time.sleep(settle_s)
        with self._lock:
            links = dict(self._links)
        first = {key for key, link in links.items() if replaced.intersection(link.spec.members)}
        aborted = self._shut(links, first, parked)
        if not parked.wait(min(grace_s, deadline_s)):
            aborted |= self._shut(links, set(links) - first, parked)
        roused = self._wait_parked(parked, began + settle_s + deadline_s)
        return AbortReport(aborted=aborted, parked=parked.is_set(), roused=roused, ms=(time.monotonic() - began) * 1e3)

    def counts(self) -> dict[str, GroupState]:
        """What this slot knows about each connected group; meaningful once the main thread has parked."""
        groups = {item.spec.key: item.group for item in self._live()}
        return {
            key: GroupState(
                members=link.spec.members,
                issued=link.issued(),
                intact=link.intact() and not (key in groups and p2p.used(groups[key])),
            )
            for key, link in self._links.items()
        }

    def issued(self) -> tuple[int, int]:
        """How many operations were started in all groups together, and how many in the gate's. From any thread."""
        with self._lock:
            links = dict(self._links)
        return sum(map(_operations, links.values())), _operations(links[CONTROL_KEY]) if CONTROL_KEY in links else 0

    def issued_by_script(self) -> int:
        """How many were started by the script: all but the gate's, which begins when it may. From any thread."""
        issued, gate = self.issued()
        return issued - gate

    def progress(self) -> dict[str, GroupProgress]:
        """The same for each group whose members can be compared. From any thread.

        Who sends to whom says nothing about how many operations a third member should have started.
        """
        groups = {item.spec.key: item.group for item in self._live()}
        with self._lock:
            links = {key: link for key, link in self._links.items() if key in groups and len(link.spec.members) > 1}
        return {
            key: GroupProgress(members=link.spec.members, issued=_operations(link))
            for key, link in links.items()
            if len(link.spec.members) == 2 or not p2p.used(groups[key])
        }

    def unanswered(self) -> bool:
        """Whether some connection carries data that its other end's host does not acknowledge. From any thread."""
        with self._lock:
            links = list(self._links.values())
        parts = [part for link in links for part in (link.parts if isinstance(link, JoinedLink) else (link,))]
        found = {socket_id for part in parts if isinstance(part, GlooLink) for socket_id in part.socket_ids}
        return any(map(sockets.is_unanswered, found))

    def detach(self, keep: frozenset[str] = frozenset()) -> None:
        """Turn all groups but those in *keep* into local no-ops, forget half-made operations, clear the stop flag."""
        recorded = self._live()
        dropped = [item for item in recorded if item.spec.key not in keep]
        self._refusal.lift()
        self._plug.put([(item.group, _detached(item.spec.rank, len(item.spec.members))) for item in dropped])
        with self._lock:
            gone = [key for key in self._links if key not in keep]
            self._old.extend(self._links.pop(key) for key in gone)
        for item in dropped:
            p2p.forget(item.group)
        self.clear_pending()
        self._stop.clear()

    def clear_pending(self) -> None:
        """Forget operations that an exception left queued in c10d's coalescing; later ones would be queued behind them."""
        dist.distributed_c10d._world.pg_coalesce_state.clear()

    def retire(self) -> threading.Thread:
        """Free what replaced backends hold, in a thread of its own: it takes longer than forming new ones."""
        with self._lock:
            old, self._old = self._old, []
        thread = threading.Thread(target=self._retire, args=(old,), name=RETIRE_THREAD, daemon=True)
        thread.start()
        return thread

    # ---- inside -------------------------------------------------------------------------------------------------

    def _live(self) -> list[_Recorded]:
        """The groups that this slot is a member of and that were not destroyed, in the order of their creation."""
        by_name = {
            name: group
            for group, name in list(dist.distributed_c10d._world.pg_names.items())
            if isinstance(group, ProcessGroup)
        }
        return [
            _Recorded(group=by_name[options.group_id], spec=_spec_of(options))
            for options in self._created
            if options.group_id in by_name
        ]

    def _adopt(self, formed: Any, recorded: Sequence[_Recorded]) -> None:
        replaced = [item for item in recorded if item.spec.key in formed]
        self._plug.put([(item.group, formed[item.spec.key].backends) for item in replaced])
        for item in replaced:
            p2p.forget(item.group)
        with self._lock:
            self._old.extend(self._links.pop(key) for key in formed if key in self._links)
            self._links.update(formed)

    def _wait_parked(self, parked: threading.Event, deadline: float) -> int:
        """Wait for the main thread; every now and then, end what it may wait for in vain. How many operations."""
        roused = 0
        while not parked.wait(max(0.0, min(ROUSE_INTERVAL_S, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                break
            roused += rouse(threading.main_thread().ident or 0, p2p.newest())
        return roused

    def _shut(self, links: dict[str, Link], keys: set[str], parked: threading.Event) -> frozenset[str]:
        assert self._adapter is not None
        if not parked.is_set():
            self._refusal.begin(item.group for item in self._live() if item.spec.key in keys)
            parked.wait(REFUSE_GRACE_S)
        self._adapter.abort([links[key] for key in keys])
        return frozenset(keys)

    def _retire(self, old: list[Link]) -> None:
        assert self._adapter is not None
        self._adapter.retire(old)


_installed: list[Groups] = []
"""The one that c10d's creator callback, which is registered once per process, works for."""


def _create_detached(options: Any, backend_options: Any) -> Any:
    """Record a new group; c10d calls this for each."""
    _installed[0]._created.append(options)
    return _detached_backend(options.group_rank, options.group_size)


def _detached_backend(rank: int, size: int) -> Any:
    fake: Any = FakeProcessGroup  # torch's type stub lacks the options
    return fake._create_internal(rank, size, fake.Options())


def _detached(rank: int, size: int) -> dict[str, Any]:
    return dict.fromkeys(DEVICES, _detached_backend(rank, size))


def _operations(link: Link) -> int:
    """Of all transports together: their program is the same on all members, so this can be compared."""
    parts = link.parts if isinstance(link, JoinedLink) else (link,)
    return sum(part.issued() for part in parts)


def _spec_of(options: Any) -> GroupSpec:
    """c10d numbers groups per process, so different slots may use one name for groups of different members."""
    # c10d says nothing about the members of the default group.
    members = tuple(int(slot) for slot in options.global_ranks_in_group) or tuple(range(options.group_size))
    digest = hashlib.sha256(repr(members).encode()).hexdigest()[:8]
    return GroupSpec(key=f"{options.group_id}@{digest}", members=members, rank=int(options.group_rank))


def _check_numeric(host: str) -> None:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise UsageError(
            f"host {host!r} is not a numeric address; names are not looked up, since a slow name server would stall a recovery"
        ) from None


class _NoStore(Store):
    """Stands in for c10d's store, which nothing needs as long as all groups use this backend."""

    def _refuse(self, *_: Any) -> Any:
        raise UsageError(
            "a process group asked for torch.distributed's store; create groups without naming another backend than "
            f"{BACKEND_NAME!r} (Megatron: create_gloo_process_groups=False) and leave TORCH_DIST_INIT_BARRIER unset"
        )

    set = get = wait = add = check = compare_set = delete_key = _refuse  # type: ignore[assignment]
