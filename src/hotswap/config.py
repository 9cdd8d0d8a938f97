"""What the launcher tells the processes it starts. Travels as JSON on standard input, never on a command line: it holds the token."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Every deadline of a job, derived from one knob.

    ``detection_budget_s`` is the longest silence (seconds) after which a node counts as lost. Too small and a
    garbage-collection pause costs a node; too large and a silent network cut costs minutes. Process death does not wait for it.
    """

    detection_budget_s: float = 5.0

    @property
    def heartbeat_s(self) -> float:
        """Seconds between heartbeats: five chances to be heard within the budget."""
        return self.detection_budget_s / 5

    @property
    def phase_s(self) -> float:
        """Longest time any phase of a recovery may take before its laggards count as failed."""
        return max(30.0, 6 * self.detection_budget_s)

    @property
    def park_s(self) -> float:
        """Longest time a worker may take to leave a generation; then it is replaced, within the phase."""
        return self.phase_s * 2 / 3

    @property
    def settle_s(self) -> float:
        """Pause between the stop flag and the abort, so that ranks run into their blocked state first."""
        return 0.05

    @property
    def coordinator_s(self) -> float:
        """Longest time workers wait for a coordinator to come back before their agent gives the job up."""
        return 600.0

    @property
    def connect_s(self) -> float:
        """Longest time for opening and authenticating one connection."""
        return self.detection_budget_s


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """One coordinator process.

    ``restarted``: it takes the place of one that died, whose event log it continues.
    ``nodes_active`` nodes train; up to ``nodes_max - nodes_active`` more are spares. ``respawns_max`` bounds worker
    respawns without a newly committed step in between. ``node_history``: file of what nodes have done in this and earlier jobs.
    ``spare_wait_s`` is how long a job without a spare waits for a node. ``spare_first``: see ``core.Limits``.
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
    join_s: float = 600.0
    events_path: str
    checkpoint_dir: str | None = None
    node_history: str | None = None


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """One agent process, that is one node.

    ``incarnation`` makes each start of an agent a new node: within a job, a name with its number is never used again.
    ``entry`` is the training command: a script path and its arguments, or ``-m module`` and its arguments.
    ``spare_positions``: for how many active nodes' places a spare keeps built workers.
    ``gpus``: those of the whole machine, if it is made into several nodes; empty: a worker sees what its node sees.
    """

    job_id: str
    token: str = field(repr=False)
    node: str
    incarnation: int = 1
    fault_domain: str = ""
    coordinator_host: str = "127.0.0.1"
    coordinator_port: int
    bind_host: str = "127.0.0.1"
    advertise_host: str = "127.0.0.1"
    nproc_per_node: int
    nodes_active: int
    entry: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
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
