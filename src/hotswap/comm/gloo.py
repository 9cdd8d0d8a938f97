"""The gloo adapter.

All groups with the same members share one gloo device (one listener, one event loop): fewer threads than one each, yet
every socket can be told apart by the device's port. The addresses of all groups travel in one message per slot.

A group that was connected before is connected again in one of two ways: *rebuild* makes a new backend, *reconfigure*
gives the old one new connections (see that module). A backend that cannot be connected anew is replaced either way.
"""

from __future__ import annotations

import datetime
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroupGloo

from hotswap.comm import reconfigure, sockets
from hotswap.comm.addresses import Directory, DirectoryStore, OwnStore, Pages
from hotswap.comm.formation import Formation
from hotswap.comm.port import GroupSpec, Link, Meeting
from hotswap.comm.sockets import SocketId, TcpSocket
from hotswap.core.types import Slot
from hotswap.errors import PeerFault, UsageError

REBUILD, RECONFIGURE = "rebuild", "reconfigure"
SWAP = "HOTSWAP_GLOO_SWAP"
"""Environment variable: ``reconfigure`` to have backends connected anew where torch can; must be the same everywhere."""
HANDLES_TOPIC = "gloo-handles"
THREADS_PER_GROUP = 2
"""As in plain torch. With one, the scheduler of a busy machine lets a lone hard-working thread wait for its turn."""
Members = frozenset[Slot]


class GlooLink:
    """One formed gloo group."""

    def __init__(
        self, spec: GroupSpec, backend: Any, store: Store, devices: Sequence[str], gloo_device: Any = None
    ) -> None:
        """*store* is kept, for C++ would call into a dead object otherwise."""
        self._spec = spec
        self._devices = devices
        self.backend = backend
        self.store = store
        self.gloo_device = gloo_device
        self.socket_ids: frozenset[SocketId] = frozenset()
        self.touched = False

    @property
    def spec(self) -> GroupSpec:
        """The group."""
        return self._spec

    @property
    def backends(self) -> Mapping[str, Any]:
        """The c10d backend, for every kind of tensor it knows."""
        return dict.fromkeys(self._devices, self.backend)

    def issued(self) -> int:
        """Operations started, collectives and point-to-point alike."""
        return int(self.backend._get_sequence_number_for_group())

    def turned_to(self, directory: Directory) -> GlooLink:
        """A link of the next generation with the same backend."""
        assert isinstance(self.store, DirectoryStore)
        self.store.directory = directory
        return GlooLink(self._spec, self.backend, self.store, self._devices, self.gloo_device)

    def intact(self) -> bool:
        """Whether all connections of all groups with these members are up."""
        return not self.touched and all(map(sockets.is_established, self.socket_ids))


class GlooAdapter:
    """Forms gloo groups without a TCPStore and without asking a name server."""

    def __init__(self, *, host: str, timeout_s: float, devices: Sequence[str], swap: str | None = None) -> None:
        """*host* is this machine's numeric address; *timeout_s* is how long an operation may take.

        *devices* are the types of device whose tensors the groups are for. *swap* is how groups that were connected before are connected again; None asks the environment.
        """
        self._devices = tuple(devices)
        self._host = host
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._alone = self._new_device()
        self._abandoned: list[Formation[GlooLink]] = []
        self._shelf: _Shelf | None = None
        if _checked(swap or os.environ.get(SWAP) or REBUILD) == RECONFIGURE and self._can_reconfigure():
            self._shelf = _Shelf()

    @property
    def swap(self) -> str:
        """How groups are connected again: *reconfigure* only if this torch can."""
        return REBUILD if self._shelf is None else RECONFIGURE

    def form_alone(self, spec: GroupSpec) -> GlooLink:
        """Form a group of which this slot is the only member."""
        store = OwnStore()
        backend = ProcessGroupGloo(store, 0, 1, self._options(self._alone, self._timeout))
        return GlooLink(spec, backend, store, self._devices)

    def form(self, specs: Sequence[GroupSpec], meeting: Meeting) -> Mapping[str, Link]:
        """Form all groups at once, each in its own thread, since every constructor waits for its peers."""
        links: dict[str, GlooLink] = {spec.key: self.form_alone(spec) for spec in specs if len(spec.members) == 1}
        shared = [spec for spec in specs if len(spec.members) > 1]
        if shared:
            formed = self._form_shared(shared, meeting)
            links.update({link.spec.key: link for link in formed})
        return links

    def abort(self, links: Iterable[Link]) -> None:
        """Shut the connections for reading; gloo has no abort of its own."""
        for link in links:
            assert isinstance(link, GlooLink), link
            link.touched = True
            for socket_id in link.socket_ids:
                sockets.shut_for_reading(socket_id)

    def settle(self, links: Iterable[Link]) -> None:
        """Nothing runs on a device."""

    def retire(self, links: list[Link]) -> None:
        """Drop the backends; their destructors join gloo's threads and close its descriptors, without the GIL."""
        while links:
            link = links.pop()
            if self._shelf is not None:
                self._shelf.forget(link)
        while self._abandoned:
            self._abandoned.pop()

    def _form_shared(self, specs: Sequence[GroupSpec], meeting: Meeting) -> list[GlooLink]:
        old = self._reusable(specs)
        devices = {frozenset(link.spec.members): link.gloo_device for link in old.values()}
        for members in {frozenset(spec.members) for spec in specs}.difference(devices):
            devices[members] = self._new_device()
        directory = Directory(specs, meeting)
        if self._shelf is None:
            form_one = self._rebuilder(devices, directory, meeting)
        else:
            form_one = self._reconfigurer(specs, old, devices, directory, meeting)
        formation = Formation(form_one, specs)
        try:
            formed = formation.wait(meeting)
        except PeerFault:
            self._abandoned.append(formation)
            raise
        _assign_sockets(formed, directory)
        if self._shelf is not None:
            self._shelf.put(formed)
        return formed

    def _rebuilder(
        self, devices: Mapping[Members, Any], directory: Directory, meeting: Meeting
    ) -> Callable[[GroupSpec], GlooLink]:
        connect_timeout = datetime.timedelta(seconds=max(meeting.remaining_s(), 0.001))

        def form_one(spec: GroupSpec) -> GlooLink:
            store = DirectoryStore(spec, directory)
            options = self._options(devices[frozenset(spec.members)], connect_timeout)
            backend = ProcessGroupGloo(store, spec.rank, len(spec.members), options)
            backend._set_default_timeout(self._timeout)
            return GlooLink(spec, backend, store, self._devices)

        return form_one

    def _reconfigurer(
        self,
        specs: Sequence[GroupSpec],
        old: Mapping[str, GlooLink],
        devices: Mapping[Members, Any],
        directory: Directory,
        meeting: Meeting,
    ) -> Callable[[GroupSpec], GlooLink]:
        links: dict[str, GlooLink] = {}
        for spec in specs:
            device = devices[frozenset(spec.members)]
            links[spec.key] = (
                old[spec.key].turned_to(directory) if spec.key in old else self._unconnected(spec, device, directory)
            )
        handles = Pages(HANDLES_TOPIC, meeting)
        handles.publish({key: reconfigure.handle(link.backend) for key, link in links.items()})

        def form_one(spec: GroupSpec) -> GlooLink:
            link = links[spec.key]
            named = [str(handles.find(spec, slot)) for slot in spec.members]
            reconfigure.connect(link.backend, named, meeting.remaining_s())
            return link

        return form_one

    def _unconnected(self, spec: GroupSpec, device: Any, directory: Directory) -> GlooLink:
        store = DirectoryStore(spec, directory)
        options = self._options(device, self._timeout)
        reconfigure.enable(options)
        backend = ProcessGroupGloo(store, spec.rank, len(spec.members), options)
        return GlooLink(spec, backend, store, self._devices, device)

    def _reusable(self, specs: Sequence[GroupSpec]) -> dict[str, GlooLink]:
        """The links that these groups had before, as far as their backends can be connected anew."""
        old = self._shelf.take(specs) if self._shelf is not None else []
        return {link.spec.key: link for link in old if reconfigure.is_free(link.backend)}

    def _can_reconfigure(self) -> bool:
        """Ask a backend, not the version; what it says is put to the proof."""
        options = self._options(self._alone, self._timeout)
        if not reconfigure.enable(options):
            return False
        store = OwnStore()
        backend = ProcessGroupGloo(store, 0, 1, options)
        if not reconfigure.is_supported(backend):
            return False
        reconfigure.assert_effective(backend)
        return True

    def _new_device(self) -> Any:
        return ProcessGroupGloo.create_device(hostname=self._host, lazy_init=False)

    def _options(self, device: Any, timeout: datetime.timedelta) -> Any:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [device]
        options._threads = THREADS_PER_GROUP
        options._timeout = timeout
        return options


class _Shelf:
    """The links whose backends can be connected anew, by group."""

    def __init__(self) -> None:
        self._links: dict[str, GlooLink] = {}
        self._lock = threading.Lock()

    def put(self, links: Iterable[GlooLink]) -> None:
        with self._lock:
            self._links.update({link.spec.key: link for link in links})

    def take(self, specs: Iterable[GroupSpec]) -> list[GlooLink]:
        """Those of these groups; they come back only when they are connected again."""
        with self._lock:
            return [self._links.pop(spec.key) for spec in specs if spec.key in self._links]

    def forget(self, link: Link) -> None:
        """Nobody is going to connect this one again."""
        with self._lock:
            if self._links.get(link.spec.key) is link:
                del self._links[link.spec.key]


def _checked(swap: str) -> str:
    if swap not in (REBUILD, RECONFIGURE):
        raise UsageError(f"{SWAP}={swap} is not known; use {REBUILD} or {RECONFIGURE}")
    return swap


def _assign_sockets(links: Sequence[GlooLink], directory: Directory) -> None:
    """Give every link the sockets of its device: either end of each of its connections is a listener of the group."""
    connected = [tcp for tcp in sockets.open_tcp_sockets() if tcp.remote is not None]
    by_members: dict[Members, frozenset[SocketId]] = {}
    for link in links:
        members = frozenset(link.spec.members)
        if members not in by_members:
            by_members[members] = _sockets_of(link.spec, directory, connected)
        link.socket_ids = by_members[members]


def _sockets_of(spec: GroupSpec, directory: Directory, connected: Sequence[TcpSocket]) -> frozenset[SocketId]:
    own = directory.listener(spec, spec.members[spec.rank])
    peers = {directory.listener(spec, slot) for slot in spec.members} - {own}
    return frozenset(tcp.id for tcp in connected if tcp.local == own or tcp.remote in peers)
