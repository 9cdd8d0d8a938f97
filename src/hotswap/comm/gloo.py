"""The gloo adapter.

All groups with the same members share one gloo device (one listener, one event loop): fewer threads than one each, yet
every socket can be told apart by the device's port. The addresses of all groups travel in one message per slot.
"""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroupGloo

from hotswap.comm import sockets
from hotswap.comm.formation import Formation
from hotswap.comm.port import GroupSpec, Link, Meeting
from hotswap.comm.sockets import SockAddr, SocketId, TcpSocket
from hotswap.core.types import Slot
from hotswap.errors import HotswapError, PeerFault, PeerUnreachable

TOPIC = "gloo"
THREADS_PER_GROUP = 2
"""As in plain torch. With one, the scheduler of a busy machine lets a lone hard-working thread wait for its turn."""
Members = frozenset[Slot]


class GlooLink:
    """One formed gloo group."""

    def __init__(self, spec: GroupSpec, backend: Any, store: Store, devices: Sequence[str]) -> None:
        """*store* is kept, for C++ would call into a dead object otherwise."""
        self._spec = spec
        self._devices = devices
        self._backend = backend
        self._store = store
        self.socket_ids: frozenset[SocketId] = frozenset()
        self.touched = False

    @property
    def spec(self) -> GroupSpec:
        """The group."""
        return self._spec

    @property
    def backends(self) -> Mapping[str, Any]:
        """The c10d backend, for every kind of tensor it knows."""
        return dict.fromkeys(self._devices, self._backend)

    def issued(self) -> int:
        """Operations started, collectives and point-to-point alike."""
        return int(self._backend._get_sequence_number_for_group())

    def intact(self) -> bool:
        """Whether all connections of all groups with these members are up."""
        return not self.touched and all(map(sockets.is_established, self.socket_ids))


class GlooAdapter:
    """Forms gloo groups without a TCPStore and without asking a name server."""

    def __init__(self, *, host: str, timeout_s: float, devices: Sequence[str]) -> None:
        """*host* is this machine's numeric address; *timeout_s* is how long an operation may take.

        *devices* are the types of device whose tensors the groups are for.
        """
        self._devices = tuple(devices)
        self._host = host
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._alone = self._new_device()
        self._abandoned: list[Formation[GlooLink]] = []

    def form_alone(self, spec: GroupSpec) -> GlooLink:
        """Form a group of which this slot is the only member."""
        store = _OwnStore()
        backend = ProcessGroupGloo(store, 0, 1, self._options(self._alone, self._timeout))
        return GlooLink(spec, backend, store, self._devices)

    def form(self, specs: Sequence[GroupSpec], meeting: Meeting) -> Mapping[str, Link]:
        """Form all groups at once, each in its own thread, since every constructor waits for its peers."""
        links: dict[str, GlooLink] = {spec.key: self.form_alone(spec) for spec in specs if len(spec.members) == 1}
        shared = [spec for spec in specs if len(spec.members) > 1]
        if shared:
            devices = {members: self._new_device() for members in {frozenset(spec.members) for spec in shared}}
            directory = _Directory(shared, meeting)
            connect_timeout = datetime.timedelta(seconds=max(meeting.remaining_s(), 0.001))

            def form_one(spec: GroupSpec) -> GlooLink:
                store = _DirectoryStore(spec, directory)
                options = self._options(devices[frozenset(spec.members)], connect_timeout)
                backend = ProcessGroupGloo(store, spec.rank, len(spec.members), options)
                backend._set_default_timeout(self._timeout)
                return GlooLink(spec, backend, store, self._devices)

            formation = Formation(form_one, shared)
            try:
                formed = formation.wait(meeting)
            except PeerFault:
                self._abandoned.append(formation)
                raise
            _assign_sockets(formed, directory)
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
            links.pop()
        while self._abandoned:
            self._abandoned.pop()

    def _new_device(self) -> Any:
        return ProcessGroupGloo.create_device(hostname=self._host, lazy_init=False)

    def _options(self, device: Any, timeout: datetime.timedelta) -> Any:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [device]
        options._threads = THREADS_PER_GROUP
        options._timeout = timeout
        return options


class _OwnStore(Store):
    """The store of a group of one: it only ever reads back what it wrote."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._values[key] = value

    def get(self, key: str) -> bytes:
        return self._values[key]

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Everything that is asked for is there."""


class _DirectoryStore(Store):
    """What one gloo group sees of the addresses.

    gloo sets ``<device>/<rank>`` once, then waits for and gets each rank's.
    """

    def __init__(self, spec: GroupSpec, directory: _Directory) -> None:
        super().__init__()
        self._spec = spec
        self._directory = directory

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._directory.enter(self._spec, bytes(value))

    def get(self, key: str) -> bytes:
        rank = int(key.rpartition("/")[2])
        return self._directory.find(self._spec, self._spec.members[rank])

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        for key in keys:
            self.get(key)


class _Directory:
    """Every slot's addresses of all groups that are being formed: sent once, when the last own one is known."""

    def __init__(self, specs: Sequence[GroupSpec], meeting: Meeting) -> None:
        """Made when the devices already listen."""
        self._meeting = meeting
        self._listening = [tcp.local for tcp in sockets.open_tcp_sockets() if tcp.listening]
        self._missing = {spec.key for spec in specs}
        self._own: dict[str, bytes] = {}
        self._listeners: dict[str, SockAddr] = {}
        self._lock = threading.Lock()
        self._pages: dict[Slot, dict[str, Any]] = {}

    def enter(self, spec: GroupSpec, address: bytes) -> None:
        listener = self._listener_in(address)
        with self._lock:
            self._own[spec.key] = address
            self._listeners[spec.key] = listener
            self._missing.discard(spec.key)
            complete = not self._missing
        if complete:
            page = {key: [value.hex(), *self._listeners[key]] for key, value in self._own.items()}
            self._meeting.publish(TOPIC, json.dumps(page).encode())

    def _listener_in(self, address: bytes) -> SockAddr:
        """The listening socket that a gloo address speaks of: the one of this process whose ``sockaddr`` it contains."""
        for listener in self._listening:
            if sockets.packed_address(listener) in address:
                return listener
        raise HotswapError(
            "gloo published an address at which this process does not listen; use a torch version that is tested"
        )

    def find(self, spec: GroupSpec, slot: Slot) -> bytes:
        return self._own[spec.key] if slot == self._meeting.slot else bytes.fromhex(self._entry(spec, slot)[0])

    def listener(self, spec: GroupSpec, slot: Slot) -> SockAddr:
        if slot == self._meeting.slot:
            return self._listeners[spec.key]
        _, host, port = self._entry(spec, slot)
        return str(host), int(port)

    def _entry(self, spec: GroupSpec, slot: Slot) -> list[Any]:
        page = self._pages.get(slot)
        if page is None:
            page = self._pages[slot] = json.loads(self._meeting.lookup(TOPIC, slot))
        if spec.key not in page:
            raise PeerUnreachable(
                f"slot {slot} does not take part in group {spec.key}; all slots must create the same groups in the same order"
            )
        entry: list[Any] = page[spec.key]
        return entry


def _assign_sockets(links: Sequence[GlooLink], directory: _Directory) -> None:
    """Give every link the sockets of its device: either end of each of its connections is a listener of the group."""
    connected = [tcp for tcp in sockets.open_tcp_sockets() if tcp.remote is not None]
    by_members: dict[Members, frozenset[SocketId]] = {}
    for link in links:
        members = frozenset(link.spec.members)
        if members not in by_members:
            by_members[members] = _sockets_of(link.spec, directory, connected)
        link.socket_ids = by_members[members]


def _sockets_of(spec: GroupSpec, directory: _Directory, connected: Sequence[TcpSocket]) -> frozenset[SocketId]:
    own = directory.listener(spec, spec.members[spec.rank])
    peers = {directory.listener(spec, slot) for slot in spec.members} - {own}
    return frozenset(tcp.id for tcp in connected if tcp.local == own or tcp.remote in peers)
