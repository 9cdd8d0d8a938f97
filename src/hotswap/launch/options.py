"""What a job is asked to be, whoever asks: the command line, or a program."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from hotswap.config import StoreConfig, Timing
from hotswap.launch.console import Console
from hotswap.node.process import DRAIN_SIGNAL

DEFAULT_RESPAWNS = 3
DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True, kw_only=True)
class Options:
    """``token`` is empty in a stand-alone job: the launcher makes one. ``preload`` is None for a new interpreter per worker.

    ``endpoint`` may name several hosts, with commas between them, if there is a ``store``. ``coordinators``: those that run elsewhere.

    ``console`` is None when nothing of the workers' output is shown. ``stop_s``: how long a polite stop may take, None for
    a time that follows from the detection budget. ``transfer_streams``: 0 for a number that follows from the processors. ``signals``: those that ask for one.
    ``allow_inject``: drills may be ordered while it runs.
    ``drain_on``: signals that say that this node has to leave; ``drain_s``: how long it then stays without a replacement.
    ``min_nodes``: with so many nodes the job may still go on, 0: only with all of them.
    """

    nodes_active: int
    nodes_max: int
    nproc_per_node: int
    entry: tuple[str, ...]
    standalone: bool
    endpoint: str = ""
    coordinators: tuple[str, ...] = ()
    store: StoreConfig | None = None
    job_id: str = ""
    node_rank: int | None = None
    node_name: str = ""
    master_port: int = 29500
    role: str = "default"
    log_dir: str = ""
    console: Console | None = None
    respawns_max: int = DEFAULT_RESPAWNS
    join_s: float = 600.0
    stop_s: float | None = None
    signals: tuple[signal.Signals, ...] = DEFAULT_SIGNALS
    timing: Timing = field(default_factory=Timing)
    spare_wait_s: float = 60.0
    spare_first: bool = False
    drain_on: tuple[signal.Signals, ...] = (DRAIN_SIGNAL,)
    drain_s: float = 60.0
    replicas: int = 1
    evict_slow: float = 0.0
    keep_groups: bool = True
    min_nodes: int = 0
    preload: tuple[str, ...] | None = ("torch",)
    spare_positions: int = 1
    checkpoint_dir: str = ""
    checkpoint_interval_steps: int = 0
    snapshot_interval_steps: int = 1
    overhead_limit: float = 0.0
    integrity_every_steps: int = 0
    fault_domain: str = ""
    node_history: str = ""
    kernel_log: str = ""
    probe: bool = False
    allow_inject: bool = False
    transfer_streams: int = 0
    bind_host: str = ""
    token: str = field(default="", repr=False)
    token_file: str = ""
    json: bool = False
    notices: tuple[str, ...] = ()
