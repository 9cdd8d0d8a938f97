"""What TCP gives and what it does not: ordered bytes with delays, and connections that end, with the end of what was sent or in silence.

Between two hosts nothing may get through for a while, in both directions or in one. What is sent meanwhile arrives later, as
TCP sends it again, unless the connection is given up before. So inside a connection nothing is lost, doubled or overtaken; all of
that comes with connections that end and are opened anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from hotswap.errors import PeerUnreachable
from hotswap.sim.process import ProcessLoop
from hotswap.sim.world import Timer, World
from hotswap.wire.codec import Codec

DELAY_S = (0.0002, 0.03)
LOCAL_DELAY_S = (0.0001, 0.003)
Range = tuple[float, float]


class Network:
    """Who reaches whom, and from when on."""

    def __init__(self, world: World) -> None:
        """Everybody reaches everybody."""
        self.world = world
        self._shut: dict[tuple[str, str], float] = {}
        self._dead: set[str] = set()

    def shut(self, source: str, target: str, seconds: float) -> None:
        """Let nothing through from *source* to *target* for a while. ``*``: any host."""
        until = self.world.now + seconds
        self._shut[source, target] = max(until, self._shut.get((source, target), 0.0))

    def open_at(self, source: str, target: str) -> float:
        """From when on something that *source* sends now reaches *target*."""
        if not self._shut or source == target:
            return self.world.now
        routes = ((source, target), (source, "*"), ("*", target))
        return max(self.world.now, *(self._shut.get(route, 0.0) for route in routes))


class Pipe:
    """One direction of a connection. Delivers in order; when it is cut, the last things sent may be lost."""

    def __init__(
        self,
        network: Network,
        route: tuple[str, str],
        delay_s: Range,
        deliver: Callable[..., None],
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """*route*: sending and receiving host. *ended* is called when the receiver learns of the end, after all else."""
        self._network = network
        self._route = route
        self._delay_s = delay_s
        self._deliver = deliver
        self._ended = ended
        self._last = 0.0
        self._under_way: deque[Timer] = deque()
        self.is_cut = False

    def send(self, *what: Any) -> None:
        """Deliver after everything that was sent before."""
        if not self.is_cut:
            # At that very time, not after the difference: rounding would let two messages change places.
            self._under_way.append(self._network.world.at(self._next(), self._arrive, what))

    def _next(self) -> float:
        world = self._network.world
        self._last = max(self._last, self._network.open_at(*self._route) + world.between(*self._delay_s))
        return self._last

    def _arrive(self, what: tuple[Any, ...]) -> None:
        self._under_way.popleft()
        self._deliver(*what)

    def cut(self, *, keep_all: bool = False, silent: bool = False) -> None:
        """End it. A random number of the last messages is lost unless *keep_all*; *silent*: and nobody is told."""
        if self.is_cut:
            return
        self.is_cut = True
        kept = len(self._under_way) if keep_all else self._network.world.dice.randint(0, len(self._under_way))
        while len(self._under_way) > kept:
            self._under_way.pop().cancel()
        if not silent:
            self._network.world.at(self._next(), self._ended)


class Link:
    """One end of a connection: what ``wire.links.AsyncLink`` is to the code above it, encoding included."""

    def __init__(self, loop: ProcessLoop, codec: Codec[Any]) -> None:
        """``out`` and ``peer`` are set by ``connection``."""
        self.loop = loop
        self.closed = False
        self.out: Pipe
        self.peer: Link
        self._codec = codec
        self._inbox: deque[bytes] = deque()
        self._waiter: Any = None
        self._over = ""
        self._flushed = False

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Queue *message*; dropped silently once the link is closed."""
        assert not fds, "descriptors do not travel between hosts"
        if not self.closed and not self.loop.dead:
            self._flushed = False
            self.out.send(self._codec.encode(message))

    async def receive(self) -> Any:
        """Next message; PeerUnreachable at the end of the connection."""
        while not self._inbox:
            if self.closed or self._over:
                self.close()
                raise PeerUnreachable(f"connection {self._over or 'closed'}")
            self._waiter = self.loop.create_future()
            await self._waiter
        return self._codec.decode(self._inbox.popleft())

    async def flush(self, timeout_s: float) -> None:
        """All that is queued is the kernel's affair now, which sends it even if the process closes the connection."""
        self._flushed = True

    def close(self) -> None:
        """End the connection."""
        if not self.closed and not self.loop.dead:
            self.closed = True
            self.out.cut(keep_all=self._flushed)
            self._wake()

    def arrive(self, data: bytes) -> None:
        """The kernel has received something."""
        self._inbox.append(data)
        self._wake()

    def end(self) -> None:
        """The kernel has learnt that nothing more will come."""
        self._over = self._over or "closed by the peer"
        self._wake()

    def reset(self, *, silent: bool = False) -> None:
        """The connection is broken in both directions, by the network or by the death of this end's process or host."""
        self.out.cut(silent=silent)
        self.peer.out.cut(silent=silent)

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def connection(network: Network, ends: Sequence[tuple[ProcessLoop, str]], codec: Codec[Any]) -> tuple[Link, Link]:
    """A connection between two processes, each with its loop and its host."""
    (loop, host), (other_loop, other_host) = ends
    near, far = Link(loop, codec), Link(other_loop, codec)
    near.peer, far.peer = far, near
    near.out = Pipe(network, (host, other_host), DELAY_S, far.arrive, far.end)
    far.out = Pipe(network, (other_host, host), DELAY_S, near.arrive, near.end)
    return near, far
