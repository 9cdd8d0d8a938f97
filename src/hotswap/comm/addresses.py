"""How the addresses of all gloo groups reach the other slots, without a TCPStore.

A gloo backend takes a store in which it publishes its address and finds those of its peers. Here the store of each group
is a view of one directory, which travels in one message per slot.
"""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Sequence
from typing import Any

from torch._C._distributed_c10d import Store

from hotswap.comm import sockets
from hotswap.comm.port import GroupSpec, Meeting
from hotswap.comm.sockets import SockAddr
from hotswap.core.types import Slot
from hotswap.errors import HotswapError, PeerUnreachable

TOPIC = "gloo"


class OwnStore(Store):
    """The store of a group of one: it only ever reads back what it wrote."""

    def __init__(self) -> None:
        """Nothing is set."""
        super().__init__()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Remember a value."""
        self._values[key] = value

    def get(self, key: str) -> bytes:
        """What was set."""
        return self._values[key]

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Everything that is asked for is there."""

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:  # type: ignore[override]
        """Nobody else is there to claim a key."""
        return desired


class DirectoryStore(Store):
    """What one gloo group sees of the addresses.

    gloo sets ``<device>/<rank>`` once, then waits for and gets each rank's. Before, ``reconfigure`` claims its number.
    """

    def __init__(self, spec: GroupSpec, directory: Directory) -> None:
        """*directory* is replaced when the group is connected anew."""
        super().__init__()
        self._spec = spec
        self.directory = directory

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Publish this slot's address."""
        self.directory.enter(self._spec, bytes(value))

    def get(self, key: str) -> bytes:
        """The address of a rank."""
        rank = int(key.rpartition("/")[2])
        return self.directory.find(self._spec, self._spec.members[rank])

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:  # type: ignore[override]
        """Every generation has a directory of its own, so that no number was ever claimed in it."""
        return desired

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Return when all these ranks have published theirs."""
        for key in keys:
            self.get(key)


class Directory:
    """Every slot's addresses of all groups that are being formed: sent once, when the last own one is known."""

    def __init__(self, specs: Sequence[GroupSpec], meeting: Meeting) -> None:
        """Made when the devices already listen."""
        self._pages = Pages(TOPIC, meeting)
        self._listening = [tcp.local for tcp in sockets.open_tcp_sockets() if tcp.listening]
        self._missing = {spec.key for spec in specs}
        self._own: dict[str, bytes] = {}
        self._listeners: dict[str, SockAddr] = {}
        self._lock = threading.Lock()

    def enter(self, spec: GroupSpec, address: bytes) -> None:
        """Take down this slot's address in a group."""
        listener = self._listener_in(address)
        with self._lock:
            self._own[spec.key] = address
            self._listeners[spec.key] = listener
            self._missing.discard(spec.key)
            complete = not self._missing
        if complete:
            self._pages.publish({key: [value.hex(), *self._listeners[key]] for key, value in self._own.items()})

    def _listener_in(self, address: bytes) -> SockAddr:
        """The listening socket that a gloo address speaks of: the one of this process whose ``sockaddr`` it contains."""
        for listener in self._listening:
            if sockets.packed_address(listener) in address:
                return listener
        raise HotswapError(
            "gloo published an address at which this process does not listen; use a torch version that is tested"
        )

    def find(self, spec: GroupSpec, slot: Slot) -> bytes:
        """A slot's address in a group."""
        return self._own[spec.key] if self._is_own(spec, slot) else bytes.fromhex(self._pages.find(spec, slot)[0])

    def listener(self, spec: GroupSpec, slot: Slot) -> SockAddr:
        """Where the slot listens for the group."""
        if self._is_own(spec, slot):
            return self._listeners[spec.key]
        _, host, port = self._pages.find(spec, slot)
        return str(host), int(port)

    def _is_own(self, spec: GroupSpec, slot: Slot) -> bool:
        return slot == spec.members[spec.rank]


class Pages:
    """One message of every slot, with an entry for each of its groups."""

    def __init__(self, topic: str, meeting: Meeting) -> None:
        """*topic* names the kind of message."""
        self._topic = topic
        self._meeting = meeting
        self._pages: dict[Slot, dict[str, Any]] = {}

    def publish(self, page: dict[str, Any]) -> None:
        """This slot's own message, once."""
        self._pages[self._meeting.slot] = page
        self._meeting.publish(self._topic, json.dumps(page).encode())

    def find(self, spec: GroupSpec, slot: Slot) -> Any:
        """A slot's entry for a group; waits for its message."""
        page = self._pages.get(slot)
        if page is None:
            page = self._pages[slot] = json.loads(self._meeting.lookup(self._topic, slot))
        if spec.key not in page:
            raise PeerUnreachable(
                f"slot {slot} does not take part in group {spec.key}; all slots must create the same groups in the same order"
            )
        return page[spec.key]
