"""One simulated job: sets up everything from a seed, runs it, and says whether all promises were kept."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any, cast

from hotswap.config import CoordinatorConfig, StoreConfig, Timing
from hotswap.core import ladder
from hotswap.core import messages as m
from hotswap.core.events import Effect, Exit, Record, Send
from hotswap.core.integrity import NEVER
from hotswap.core.past import Past
from hotswap.core.types import HeldKind, NodeId, SourceKind, Step
from hotswap.errors import EXIT_OK, EXIT_REQUEUE, PeerUnreachable
from hotswap.replication.sections import SectionKind
from hotswap.sim.ballots import Ballots
from hotswap.sim.chronicle import Chronicle, Copy, State, Violation
from hotswap.sim.council import Council
from hotswap.sim.fabric import TIMEOUT_S, Fabric
from hotswap.sim.faults import AMONG_SEVERAL, Saboteur, draw
from hotswap.sim.memory import MemoryModel, read_unique
from hotswap.sim.network import DELAY_S, Link, Network, connection
from hotswap.sim.node import NodeModel
from hotswap.sim.process import ProcessLoop
from hotswap.sim.server import ServerModel
from hotswap.sim.setup import Range, draw_setup
from hotswap.sim.storage import Storage
from hotswap.sim.world import World
from hotswap.wire.channels import control_codec

CALM_S = 400.0
"""After the last fault a job must have ended within so many simulated seconds, and the time-out of collectives if one hangs."""
HEAD = "head"
"""The coordinator's host."""
CODEC = control_codec()


class JobModel:
    """The whole job; everything else points here."""

    def __init__(self, seed: int, **spoilt: object) -> None:
        """*spoilt*: fields of Setup that are not left to chance."""
        self.seed = seed
        self.world = World(seed)
        # Of their own, so that a seed with one coordinator is what it has always been.
        dice = random.Random(f"coordinators of {seed}")
        self.setup = draw_setup(seed, self.world, **{"coordinators": dice.choice((1, 1, 1, 2, 3)), **spoilt})
        self.council = Council(self, self.setup.coordinators, dice) if self.setup.coordinators > 1 else None
        self.remembers = self.setup.event_log or self.council is not None
        # Modelled workers do not say how far they are.
        self.timing = Timing(hang_s=0.0)
        self.nodes_max = self.setup.nodes_active + self.setup.spares
        self.chronicle = Chronicle(
            slots=self.setup.nodes_active * self.setup.width,
            width=self.setup.width,
            strict=self.remembers,
            # What one node has alone nobody shares.
            shared=self.setup.shared and self.setup.nodes_active > 1,
        )
        self.network = Network(self.world)
        self.storage = Storage(self.world, self.chronicle)
        self.fabric = Fabric(self.world, self.chronicle, self.network.open_at)
        self.ballots = Ballots(self, seed)
        self.log: list[dict[str, object]] = []
        self.loops: list[ProcessLoop] = []
        self.server: ServerModel | None = None
        self.nodes: dict[NodeId, NodeModel] = {}
        self.files: dict[int, MemoryModel] = {}
        self.exit: Exit | None = None
        self.gone_on = 0
        self._last_plan: m.Plan | None = None
        self._differs_after: Step | None = None
        self._accepted: dict[int, m.Plan] = {}
        self._names = 0
        self._pids = 0
        self.world.note(f"seed {seed}: {self.setup}")
        faults = draw(self.world, self.setup.faults)
        if self.council is not None:
            faults += draw(self.world, self.setup.faults, AMONG_SEVERAL)
        self.calm_s = CALM_S + TIMEOUT_S * sum(fault.kind == "deadlock" for fault in faults)
        self.saboteur = Saboteur(self, faults)

    def run(self) -> None:
        """Simulate until the job ends. Violation if a promise is broken, or nothing happens any more."""
        try:
            self._run()
        finally:
            for loop in self.loops:
                loop.close()

    def _run(self) -> None:
        self.start_server()
        for _ in range(self.nodes_max):
            self.world.after(self.world.between(0.0, 1.0), self.add_node)
        self.world.after(1.0, self._replace_lost)
        while self.exit is None:
            before = self.world.now
            self.world.run(self.saboteur.last_at + self.calm_s)
            if self.exit is None and self.world.now <= max(before, self.saboteur.last_at + self.calm_s):
                raise Violation(f"{self.calm_s:g} s after the last fault the job has not ended")
        if self.exit.exit_code == EXIT_OK:
            self.chronicle.finish(self.setup.steps)

    # --- helpers ---------------------------------------------------------------------------------------------------

    def between(self, range_s: Range) -> float:
        """A random duration."""
        return self.world.between(*range_s)

    def make_memory(self, nbytes: int) -> MemoryModel:
        """A memory file."""
        file = MemoryModel(len(self.files) + 100, nbytes)
        self.files[file.fd] = file
        return file

    def new_loop(self, name: str) -> ProcessLoop:
        """Of a new process."""
        loop = ProcessLoop(self.world, name)
        self.loops.append(loop)
        return loop

    def new_pid(self) -> int:
        """Of a new process."""
        self._pids += 1
        return self._pids

    # --- processes -------------------------------------------------------------------------------------------------

    def start_server(self) -> None:
        """Start a coordinator unless there is one; of several, all that are not there."""
        if self.council is not None:
            self.council.start()
        elif self.server is None:
            if not self.setup.event_log:
                self.log.clear()
            loop = self.new_loop("the coordinator")
            loop.enter(self._boot_server, loop, self.coordinator_config(restarted=bool(self.log)))

    def coordinator_config(self, *, restarted: bool, store: bool = False) -> CoordinatorConfig:
        """As a launcher makes it."""
        return CoordinatorConfig(
            job_id="job",
            token="simulated job, no secret",
            restarted=restarted,
            nodes_active=self.setup.nodes_active,
            nodes_max=self.nodes_max,
            nproc_per_node=self.setup.width,
            timing=self.timing,
            spare_first=self.setup.spare_first,
            spare_wait_s=self.setup.spare_wait_s,
            nodes_min=self.setup.nodes_min,
            checkpoint_dir="storage" if self.setup.durable_steps else None,
            replicas=self.setup.replicas,
            events_path="",
            store=StoreConfig(kind="model", urls=()) if store else None,
        )

    def _boot_server(self, loop: ProcessLoop, config: CoordinatorConfig) -> None:
        self.server = ServerModel(self, loop, config, loop.time)
        self.server.start()

    def crash_server(self) -> None:
        """The coordinator's process is gone, with all connections; of several, the one that leads."""
        if self.council is not None:
            self.council.crash(self.council.leader())
            return
        server, self.server = self.server, None
        if server is not None:
            self.world.note("the coordinator crashes")
            self.reset_connections(server.loop)
            server.loop.dead = True

    def reset_connections(self, loop: ProcessLoop) -> None:
        """All that agents have to the process of *loop*."""
        for node in self.living():
            if node.link is not None and node.link.peer.loop is loop:
                node.link.peer.reset()

    @property
    def heads(self) -> list[str]:
        """The coordinators' hosts."""
        return [HEAD] if self.council is None else self.council.hosts

    async def connect(self, node: NodeModel, host: str) -> Link:
        """A connection of an agent to a coordinator. PeerUnreachable if there is none, or no way to it."""
        connect_s = self.timing.connect_s
        way_s = max(self.network.open_at(node.id, host), self.network.open_at(host, node.id)) - self.world.now
        await asyncio.sleep(min(way_s, connect_s) + self.between(DELAY_S))
        server = self.server if self.council is None else self.council.candidates.get(host)
        if way_s > connect_s or server is None:
            raise PeerUnreachable("the coordinator cannot be reached")
        near, far = connection(self.network, [(node.loop, node.id), (server.loop, host)], CODEC)
        server.loop.enter(server.serve, cast(Any, far), node.id)
        return near

    def add_node(self) -> None:
        """A new node joins, or one that was lost under its old name."""
        gone = sorted(node.id for node in self.nodes.values() if not node.alive)
        if gone and self.world.chance(0.3):
            name, _, incarnation = self.world.dice.choice(gone).partition("#")
            while f"{name}#{incarnation}" in self.nodes:
                incarnation = str(int(incarnation) + 1)
        else:
            self._names += 1
            name, incarnation = f"n{self._names}", "1"
        node = f"{name}#{incarnation}"
        self.world.note(f"{node} joins")
        self.nodes[node] = NodeModel(self, node)

    def _replace_lost(self) -> None:
        """The cluster gives another node for each lost one, after a while."""
        for _ in range(self.nodes_max - len(self.living())):
            self.world.after(self.world.between(1.0, 15.0), self._add_if_short)
        self.world.after(20.0, self._replace_lost)

    def _add_if_short(self) -> None:
        if len(self.living()) < self.nodes_max:
            self.add_node()

    def domain_of(self, node: NodeId) -> str:
        """The fault domain of a node; empty: one of its own."""
        number = int(node[1:].split("#")[0])
        return f"rack{number % self.setup.domains}" if self.setup.domains else ""

    def living(self) -> list[NodeModel]:
        """Nodes that are alive."""
        return [node for node in self.nodes.values() if node.alive]

    def members(self) -> list[NodeModel]:
        """Living nodes that believe to be members."""
        return [node for node in self.living() if node.agent.active]

    def spares(self) -> list[NodeModel]:
        """Living nodes that don't."""
        return [node for node in self.living() if not node.agent.active]

    # --- what the coordinator does ---------------------------------------------------------------------------------

    def moment(self, name: str) -> None:
        """A moment at which a fault may wait."""
        self.saboteur.moment(name)

    def observe(self, server: ServerModel, effects: Sequence[Effect]) -> None:
        """What a coordinator has decided, before anybody hears of it."""
        self.server = server
        if effects and self.council is not None and server.leadership is not None:
            wrong = self.council.decides(server.leadership.term)
            if wrong:
                raise Violation(wrong)
        for effect in effects:
            if isinstance(effect, Record):
                self._on_record(effect)
            elif isinstance(effect, Send):
                self._on_send(effect.node, effect.message)
            elif isinstance(effect, Exit):
                self._on_exit(effect)

    def _on_record(self, record: Record) -> None:
        details = {key: value for key, value in record.fields.items() if key != "generation"}
        self.world.note(f"* {record.event} {details}")
        if record.event == "step_committed":
            step = record.fields["step"]
            assert isinstance(step, int), "steps are numbers"
            self.chronicle.counted(step)
        elif record.event == "state_differs":
            verified = record.fields["verified"]
            assert isinstance(verified, int), "steps are numbers"
            self._differs_after = verified
        elif record.event == "job_started" and not self.remembers:
            self._on_job_started()
        elif record.event == "job_resized":
            self._note_absent()  # Whoever is not there now is not waited for, and drops what it has when it comes back.
            if (verified := self._distrusted_after()) is not None:
                self._differs_after = verified  # So do the others, what they know of a failed comparison included.
        elif record.event in ("node_lost", "node_drained", "node_turned_away"):
            self.chronicle.lost(str(record.fields["node"]))

    def _on_job_started(self) -> None:
        """Another job begins if no log tells of this one and nobody speaks of it.

        If somebody is only cut off, there are two jobs then; what becomes of them is not a promise.
        """
        if any(node.agent.generation for node in self.living()):
            self.world.note("nobody who has come so far knows of the job, and there is no log")
            self.exit = Exit(exit_code=EXIT_REQUEUE, reason="begun anew beside itself")
            self.world.over = True
        self.chronicle.begin_anew()
        self.gone_on = 0

    def _on_send(self, node: NodeId, message: m.ToAgent) -> None:
        self.world.note(f"{node} <- {type(message).__name__} {getattr(message, 'generation', '')}")
        if isinstance(message, m.Fence):
            self.chronicle.membership(message.generation, message.places)
        elif isinstance(message, m.Plan) and message is not self._last_plan:
            self._on_plan(message)
        elif isinstance(message, m.Go) and message.generation > self.gone_on:
            self.gone_on = message.generation
            self._on_go(message.generation)

    def _on_plan(self, plan: m.Plan) -> None:
        self.world.note(f"{plan}")
        self._note_absent()
        self._last_plan = plan
        kinds = {source.kind for source in plan.sources.values()}
        durable = self.storage.state(plan.resume_step) if SourceKind.CHECKPOINT in kinds else None
        self.chronicle.plan(
            plan.generation,
            self.chronicle.memberships[plan.generation],
            plan.resume_step,
            self._copies(),
            fresh=SourceKind.FRESH in kinds,
            durable=durable,
            distrusted_after=self._distrusted_after(),
            told_to_distrust_after=self._differs_after,
            storage_failed=bool(self.saboteur.struck["slow storage"] + self.saboteur.struck["full storage"]),
        )
        self.chronicle.shared = self.setup.shared and len(self.chronicle.memberships[plan.generation]) > 1
        self._differs_after = None

    def note_past(self, past: Past) -> None:
        """A coordinator begins with what others have decided. A plan may have been decided on and never been let out."""
        if self.setup.integrity and past.plans and past.plans[-1][0] not in self.chronicle.planned:
            self._differs_after = past.plans[-1][1]

    def _distrusted_after(self) -> Step | None:
        """What a connected node has been told of a comparison that failed, and has not been told to be settled."""
        nodes = [self.nodes[node] for node in self._connected()]
        heard = [node.keeper.suspicion.verified for node in nodes if node.alive and node.keeper.suspicion is not None]
        return min(heard, default=None)

    def accepted(self, node: NodeId, plan: m.Plan) -> None:
        """An agent takes over a plan."""
        known = self._accepted.setdefault(plan.generation, plan)
        if self.council is not None and known != plan:
            self.world.fail(Violation(f"{node} accepts another plan for generation {plan.generation} than others have"))

    def _on_go(self, generation: int) -> None:
        self.chronicle.trained = True
        places = self.chronicle.planned[generation]
        assert self._last_plan is not None, "a generation goes after its plan"
        holders = self._last_plan.holders
        states: dict[int, State] = {}
        for place in places:
            states.update({worker.slot: worker.state for worker in self.nodes[place].workers})
        if len(states) < self.chronicle.slots:
            return  # Somebody died after the last word that the coordinator heard; the next generation will tell.
        self.chronicle.go(states, places, holders)

    def _connected(self) -> list[NodeId]:
        return list(self.server.machine.job.roster) if self.server is not None else []

    def _note_absent(self) -> None:
        connected = self._connected()
        for node in sorted(self.chronicle.needed):
            if node not in connected or not self.nodes[node].alive:
                self.chronicle.lost(node)

    def _copies(self) -> list[Copy]:
        """Everything whole in the memories that the coordinator can ask."""
        copies = []
        for node in self._connected():
            vault = self.nodes[node].keeper.vault
            for item in vault.inventory() if self.nodes[node].alive else ():
                with vault.open(item.slot, item.step, SectionKind.UNIQUE, item.kind) as lease:
                    copies.append(
                        Copy(node=node, slot=item.slot, own=item.kind is HeldKind.OWN, state=read_unique(lease.view))
                    )
        return copies

    def told(self, code: int) -> None:
        """A coordinator has heard that the job has ended, maybe from nobody but the store."""
        if self.exit is None:
            self.exit = Exit(exit_code=code, reason="ended by a leader that could not say so itself any more")
            self.world.over = True
            if code == EXIT_OK:
                self.chronicle.counted(self.setup.steps)

    def _on_exit(self, effect: Exit) -> None:
        """The coordinator ends the job."""
        self.world.note(f"exit {effect.exit_code}: {effect.reason}")
        self.exit = effect
        self.world.over = True
        assert self.server is not None, "a coordinator has ended the job"
        if effect.exit_code == EXIT_OK or not self.server.machine.job.protected:
            return
        if self.setup.nodes_min and not self.server.machine.job.started and "no new node" in effect.reason:
            return  # Nobody was left, and it does not wait for long.
        # A restore that is interrupted leaves a worker as torn as an update does: whether it has ever trained nobody can tell.
        # Copies that are all rotten are asked for again and again, until that is no progress.
        rotten = effect.exit_code == ladder.NO_PROGRESS.code and "could not be restored" in effect.reason
        if not (effect.exit_code == EXIT_REQUEUE or rotten) or not (
            self.chronicle.trained or self.server.machine.job.started
        ):
            raise Violation(f"the job ended with {effect.exit_code}: {effect.reason}")
        membership = self.server.machine.membership
        assert membership is not None, "a job that trained has a membership"
        distrusted_after = self._distrusted_after()
        if distrusted_after == NEVER:
            return  # Slots differ that have never agreed: nothing in memory can be trusted.
        self._note_absent()
        if distrusted_after is not None:
            self.chronicle.distrust(-1)
            return
        saved = self.storage.latest()
        if saved is None or saved < self.chronicle.committed[0]:
            self.chronicle.resume(-1, membership.places, self._copies())
