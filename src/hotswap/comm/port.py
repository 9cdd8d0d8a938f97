"""What an adapter for a transport (gloo, NCCL, ...) has to offer, and what it may use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hotswap.core.types import Generation, Slot


class Rendezvous(Protocol):
    """A key-value space of one generation, through which its members tell each other their addresses.

    Must be safe to use from several threads at once.
    """

    def set(self, key: str, value: bytes) -> None:
        """Publish *value* to all slots of the generation."""

    def get(self, key: str, timeout_s: float) -> bytes:
        """Wait for a value. Raises PeerUnreachable at the deadline, Fenced when the generation has ended."""


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """One group as its members know it."""

    key: str
    """Unique among all groups of the job."""
    members: tuple[Slot, ...]
    """All slots of the group, in group-rank order."""
    rank: int
    """This slot's rank in the group."""


class Link(Protocol):
    """One formed group: a real backend and what is needed to watch over it."""

    @property
    def spec(self) -> GroupSpec:
        """The group."""

    @property
    def backends(self) -> Mapping[str, Any]:
        """The c10d backend to plug into the group's ProcessGroup, by the type of device whose tensors it is for."""

    def issued(self) -> int:
        """Number of operations started since the group was formed."""

    def intact(self) -> bool:
        """Whether all connections are up and no abort touched any of them."""


class Adapter(Protocol):
    """Forms, aborts and frees the backends of one transport."""

    def form(self, specs: Sequence[GroupSpec], meeting: Meeting) -> Mapping[str, Link]:
        """Form all groups at once; collective over their members. All or nothing."""

    def abort(self, links: Iterable[Link]) -> None:
        """Make every operation in these groups fail soon, here and at the peers. Called from another thread."""

    def settle(self, links: Iterable[Link]) -> None:
        """Wait until no operation of these groups runs on any device, ending those that do. They are not used again."""

    def retire(self, links: list[Link]) -> None:
        """Free what the links hold and empty the list. May block for long; called off the recovery path."""


class Meeting(Protocol):
    """One generation's rendezvous with a deadline, and the way to give it up."""

    @property
    def slot(self) -> Slot:
        """This process' slot."""

    def remaining_s(self) -> float:
        """Seconds until the deadline."""

    def publish(self, topic: str, value: bytes) -> None:
        """Tell the other slots this slot's *value*."""

    def lookup(self, topic: str, slot: Slot) -> bytes:
        """Another slot's value. Raises PeerUnreachable or Fenced."""

    def post(self, key: str, value: bytes) -> None:
        """Publish a value under a key of which it does not matter who sets it."""

    def read(self, key: str) -> bytes:
        """What somebody has posted. Raises PeerUnreachable or Fenced."""

    def check(self) -> None:
        """Raise Fenced when the generation has ended meanwhile."""

    def later(self, timeout_s: float) -> Meeting:
        """The same for what happens during the generation: the deadline is *timeout_s* after the begin of each wait."""


@dataclass(frozen=True, kw_only=True)
class ConnectReport:
    """What ``Groups.connect`` did."""

    generation: Generation
    formed: tuple[str, ...]
    """Keys of the groups that got a new backend."""
    kept: tuple[str, ...]
    """Keys of the groups that went on with the backend they had."""
    ms: float


@dataclass(frozen=True, kw_only=True)
class AbortReport:
    """What ``Groups.abort`` did."""

    aborted: frozenset[str]
    """Keys of the groups whose connections were shut."""
    parked: bool
    """Whether the main thread reached its parking place before the deadline; if not, only ending the process helps."""
    roused: int
    """Operations that were ended by force because their transport had forgotten them (see ``rouse``)."""
    ms: float
