"""Rules for decoded facts: GPU codes, exits, memory sizes, InfiniBand statuses, what NVML, cgroups and a running job report."""

from __future__ import annotations

from collections.abc import Mapping

from hotswap.diagnosis.codes_sxid import ALWAYS_FATAL, FATAL, GUIDE, LINK_FAULT_UP, NON_FATAL_THAT_ENDS_JOBS, NOTES
from hotswap.diagnosis.codes_xid import CATALOGUE, NETIR_PEER, NETIR_SOFTWARE, RECOVERY, XIDS
from hotswap.diagnosis.model import Blames, Strength, Verdict
from hotswap.diagnosis.rule import Fact, Rule, Wanted

_SIGNALS = "https://man7.org/linux/man-pages/man7/signal.7.html"
_CUDA_NOTES = "https://docs.pytorch.org/docs/stable/notes/cuda.html"
_WC = "https://man7.org/linux/man-pages/man3/ibv_poll_cq.3.html"
_NVML = "https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html"
_MEMORY = "https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/"
_CGROUP = "https://docs.kernel.org/admin-guide/cgroup-v2.html"
_COUNTERS = "https://docs.kernel.org/admin-guide/abi-stable.html"
_WATCHDOG = "https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html"
_NCCL_CODES = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/types.html"
_PYTHON = "https://docs.python.org/3/library/exceptions.html"
_SHM = "https://man7.org/linux/man-pages/man7/shm_overview.7.html"
_SLURM = "https://slurm.schedmd.com/squeue.html"

MANY = 1 << 62
"""End of the ranges that have none."""

LINK_UNITS = (144, 145, 146)
"""NVLink 5 codes whose line says whether it is fatal."""


def _row(
    rule_id: str,
    kind: str,
    where: Mapping[str, Wanted],
    verdict: Verdict,
    strength: Strength,
    confidence: float,
    blames: Blames,
    reason: str,
    source: str,
    echo_of: tuple[str, ...] = (),
) -> Rule:
    return Rule(
        id=rule_id,
        when=Fact(kind, where),
        verdict=verdict,
        strength=strength,
        confidence=confidence,
        blames=blames,
        reason=reason,
        source=source,
        echo_of=echo_of,
    )


def _xid_rules() -> tuple[Rule, ...]:
    rules = [
        _row(
            "xid.45", "xid", {"code": 45}, Verdict.UNKNOWN, Strength.ECHO, 0.2, Blames.GPU,
            "clean-up: the channels of a process that died or was killed", CATALOGUE,
        ),
        _row(
            "xid.154-none", "xid", {"code": 154, "recovery": 0}, Verdict.PROCESS_FAULT, Strength.CONTEXT, 0.6, Blames.GPU,
            "the driver asks for nothing: the application may be restarted on this GPU", CATALOGUE,
        ),
        *(
            _row(
                f"xid.154-{number}", "xid", {"code": 154, "recovery": number}, Verdict.NODE_FAULT, Strength.PROOF, 0.95,
                Blames.GPU, f"the driver itself asks to {text} before the GPU is used again", CATALOGUE,
            )
            for number, text in RECOVERY.items()
            if number
        ),
        _row(
            "xid.154-unread", "xid", {"code": 154}, Verdict.NODE_FAULT, Strength.PROOF, 0.7, Blames.GPU,
            "the recommended recovery of the GPU changed; the text that says to what is missing", CATALOGUE,
        ),
        _row(
            "xid.149-peer", "xid", {"code": 149, "subcode": NETIR_PEER}, Verdict.NODE_FAULT, Strength.PROOF, 0.8,
            Blames.LINK, "the other end of this NVLink is at fault, not the GPU that prints it", CATALOGUE,
        ),
        _row(
            "xid.149-software", "xid", {"code": 149, "subcode": NETIR_SOFTWARE}, Verdict.NODE_FAULT, Strength.PROOF, 0.6,
            Blames.LINK, "software shut this NVLink: fabric manager or an operator", CATALOGUE,
        ),
        *(
            _row(
                f"xid.{code}-nonfatal", "xid", {"code": code, "fatal": False}, Verdict.TRANSIENT, Strength.CONTEXT, 0.7,
                Blames.GPU, "an NVLink 5 unit reports an event that it says it survived", CATALOGUE,
                ("xid.149", "xid.149-peer", "xid.150"),
            )
            for code in LINK_UNITS
        ),
    ]  # fmt: skip
    rules += [
        _row(
            f"xid.{xid.code}", "xid", {"code": xid.code}, xid.verdict, xid.strength, xid.confidence, Blames.GPU,
            xid.meaning, CATALOGUE, tuple(f"xid.{code}" for code in xid.echo_of),
        )
        for xid in XIDS.values()
    ]  # fmt: skip
    rules.append(
        _row(
            "xid.other", "xid", {}, Verdict.UNKNOWN, Strength.SYMPTOM, 0.4, Blames.GPU,
            "a code that the catalogue of this version does not know", CATALOGUE,
        )
    )  # fmt: skip
    return tuple(rules)


def _sxid_rules() -> tuple[Rule, ...]:
    gpu_died = ("xid.79", "xid.74", "xid.119", "xid.62", "gpu.lost")
    return (
        _row(
            "sxid.20034", "sxid", {"code": LINK_FAULT_UP}, Verdict.NODE_FAULT, Strength.SYMPTOM, 0.7, Blames.LINK,
            "an NVSwitch port lost its link: mostly because the GPU at its other end died", GUIDE, gpu_died,
        ),
        _row(
            "sxid.always-fatal", "sxid", {"code": ALWAYS_FATAL}, Verdict.NODE_FAULT, Strength.PROOF, 0.95, Blames.NODE,
            "an NVSwitch is down: every GPU of the host is cut off", GUIDE,
        ),
        _row(
            "sxid.fatal", "sxid", {"code": FATAL}, Verdict.NODE_FAULT, Strength.PROOF, 0.9, Blames.NODE,
            "a port of an NVSwitch is down until the node is restarted", GUIDE,
        ),
        _row(
            "sxid.stalls", "sxid", {"code": NON_FATAL_THAT_ENDS_JOBS}, Verdict.NODE_FAULT, Strength.PROOF, 0.75,
            Blames.NODE, "called non-fatal, yet traffic over the switch stalls", GUIDE,
        ),
        _row(
            "sxid.note", "sxid", {"code": NOTES}, Verdict.TRANSIENT, Strength.CONTEXT, 0.65, Blames.NODE,
            "a corrected error, a replay or heat in an NVSwitch: to be counted", GUIDE,
        ),
        _row(
            "sxid.other-fatal", "sxid", {"fatal": True}, Verdict.NODE_FAULT, Strength.PROOF, 0.75, Blames.NODE,
            "the NVSwitch driver calls it fatal", GUIDE,
        ),
        _row(
            "sxid.other", "sxid", {}, Verdict.UNKNOWN, Strength.CONTEXT, 0.3, Blames.NODE,
            "a code that the guide of this version does not know", GUIDE,
        ),
    )  # fmt: skip


def _memory_rules() -> tuple[Rule, ...]:
    return (
        _row(
            "oom.absurd", "cuda_oom", {"absurd": True}, Verdict.UNKNOWN, Strength.ECHO, 0.2, Blames.NOBODY,
            "nobody asks for that much: a size that was received over an aborted collective, or damaged", _CUDA_NOTES,
        ),
        _row(
            "oom.crowded", "cuda_oom", {"crowded": True}, Verdict.PROCESS_FAULT, Strength.CAUSE, 0.65, Blames.GPU,
            "another process holds the memory of this GPU: one that survived a restart, or a wrong device", _CUDA_NOTES,
        ),
        _row(
            "oom.fits", "cuda_oom", {"fits": True}, Verdict.UNKNOWN, Strength.SYMPTOM, 0.3, Blames.GPU,
            "the request would have fitted: a sick driver, context or GPU rather than a full one", _CUDA_NOTES,
        ),
        _row(
            "oom.gpu", "cuda_oom", {}, Verdict.OOM_GPU, Strength.CAUSE, 0.9, Blames.GPU,
            "the program needs more memory than the GPU has; the same configuration will fail again", _CUDA_NOTES,
        ),
        _row(
            "cgroup.oom-kill", "cgroup", {"oom_kill": range(1, MANY)}, Verdict.OOM_HOST, Strength.PROOF, 0.95, Blames.NODE,
            "the kernel killed a process of this memory cgroup", _CGROUP,
        ),
        _row(
            "shm.nearly-full", "shm", {"used_percent": range(98, 101)}, Verdict.OOM_HOST, Strength.CAUSE, 0.7,
            Blames.NODE, "/dev/shm is full: left-overs of a dead process, or a limit that is too small", _SHM,
        ),
        _row(
            "disk.nearly-full", "disk", {"used_percent": range(99, 101)}, Verdict.STORAGE, Strength.CAUSE, 0.75,
            Blames.STORAGE, "a disk the job writes to is full", "https://man7.org/linux/man-pages/man3/errno.3.html",
        ),
    )  # fmt: skip


def _nvml_rules() -> tuple[Rule, ...]:
    return (
        _row(
            "nvml.row-remap-failure", "nvml", {"row_remap_failure": True}, Verdict.NODE_FAULT, Strength.PROOF, 0.9,
            Blames.GPU, "spare memory rows are used up: the board is to be replaced", _MEMORY,
        ),
        _row(
            "nvml.ecc-uncorrected", "nvml", {"ecc_uncorrected": range(1, MANY)}, Verdict.NODE_FAULT, Strength.PROOF, 0.85,
            Blames.GPU, "the GPU has counted memory errors it could not correct since it was started", _MEMORY,
        ),
        _row(
            "nvml.recovery-action", "nvml", {"recovery_action": range(1, MANY)}, Verdict.NODE_FAULT, Strength.PROOF, 0.9,
            Blames.GPU, "the driver asks for a reset, reboot or drain of this GPU", _NVML,
        ),
        _row(
            "nvml.fabric", "nvml", {"fabric_healthy": False}, Verdict.NODE_FAULT, Strength.PROOF, 0.85, Blames.NODE,
            "the GPU is not registered with its NVLink fabric", _NVML,
        ),
        _row(
            "nvml.row-remap-pending", "nvml", {"row_remap_pending": True}, Verdict.TRANSIENT, Strength.CONTEXT, 0.65,
            Blames.GPU, "a row will be remapped at the next reset: drain when convenient", _MEMORY,
        ),
        _row(
            "nvml.throttled", "nvml", {"hw_slowdown": True}, Verdict.NODE_FAULT, Strength.CONTEXT, 0.55, Blames.NODE,
            "the hardware slows the GPU down: heat or power", _NVML,
        ),
    )  # fmt: skip


def _link_rules() -> tuple[Rule, ...]:
    return (
        _row(
            "ib.flushed", "ib_completion", {"status": 5}, Verdict.UNKNOWN, Strength.ECHO, 0.1, Blames.NOBODY,
            "work that was thrown away because the connection was broken already", _WC,
        ),
        _row(
            "ib.length", "ib_completion", {"status": 1}, Verdict.USER_ERROR, Strength.SYMPTOM, 0.6, Blames.CODE,
            "the two ends disagree about the size of a message", _WC,
        ),
        _row(
            "ib.protection", "ib_completion", {"status": 4}, Verdict.USER_ERROR, Strength.SYMPTOM, 0.55, Blames.NODE,
            "memory that the adapter may not touch: peer memory or access control of PCIe is set up wrongly", _WC,
        ),
        _row(
            "ib.general", "ib_completion", {"status": 21}, Verdict.NODE_FAULT, Strength.SYMPTOM, 0.6, Blames.NODE,
            "the adapter itself failed", _WC,
        ),
        _row(
            "ib.retries", "ib_completion", {}, Verdict.NODE_FAULT, Strength.SYMPTOM, 0.3, Blames.PEER,
            "the peer did not acknowledge: dead, stalled, or the way to it is broken; check it before it is trusted", _WC,
            ("collective.timeout",),
        ),
        _row(
            "ib.link-counter", "ib_counter", {"link_downed_delta": range(1, MANY)}, Verdict.TRANSIENT, Strength.SYMPTOM, 0.55,
            Blames.LINK, "the port went down and came back while the job ran", _COUNTERS,
        ),
        _row(
            "ib.port-down", "ib_counter", {"state": ("DOWN", "INIT", "Down", "Init")}, Verdict.NODE_FAULT, Strength.PROOF, 0.8,
            Blames.NODE, "a port that the job needs is down", _COUNTERS,
        ),
        _row(
            "ib.symbol-errors", "ib_counter", {"symbol_error_delta": range(1000, MANY)}, Verdict.TRANSIENT, Strength.CONTEXT,
            0.6, Blames.LINK, "the link corrects many errors: cable or seat", _COUNTERS,
        ),
    )  # fmt: skip


def _job_rules() -> tuple[Rule, ...]:
    return (
        _row(
            "job.node-silent", "silent", {"reachable": False}, Verdict.NODE_FAULT, Strength.CAUSE, 0.7, Blames.NODE,
            "the node's agent fell silent and cannot be reached", _WATCHDOG,
        ),
        _row(
            "job.agent-silent", "silent", {}, Verdict.UNKNOWN, Strength.SYMPTOM, 0.4, Blames.NODE,
            "this node was the first to fall silent", _WATCHDOG,
        ),
        _row(
            "job.probe-failed", "probe", {"ok": False}, Verdict.NODE_FAULT, Strength.PROOF, 0.85, Blames.NODE,
            "a health check of this node failed", _NVML,
        ),
        _row(
            "collective.timeout", "collective_timeout", {}, Verdict.UNKNOWN, Strength.ECHO, 0.3, Blames.RANK,
            "this rank waited for others in a collective", _WATCHDOG,
        ),
        _row(
            "collective.state", "collective_state", {}, Verdict.UNKNOWN, Strength.ECHO, 0.1, Blames.RANK,
            "how far this rank had come in a group", _WATCHDOG,
        ),
        _row(
            "net.peer-gone", "peer_gone", {}, Verdict.UNKNOWN, Strength.ECHO, 0.2, Blames.PEER,
            "a peer closed the connection or vanished", _NCCL_CODES,
        ),
        _row(
            "python.pipe-gone", "exception",
            {"type": ("EOFError", "UnpicklingError", "BrokenPipeError", "ConnectionResetError", "ConnectionRefusedError"), "pipe": True},
            Verdict.UNKNOWN, Strength.ECHO, 0.2, Blames.RANK,
            "a process of this program did not get what another one should have sent: that one had ended", _PYTHON,
        ),
        _row(
            "rdzv.too-many", "store_barrier", {"too_many": True}, Verdict.USER_ERROR, Strength.SYMPTOM, 0.5, Blames.CODE,
            "more processes came to the rendezvous than belong to the job: launched twice, or a store of an earlier run",
            "https://docs.pytorch.org/docs/stable/elastic/rendezvous.html",
        ),
        _row(
            "rdzv.too-few", "store_barrier", {}, Verdict.UNKNOWN, Strength.ECHO, 0.2, Blames.PEER,
            "some processes did not come to the rendezvous; they know why",
            "https://docs.pytorch.org/docs/stable/elastic/rendezvous.html",
        ),
        _row(
            "horovod.missing", "stall", {}, Verdict.UNKNOWN, Strength.ECHO, 0.3, Blames.PEER,
            "the ranks that are named did not come to a collective", "https://github.com/horovod/horovod/issues/403",
        ),
        _row(
            "hccl.rank-missing", "hccl_wait", {}, Verdict.PROCESS_FAULT, Strength.SYMPTOM, 0.45, Blames.RANK,
            "the rank that is named did not come to a collective: look at its process first",
            "https://github.com/vllm-project/vllm-ascend/issues/3413",
        ),
        _row(
            "nccl.result-chain", "nccl_result", {}, Verdict.UNKNOWN, Strength.ECHO, 0.1, Blames.NOBODY,
            "an error code on its way up through the library", _NCCL_CODES,
        ),
    )  # fmt: skip


_STOPS = (6, 13, 15)
"""Signals with which watchdogs and launchers end processes that did nothing wrong."""


def _exit_rules() -> tuple[Rule, ...]:
    return (
        _row(
            "exit.stopped", "exit", {"signal": _STOPS}, Verdict.UNKNOWN, Strength.ECHO, 0.1, Blames.RANK,
            "ended by a watchdog or the launcher after something else had failed", _SIGNALS,
        ),
        _row(
            "exit.killed", "exit", {"signal": 9}, Verdict.OOM_HOST, Strength.SYMPTOM, 0.4, Blames.RANK,
            "killed from outside: mostly by the kernel for memory, but only its log or the cgroup can prove that", _SIGNALS,
        ),
        _row(
            "exit.interrupted", "exit", {"signal": 2}, Verdict.USER_ERROR, Strength.SYMPTOM, 0.7, Blames.NOBODY,
            "a person pressed Ctrl-C", _SIGNALS,
        ),
        _row(
            "exit.hang-up", "exit", {"signal": 1}, Verdict.PROCESS_FAULT, Strength.SYMPTOM, 0.65, Blames.NODE,
            "the session it belonged to was closed", _SIGNALS,
        ),
        _row(
            "exit.warned", "exit", {"signal": (10, 12, 24)}, Verdict.PREEMPTION, Strength.SYMPTOM, 0.65, Blames.NOBODY,
            "the signal with which schedulers announce the end of the job's time", _SLURM,
        ),
        _row(
            "exit.segfault", "exit", {"signal": 11}, Verdict.PROCESS_FAULT, Strength.SYMPTOM, 0.4, Blames.RANK,
            "the process crashed; without its stack nothing tells a bug from a bad node", _SIGNALS,
        ),
        _row(
            "exit.bus-error", "exit", {"signal": 7}, Verdict.OOM_HOST, Strength.SYMPTOM, 0.35, Blames.RANK,
            "mostly /dev/shm is full; else a mapped file went away, or memory is bad", _SIGNALS,
        ),
        _row(
            "exit.illegal-instruction", "exit", {"signal": (4, 8)}, Verdict.USER_ERROR, Strength.SYMPTOM, 0.6, Blames.CODE,
            "the program was built for another processor, or divides by zero", _SIGNALS,
        ),
        _row(
            "exit.usage", "exit", {"code": (2, 126, 127)}, Verdict.USER_ERROR, Strength.SYMPTOM, 0.65, Blames.CODE,
            "wrong options, or a program that cannot be started", _SIGNALS,
        ),
        _row(
            "exit.code", "exit", {}, Verdict.UNKNOWN, Strength.ECHO, 0.1, Blames.RANK,
            "the process ended with an error; what it printed says which", _SIGNALS,
        ),
    )  # fmt: skip


def _scheduler_rules() -> tuple[Rule, ...]:
    """Rows of ``sacct`` and ``scontrol show job``: the state decides, then the reason, then the exit code."""
    out_of_memory = {"state": "OUT_OF_MEMORY"}
    return (
        _row(
            "slurm.job-node-lost", "slurm_job", {"state": ("NODE_FAIL", "BOOT_FAIL")}, Verdict.NODE_FAULT, Strength.PROOF,
            0.9, Blames.NODE, "the scheduler lost a node of the job", _SLURM,
        ),
        _row(
            "slurm.job-memory", "slurm_job", out_of_memory, Verdict.OOM_HOST, Strength.PROOF, 0.95, Blames.NODE,
            "a step of the job went over its memory limit", _SLURM,
        ),
        _row(
            "slurm.job-memory-mark", "slurm_job", {"signal": 125}, Verdict.OOM_HOST, Strength.CAUSE, 0.7, Blames.NODE,
            "the exit code with which the scheduler marks a step that went over its memory limit", _SLURM,
        ),
        _row(
            "slurm.job-ended", "slurm_job",
            {"state": ("TIMEOUT", "DEADLINE", "PREEMPTED", "REQUEUED", "SUSPENDED")}, Verdict.PREEMPTION, Strength.CAUSE,
            0.95, Blames.NOBODY, "the job's time was up, or another job took its place", _SLURM,
        ),
        _row(
            "slurm.job-cancelled", "slurm_job", {"state": "CANCELLED"}, Verdict.USER_ERROR, Strength.CAUSE, 0.7,
            Blames.NOBODY, "a person or a script cancelled the job", _SLURM,
        ),
        _row(
            "slurm.job-not-started", "slurm_job", {"reason": ("JobLaunchFailure", "NodeDown", "Prolog")},
            Verdict.NODE_FAULT, Strength.CAUSE, 0.65, Blames.NODE, "a node could not start the job", _SLURM,
        ),
        _row(
            "slurm.job-not-allowed", "slurm_job",
            {"reason": ("BadConstraints", "InvalidQOS", "InvalidAccount", "PartitionNodeLimit", "PartitionTimeLimit")},
            Verdict.USER_ERROR, Strength.CAUSE, 0.8, Blames.CODE, "no node may ever run what was asked for", _SLURM,
        ),
        _row(
            "slurm.job-killed", "slurm_job", {"signal": 9}, Verdict.OOM_HOST, Strength.SYMPTOM, 0.35, Blames.NODE,
            "a step was killed; the scheduler does not say for what", _SLURM,
        ),
        _row(
            "slurm.job-failed", "slurm_job", {}, Verdict.UNKNOWN, Strength.ECHO, 0.1, Blames.NOBODY,
            "the scheduler only passes on how the job's processes ended", _SLURM,
        ),
    )  # fmt: skip


def _exception_rules() -> tuple[Rule, ...]:
    return (
        _row(
            "python.background", "exception", {"family": ("program", "other"), "background": True}, Verdict.USER_ERROR,
            Strength.SYMPTOM, 0.45, Blames.CODE, "an exception that ended a thread beside the program, which goes on", _PYTHON,
        ),
        _row(
            "python.user-exception", "exception", {"family": "program"}, Verdict.USER_ERROR, Strength.CAUSE, 0.7,
            Blames.CODE, "the program raised an exception that only its code or its input can raise", _PYTHON,
        ),
        _row(
            "python.interrupted", "exception", {"family": "person"}, Verdict.USER_ERROR, Strength.CAUSE, 0.8,
            Blames.NOBODY, "a person pressed Ctrl-C", _PYTHON,
        ),
        _row(
            "python.timeout", "exception", {"family": "network"},
            Verdict.TRANSIENT, Strength.SYMPTOM, 0.5, Blames.NOBODY, "something outside the process did not answer", _PYTHON,
        ),
        _row(
            "python.memory", "exception", {"family": "memory"}, Verdict.OOM_HOST, Strength.CAUSE, 0.75, Blames.NODE,
            "the interpreter got no more memory from the host", _PYTHON,
        ),
        _row(
            "python.storage", "exception", {"family": "storage"}, Verdict.STORAGE, Strength.SYMPTOM, 0.5, Blames.STORAGE,
            "the system refused a file operation, or a file is not what was written", _PYTHON,
        ),
        _row(
            "python.numbers", "exception", {"family": "numbers"}, Verdict.NUMERICAL, Strength.CAUSE, 0.65, Blames.NOBODY,
            "the program met a number that is none", _PYTHON,
        ),
        _row(
            "python.device-memory", "exception", {"family": "device-memory"}, Verdict.OOM_GPU, Strength.CAUSE, 0.75,
            Blames.GPU, "the program says in its own words that the device had no memory left", _PYTHON,
        ),
        _row(
            "python.hardware", "exception", {"family": "hardware"}, Verdict.NODE_FAULT, Strength.SYMPTOM, 0.5, Blames.NODE,
            "the program says in its own words that a device or a node is not usable", _PYTHON,
        ),
        _row(
            "python.passed-on", "exception", {"family": "echo"}, Verdict.UNKNOWN, Strength.ECHO, 0.1, Blames.PEER,
            "an exception that only says that another process failed or went away", _PYTHON,
        ),
        _row(
            "python.other-exception", "exception", {}, Verdict.USER_ERROR, Strength.SYMPTOM, 0.5, Blames.CODE,
            "an exception of which no rule knows more; if nothing else is wrong, it is the program's own", _PYTHON,
        ),
    )  # fmt: skip


def _complaint_rules() -> tuple[Rule, ...]:
    """For lines of which no rule knows more than their words; see :mod:`hotswap.diagnosis.words`."""
    said = "no rule knows this message; its words are about"
    return tuple(
        _row(
            f"words.{topic}",
            "complaint",
            {"topic": topic},
            verdict,
            Strength.CONTEXT,
            0.3,
            blames,
            f"{said} {what}",
            _SIGNALS,
        )
        for topic, verdict, blames, what in (
            ("numbers", Verdict.NUMERICAL, Blames.NOBODY, "numbers that went wrong"),
            ("device-memory", Verdict.OOM_GPU, Blames.GPU, "memory of the device"),
            ("memory", Verdict.OOM_HOST, Blames.NODE, "memory of the host"),
            ("storage", Verdict.STORAGE, Blames.STORAGE, "files and disks"),
            ("hardware", Verdict.NODE_FAULT, Blames.NODE, "hardware, drivers or nodes"),
            ("service", Verdict.TRANSIENT, Blames.NOBODY, "a service that was busy or away"),
            ("process", Verdict.PROCESS_FAULT, Blames.RANK, "a process that crashed"),
            ("program", Verdict.USER_ERROR, Blames.CODE, "options, versions or things that are missing"),
        )
    )


COMPLAINT_RULES = _complaint_rules()
XID_RULES = _xid_rules()
SXID_RULES = _sxid_rules()
FACT_RULES = (*_memory_rules(), *_nvml_rules(), *_link_rules(), *_job_rules(), *_scheduler_rules(), *_exit_rules())
EXCEPTION_RULES = _exception_rules()
