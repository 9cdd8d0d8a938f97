"""Control connections between agents and the coordinator, and the shell around the real coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hotswap.core import messages as m
from hotswap.core.coordinator import Coordinator
from hotswap.core.events import Disconnect, Event, Exit, FromNode, NodeGone, Record, Send, Tick
from hotswap.core.past import recall
from hotswap.core.types import NodeId
from hotswap.sim.world import Pipe, Timer

if TYPE_CHECKING:
    from hotswap.sim.agent import AgentModel
    from hotswap.sim.job import JobModel

DELAY_S = (0.0002, 0.03)


class Connection:
    """One TCP connection of one agent."""

    def __init__(self, server: Server, agent: AgentModel) -> None:
        """Open."""
        self.server = server
        self.agent = agent
        self.open = True
        world = server.job.world
        self.up = Pipe(world, DELAY_S, lambda message: server.receive(self, message))
        self.down = Pipe(world, DELAY_S, self._to_agent)

    def _to_agent(self, message: Any) -> None:
        if self.agent.connection is self:
            self.agent.hear(message)

    def cut(self, *, by_agent: bool = False, keep_down: bool = False) -> None:
        """End it. Each side learns that later, after what still arrives."""
        if not self.open:
            return
        self.open = False
        world = self.server.job.world
        up_s = self.up.cut()
        down_s = self.down.cut(keep_all=keep_down)
        world.after(up_s + world.between(0.0, 0.05), self.server.closed, self)
        if not by_agent:
            world.after(down_s + world.between(0.0, 0.2), self.agent.disconnected, self)

    def stall(self, seconds: float) -> None:
        """Nothing gets through for a while, and nobody is told."""
        self.up.stalled_to = self.down.stalled_to = self.server.job.world.now + seconds


class Server:
    """What ``hotswap.node.coordinator`` is around the state machine."""

    def __init__(self, job: JobModel) -> None:
        """Not started yet."""
        self.job = job
        self.machine: Coordinator | None = None
        self.links: dict[NodeId, Connection] = {}
        self._log: list[dict[str, object]] = []
        self._timer: Timer | None = None

    def start(self) -> None:
        """A coordinator that knows nothing, but maybe, from the event log, how many generations were announced."""
        past = recall(self._log) if self.job.setup.event_log else None
        self.machine = Coordinator(self.job.limits, self.job.world.now, past)
        self.job.world.note(f"a coordinator starts with {past}")
        self._set_timer()

    def crash(self) -> None:
        """The process is gone, with all connections."""
        if self.machine is None:
            return
        self.job.world.note("the coordinator crashes")
        self.machine = None
        self.links.clear()
        for agent in self.job.agents.values():
            if agent.connection is not None:
                agent.connection.cut()
        if self._timer is not None:
            self._timer.cancel()

    def open(self, agent: AgentModel) -> Connection | None:
        """A new connection, None while there is no coordinator."""
        return Connection(self, agent) if self.machine is not None else None

    def receive(self, connection: Connection, message: Any) -> None:
        """A message from an agent. The first one of a connection registers it; only the newest connection speaks for a node."""
        if self.machine is None:
            return
        node = connection.agent.node
        if isinstance(message, m.Register):
            previous, self.links[node] = self.links.get(node), connection
            if previous is not None:
                previous.cut()
        if self.links.get(node) is connection:
            self.handle(FromNode(node=node, message=message))

    def closed(self, connection: Connection) -> None:
        """A connection has ended."""
        node = connection.agent.node
        if self.links.get(node) is connection:
            del self.links[node]
            self.handle(NodeGone(node=node, reason="connection closed"))

    def handle(self, event: Event) -> None:
        """Run one event through the machine and carry out what it says."""
        if self.machine is None or self.job.world.over:
            return
        before = self.machine.phase
        for effect in self.machine.handle(event, self.job.world.now):
            if isinstance(effect, Record):
                self._log.append({"event": effect.event, **effect.fields})
                self.job.on_record(effect)
            elif isinstance(effect, Send):
                self.job.on_send(effect.node, effect.message)
                if effect.node in self.links:
                    self.links[effect.node].down.send(effect.message)
            elif isinstance(effect, Disconnect) and effect.node in self.links:
                self.links.pop(effect.node).cut(keep_down=True)
            elif isinstance(effect, Exit):
                self.job.on_exit(effect)
                return
        if self.machine.phase is not before:
            self.job.moment(self.machine.phase.value)
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.machine is not None and self.machine.deadline() != float("inf"):
            delay_s = max(0.0, self.machine.deadline() - self.job.world.now)
            self._timer = self.job.world.after(delay_s + 0.0005, self.handle, Tick())
