"""What the launcher tells the processes it starts. Travels as JSON on standard input, never on a command line: it holds the token."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hotswap.core.limits import LINK_FLOOR
from hotswap.errors import UsageError

LEASE_LEAST_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Every deadline of a job, derived from one knob. All in seconds.

    ``detection_budget_s`` is the longest silence after which a node counts as lost. Too small and a pause of the scheduler
    costs a node; too large and a silent network cut costs minutes. Process death does not wait for it.

    ``hang_s``: how long nobody may advance while somebody is waited for; None: that follows from the job's own steps; 0: no
    hang is looked for. ``pause_s``: how long all may be busy with something else than communication; 0: for ever.
    ``collective_s``: longest a collective may wait, where nothing else notices that it is in vain; None: derived.
    ``leader_s``: for how long the leader of several coordinators is one without a word from the store; None: derived.
    """

    detection_budget_s: float = 2.0
    hang_s: float | None = None
    pause_s: float = 0.0
    collective_s: float | None = None
    leader_s: float | None = None

    @property
    def halt_s(self) -> float:
        """All workers come to the boundary on which they have agreed within moments; who is late there loses part of a step."""
        return self.detection_budget_s / 2

    @property
    def stand_s(self) -> float:
        """Who halts first waits for the last one, and for the fence."""
        return 2 * self.halt_s

    @property
    def durable_stand_s(self) -> float:
        """The same if the boundary goes to storage first, which the coordinator waits for as long as for any phase."""
        return self.stand_s + self.phase_s

    @property
    def heartbeat_s(self) -> float:
        """Five chances to be heard within the budget."""
        return self.detection_budget_s / 5

    @property
    def stopped_s(self) -> float:
        """A stopped process is looked for with every heartbeat, so it is ended within half of the budget."""
        return self.detection_budget_s / 4

    @property
    def trouble_grace_s(self) -> float:
        """The loss behind a failed collective is usually known a moment later."""
        return min(1.0, self.detection_budget_s / 5)

    @property
    def phase_s(self) -> float:
        """Longest time any phase of a recovery may take before its laggards count as failed."""
        return max(30.0, 6 * self.detection_budget_s)

    def transfer_s(self, nbytes: int) -> float:
        """Longest time that so many bytes may take from one node to another; whoever stands still is noticed long before."""
        return self.phase_s + nbytes / LINK_FLOOR

    @property
    def park_s(self) -> float:
        """Longest time a worker may take to leave a generation; then it is replaced, within the phase."""
        return self.phase_s * 2 / 3

    @property
    def abort_s(self) -> float:
        """Longest time for ending communication inside a worker; then only ending the process helps."""
        return self.phase_s / 3

    @property
    def settle_s(self) -> float:
        """Pause between the stop flag and the abort, so that ranks run into their blocked state first."""
        return 0.05

    @property
    def lease_s(self) -> float:
        """Where there are several coordinators: so long after its last word to the store another one may lead."""
        return max(LEASE_LEAST_S, 2 * self.detection_budget_s) if self.leader_s is None else self.leader_s

    @property
    def lease_beat_s(self) -> float:
        """Pause between two renewals of the lease, and between two looks of a standby coordinator."""
        return self.lease_s / 8

    @property
    def store_s(self) -> float:
        """Longest time for one member of the store to answer; the next one must still be asked in time."""
        return self.lease_s / 4

    @property
    def coordinator_s(self) -> float:
        """Longest time workers wait for a coordinator to come back before their agent gives the job up."""
        return max(600.0, 2 * self.phase_s)

    @property
    def connect_s(self) -> float:
        """Longest time for opening and authenticating one connection."""
        return self.detection_budget_s

    @property
    def hang_floor_s(self) -> float:
        """The least that is used where patience follows from the job's own steps."""
        return 30 * self.detection_budget_s

    @property
    def collective_timeout_s(self) -> float:
        """Time-out of c10d's operations."""
        return max(600.0, 60 * self.detection_budget_s) if self.collective_s is None else self.collective_s

    @property
    def hang_ceiling_s(self) -> float:
        """The most: whoever is waited for has to be named before those that wait give up, and stacks take time."""
        return self.collective_timeout_s * 0.8

    def __post_init__(self) -> None:
        """Refuse what could not work, and say what to do instead; written so that NaN fails too."""
        budget_s, hang_s = self.detection_budget_s, self.hang_s
        least_s = self.hang_floor_s if hang_s is None else hang_s
        if not 0.5 <= budget_s < math.inf:
            raise UsageError(
                f"--detection-budget-s {budget_s:g}: under 0.5 s every pause of a scheduler costs a node, and it has to end"
            )
        if hang_s is not None and hang_s != 0 and not budget_s < hang_s < math.inf:
            raise UsageError(
                f"--hang-budget-s {hang_s:g} must be longer than the detection budget ({budget_s:g} s), or a node that is "
                "silent is taken for workers that hang; 'off' looks for no hangs"
            )
        if not LEASE_LEAST_S <= self.lease_s < math.inf:
            raise UsageError(
                f"--lease-s {self.lease_s:g}: at least {LEASE_LEAST_S:g} s are needed, or a member of the store that does not "
                "answer costs the leader its lease"
            )
        if not least_s <= self.hang_ceiling_s < math.inf:
            raise UsageError(
                f"--collective-timeout-s {self.collective_timeout_s:g}: collectives would give up before it is known who keeps "
                f"them waiting; at least {least_s / 0.8:g} s are needed, or a shorter --hang-budget-s than {least_s:g} s"
            )
        if not (self.pause_s == 0 or least_s <= self.pause_s < math.inf):
            raise UsageError(
                f"--pause-limit-s {self.pause_s:g} must not be shorter than the hang budget ({least_s:g} s); 0 is no limit"
            )

    def table(self) -> list[tuple[str, float, str]]:
        """All deadlines in the order of their length: name, seconds, what happens then."""
        hang = "nobody has advanced and somebody is waited for: that worker is ended"
        rows = [
            ("settle", self.settle_s, "after the stop flag, connections are shut"),
            ("heartbeat", self.heartbeat_s, "an agent says that it lives, and how far its workers are"),
            ("trouble grace", self.trouble_grace_s, "a failed collective that no loss explains becomes a recovery"),
            ("stopped worker", self.stopped_s, "a worker that a signal has stopped is ended"),
            ("halt", self.halt_s, "workers that stand still for a swap wait no longer for the last of them"),
            ("detection budget", self.detection_budget_s, "a silent node is given up"),
            ("lease", self.lease_s, "of several coordinators, one that the store has not heard is replaced"),
            ("connect", self.connect_s, "a connection that is not made and authenticated is given up"),
            ("abort", self.abort_s, "a worker gives up ending its communication"),
            ("park", self.park_s, "a worker that has not left the old generation is ended"),
            ("phase", self.phase_s, "who holds a recovery up is given up"),
            ("hang", self.hang_floor_s if self.hang_s is None else self.hang_s, hang + (" (at least)" if self.hang_s is None else "")),
            ("pause", self.pause_s, "workers that are all busy elsewhere are ended"),
            ("collective", self.collective_timeout_s, "an operation that nothing else has ended fails"),
            ("coordinator", self.coordinator_s, "workers that wait for a coordinator give the job up"),
        ]  # fmt: skip
        unused = {"hang": self.hang_s == 0, "pause": self.pause_s == 0}
        return sorted((row for row in rows if not unused.get(row[0])), key=lambda row: row[1])


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """Where several coordinators agree on which of them leads.

    ``kind``: ``etcd`` or ``tcp`` (``hotswap store``). ``urls``: of each member of etcd with its scheme, or one ``host:port``.
    ``ca``, ``cert``, ``key``: files for TLS. ``user`` and ``password`` are etcd's; a TCP store asks for the job's token.
    """

    kind: str
    urls: tuple[str, ...]
    ca: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password: str = field(default="", repr=False)


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """One coordinator process.

    ``restarted``: it takes the place of one that died, whose event log it continues.
    ``nodes_active`` nodes train; up to ``nodes_max - nodes_active`` more are spares. ``respawns_max`` bounds worker
    respawns without a newly committed step in between. ``node_history``: file of what nodes have done in this and earlier jobs.
    ``spare_wait_s`` is how long a job without a spare waits for a node. ``spare_first``, ``replicas``, ``evict_slow``, ``keep_groups``, ``nodes_min``: see ``core.Limits``.
    ``allow_inject``: drills that somebody with the token orders are passed on.
    ``store``: there are several coordinators, and here they agree on which one leads. ``advertise_host``: where agents reach this one.
    """

    job_id: str
    token: str = field(repr=False)
    restarted: bool = False
    host: str = "127.0.0.1"
    port: int = 0
    nodes_active: int
    nodes_max: int
    nproc_per_node: int
    timing: Timing = field(default_factory=Timing)
    respawns_max: int = 3
    spare_wait_s: float = 60.0
    spare_first: bool = False
    replicas: int = 1
    evict_slow: float = 0.0
    keep_groups: bool = True
    nodes_min: int = 0
    join_s: float = 600.0
    events_path: str
    checkpoint_dir: str | None = None
    node_history: str | None = None
    allow_inject: bool = False
    store: StoreConfig | None = None
    advertise_host: str = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """One agent process, that is one node.

    ``incarnation`` makes each start of an agent a new node: within a job, a name with its number is never used again.
    ``drain_s``: how long a node that is told to leave stays if nobody takes its place.
    ``entry`` is the training command: a script path and its arguments, or ``-m module`` and its arguments.
    ``spare_positions``: for how many active nodes' places a spare keeps built workers.
    ``integrity_every_steps``: steps between comparisons of the state that slots share; 0: none.
    ``gpus``: those of the whole machine, if it is made into several nodes; empty: a worker sees what its node sees.
    ``coordinators``: further ones, of which one may lead when the first does not: host and port.
    ``kernel_log``: where the kernel's messages can be read. ``allow_inject``: it strikes its own processes in a drill.
    ``resizes``: the job may go on with another number of nodes.
    """

    job_id: str
    token: str = field(repr=False)
    node: str
    incarnation: int = 1
    fault_domain: str = ""
    coordinator_host: str = "127.0.0.1"
    coordinator_port: int
    coordinators: tuple[tuple[str, int], ...] = ()
    bind_host: str = "127.0.0.1"
    advertise_host: str = "127.0.0.1"
    nproc_per_node: int
    nodes_active: int
    drain_s: float = 60.0
    entry: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    kernel_log: str = "/dev/kmsg"
    allow_inject: bool = False
    log_dir: str
    fork_server: str | None = None
    fork_server_token: str = field(default="", repr=False)
    timing: Timing = field(default_factory=Timing)
    spare_positions: int = 1
    transfer_streams: int = 2
    checkpoint_dir: str | None = None
    checkpoint_interval_steps: int = 0
    snapshot_interval_steps: int = 1
    overhead_limit: float = 0.0
    integrity_every_steps: int = 0
    resizes: bool = False

    @property
    def snapshot_buffers(self) -> int:
        """Two to write by turns, one more from which a durable checkpoint is made, and one for the state compared last."""
        return 2 + (self.checkpoint_interval_steps > 0) + (self.integrity_every_steps > 0)
