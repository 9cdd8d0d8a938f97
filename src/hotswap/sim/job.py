"""One simulated job: sets up everything from a seed, runs it, and says whether all promises were kept."""

from __future__ import annotations

from dataclasses import dataclass

from hotswap.core import messages as m
from hotswap.core.coordinator import Limits
from hotswap.core.events import Exit, Record
from hotswap.core.types import HeldKind, NodeId, SourceKind
from hotswap.errors import EXIT_OK, EXIT_REQUEUE
from hotswap.sim.agent import AgentModel
from hotswap.sim.chronicle import Chronicle, Copy, State, Violation
from hotswap.sim.fabric import Fabric
from hotswap.sim.faults import Saboteur, draw
from hotswap.sim.network import Server
from hotswap.sim.world import World

Range = tuple[float, float]
CALM_S = 400.0
"""After the last fault a job must have ended within so many simulated seconds."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A job and its surroundings. ``versions``, ``gate`` and ``drop_undone`` can be spoilt, to see the checkers find it.

    ``event_log``: a restarted coordinator still has the log of the one before it. ``flaky``: share of transfers that fail.
    """

    nodes_active: int
    spares: int
    width: int
    steps: int
    domains: int
    faults: int
    flaky: float
    event_log: bool
    spare_first: bool
    versions: int = 2
    gate: bool = True
    drop_undone: bool = True
    build_s: Range = (0.1, 3.0)
    compute_s: Range = (0.02, 0.3)
    update_s: Range = (0.001, 0.03)
    copy_s: Range = (0.001, 0.03)
    restore_s: Range = (0.001, 0.1)
    transfer_s: Range = (0.002, 0.1)


def draw_setup(world: World, **spoilt: object) -> Setup:
    """A random job."""
    dice = world.dice
    slow = dice.random() < 0.3
    values: dict[str, object] = {
        "nodes_active": dice.randint(1, 4),
        "spares": dice.randint(1, 3),
        "width": dice.randint(1, 2),
        "steps": dice.randint(6, 14),
        "domains": dice.choice((0, 0, 2)),
        "faults": dice.randint(1, 4),
        "flaky": dice.choice((0.0, 0.0, 0.05)),
        "event_log": dice.random() < 0.7,
        "spare_first": dice.random() < 0.5,
        "transfer_s": (0.05, 0.8) if slow else (0.002, 0.1),
    }
    return Setup(**{**values, **spoilt})  # type: ignore[arg-type]


class JobModel:
    """The whole job; everything else points here."""

    def __init__(self, seed: int, **spoilt: object) -> None:
        """*spoilt*: fields of Setup that are not left to chance."""
        self.seed = seed
        self.world = World(seed)
        self.setup = draw_setup(self.world, **spoilt)
        self.limits = Limits(
            nodes_active=self.setup.nodes_active,
            nodes_max=self.setup.nodes_active + self.setup.spares,
            width=self.setup.width,
            spare_first=self.setup.spare_first,
        )
        self.chronicle = Chronicle(slots=self.setup.nodes_active * self.setup.width, strict=self.setup.event_log)
        self.fabric = Fabric(self.world, self.chronicle)
        self.server = Server(self)
        self.agents: dict[NodeId, AgentModel] = {}
        self.exit: Exit | None = None
        self.gone_on = 0
        self._names = 0
        self.world.note(f"seed {seed}: {self.setup}")
        self.saboteur = Saboteur(self, draw(self.world, self.setup.faults))

    def run(self) -> None:
        """Simulate until the job ends. Violation if a promise is broken, or nothing happens any more."""
        self.start_server()
        for _ in range(self.limits.nodes_max):
            self.world.after(self.world.between(0.0, 1.0), self.add_node)
        self.world.after(1.0, self._replace_lost)
        while self.exit is None:
            before = self.world.now
            self.world.run(self.saboteur.last_at + CALM_S)
            if self.exit is None and self.world.now <= max(before, self.saboteur.last_at + CALM_S):
                raise Violation(f"{CALM_S:g} s after the last fault the job has not ended")
        if self.exit.exit_code == EXIT_OK:
            self.chronicle.finish(self.setup.steps)

    # --- nodes -----------------------------------------------------------------------------------------------------

    def start_server(self) -> None:
        """Start a coordinator unless there is one."""
        if self.server.machine is None:
            self.server.start()

    def add_node(self) -> None:
        """A new node joins."""
        self._names += 1
        node = f"n{self._names}#1"
        self.world.note(f"{node} joins")
        self.agents[node] = AgentModel(self, node)

    def _replace_lost(self) -> None:
        """The cluster gives another node for each lost one, after a while."""
        for _ in range(self.limits.nodes_max - len(self.living())):
            self.world.after(self.world.between(1.0, 15.0), self._add_if_short)
        self.world.after(20.0, self._replace_lost)

    def _add_if_short(self) -> None:
        if len(self.living()) < self.limits.nodes_max:
            self.add_node()

    def domain_of(self, node: NodeId) -> str:
        """The fault domain of a node; empty: one of its own."""
        number = int(node[1:].split("#")[0])
        return f"rack{number % self.setup.domains}" if self.setup.domains else ""

    def living(self) -> list[AgentModel]:
        """Agents that are alive."""
        return [agent for agent in self.agents.values() if agent.alive]

    def members(self) -> list[AgentModel]:
        """Living agents that believe to be members."""
        return [agent for agent in self.living() if agent.active]

    def spares(self) -> list[AgentModel]:
        """Living agents that don't."""
        return [agent for agent in self.living() if not agent.active]

    # --- durable checkpoints are not part of the model: memory has to do -------------------------------------------------

    def checkpoint_step(self) -> int | None:
        """There is no checkpoint."""
        return None

    def checkpoint(self, slot: int, step: int) -> State:
        """There is no checkpoint."""
        raise Violation(f"slot {slot} was to be restored from a checkpoint of step {step}, which does not exist")

    def commit_checkpoint(self, step: int) -> None:
        """There is no checkpoint."""
        raise Violation(f"a checkpoint of step {step} was committed, which does not exist")

    # --- what the coordinator does ---------------------------------------------------------------------------------

    def moment(self, name: str) -> None:
        """A moment at which a fault may wait."""
        self.saboteur.moment(name)

    def on_record(self, record: Record) -> None:
        """A line of the event log."""
        fields = {key: value for key, value in record.fields.items() if key != "generation"}
        self.world.note(f"* {record.event} {fields}")
        if record.event == "step_committed":
            step = record.fields["step"]
            assert isinstance(step, int), "steps are numbers"
            self.chronicle.counted(step)
        elif record.event == "node_lost":
            self.chronicle.lost(str(record.fields["node"]))

    def on_send(self, node: NodeId, message: m.ToAgent) -> None:
        """A message leaves the coordinator."""
        self.world.note(f"{node} <- {type(message).__name__} {getattr(message, 'generation', '')}")
        if isinstance(message, m.Fence):
            self.chronicle.membership(message.generation, message.places)
        elif isinstance(message, m.Plan) and message.generation not in self.chronicle.planned:
            self.world.note(f"{message}")
            self._note_absent()
            places = self.chronicle.memberships[message.generation]
            fresh = any(source.kind is SourceKind.FRESH for source in message.sources.values())
            self.chronicle.plan(message.generation, places, message.resume_step, self._copies(), fresh=fresh)
        elif isinstance(message, m.Go) and message.generation > self.gone_on:
            self.gone_on = message.generation
            self._check_go(message.generation)

    def _check_go(self, generation: int) -> None:
        self.chronicle.trained = True
        places = self.chronicle.planned[generation]
        agents = [self.agents[node] for node in places]
        states = {slot: worker.state for agent in agents for slot, worker in sorted(agent.workers.items())}
        plan = next((agent.plan for agent in agents if agent.plan is not None), None)
        holders = plan.holders if plan is not None else {}
        if len(states) < self.chronicle.slots:
            return  # Somebody died after the last word that the coordinator heard; the next generation will tell.
        self.chronicle.go(states, frozenset({*places, *holders.values()}), covered=len(holders) == len(states))

    def _note_absent(self) -> None:
        for node in self.chronicle.guarded:
            if node not in self.server.links:
                self.chronicle.lost(node)

    def _copies(self) -> list[Copy]:
        """Everything whole in the memories that the coordinator can ask."""
        return [
            Copy(node=node, slot=slot, own=kind is HeldKind.OWN, state=buffer.content)
            for node in sorted(self.server.links)
            if self.agents[node].alive
            for kind, slot, buffer in self.agents[node].memory.complete_ones()
        ]

    def on_exit(self, effect: Exit) -> None:
        """The coordinator ends the job."""
        self.world.note(f"exit {effect.exit_code}: {effect.reason}")
        self.exit = effect
        self.world.over = True
        if effect.exit_code == EXIT_OK:
            return
        if effect.exit_code != EXIT_REQUEUE or not self.chronicle.trained:
            raise Violation(f"the job ended with {effect.exit_code}: {effect.reason}")
        machine = self.server.machine
        assert machine is not None and machine.membership is not None, "a job that trained has a membership"
        self._note_absent()
        self.chronicle.resume(-1, machine.membership.places, self._copies())
