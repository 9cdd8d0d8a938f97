"""The one ordered table of rules. The first rule that applies to an observation decides what it means; then the case rules
look at everything together. A user's own rules stand before all of these.
"""

from __future__ import annotations

from hotswap.diagnosis.model import Blames, Strength, Verdict
from hotswap.diagnosis.rule import Case, Rule
from hotswap.diagnosis.rules_codes import COMPLAINT_RULES, EXCEPTION_RULES, FACT_RULES, SXID_RULES, XID_RULES
from hotswap.diagnosis.rules_first import FIRST
from hotswap.diagnosis.rules_hardware import HARDWARE
from hotswap.diagnosis.rules_last import LAST
from hotswap.diagnosis.rules_network import NETWORK
from hotswap.diagnosis.rules_program import ACCELERATORS, PROGRAM
from hotswap.diagnosis.rules_system import SYSTEM

_DIST = "https://docs.pytorch.org/docs/stable/distributed.html"
_HUB = "https://huggingface.co/docs/huggingface_hub/package_reference/utilities"
_WATCH = "https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html"
_XID = "https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html"
_OOM = "https://docs.kernel.org/admin-guide/mm/concepts.html"
_VMSTAT = "https://docs.kernel.org/filesystems/proc.html"
_SIGNALS = "https://man7.org/linux/man-pages/man7/signal.7.html"
_ELASTIC = "https://docs.pytorch.org/docs/stable/elastic/run.html"
_WC = "https://man7.org/linux/man-pages/man3/ibv_poll_cq.3.html"
_NCCL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"
_OPERATIONS = "https://github.com/bigscience-workshop/bigscience/blob/master/train/tr11-176B-ml/chronicles.md"


def _case(
    rule_id: str,
    predicate: str,
    verdict: Verdict,
    strength: Strength,
    confidence: float,
    blames: Blames,
    reason: str,
    source: str,
) -> Rule:
    return Rule(
        id=rule_id,
        when=Case(predicate),
        verdict=verdict,
        strength=strength,
        confidence=confidence,
        blames=blames,
        reason=reason,
        source=source,
    )


CASES: tuple[Rule, ...] = (
    _case(
        "case.xid-repeats", "xid_repeats", Verdict.NODE_FAULT, Strength.PROOF, 0.75, Blames.GPU,
        "codes that programs cause, but from process after process on one GPU: the GPU", _XID,
    ),
    _case(
        "case.nvlink-hang", "nvlink_hang", Verdict.NODE_FAULT, Strength.PROOF, 0.75, Blames.GPU,
        "an NVLink event that calls itself non-fatal, and traffic over the link that never finished", _XID,
    ),
    _case(
        "case.parked-after-memory-error", "parked_after_memory_error", Verdict.NODE_FAULT, Strength.PROOF, 0.75, Blames.GPU,
        "the program could be restarted after this memory error, but the node no longer offers the GPU", _XID,
    ),
    _case(
        "case.common-cause", "common_cause", Verdict.UNKNOWN, Strength.PROOF, 0.4, Blames.NOBODY,
        "many nodes lost at once have one cause outside them: power, a switch, a file server", _OPERATIONS,
    ),
    _case(
        "case.collective-mismatch", "collective_mismatch", Verdict.USER_ERROR, Strength.CAUSE, 0.75, Blames.CODE,
        "ranks of one group called different operations or sizes at the same place: their programs diverged", _DIST,
    ),
    _case(
        "case.collective-mismatch-unnamed", "collective_mismatch_unnamed", Verdict.USER_ERROR, Strength.SYMPTOM, 0.6, Blames.CODE,
        "ranks wait in different operations under one sequence number; the group is not printed, so it may be two groups", _DIST,
    ),
    _case(
        "case.alike-everywhere", "alike_everywhere", Verdict.USER_ERROR, Strength.CAUSE, 0.85, Blames.CODE,
        "the same exception on all ranks: the program or its input, not a node", _ELASTIC,
    ),
    _case(
        "case.before-first-step", "before_first_step", Verdict.USER_ERROR, Strength.SYMPTOM, 0.6, Blames.CODE,
        "the program stopped before its first steps were done: it would do so again", _ELASTIC,
    ),
    _case(
        "case.crash-everywhere", "crash_everywhere", Verdict.USER_ERROR, Strength.SYMPTOM, 0.6, Blames.CODE,
        "native crashes on several ranks before the first step: libraries that do not fit together", _ELASTIC,
    ),
    _case(
        "case.killed-for-memory", "killed_for_memory", Verdict.OOM_HOST, Strength.SYMPTOM, 0.55, Blames.NODE,
        "killed without a word while the host's memory was filling up", _OOM,
    ),
    _case(
        "case.killed-not-for-memory", "killed_not_for_memory", Verdict.PROCESS_FAULT, Strength.SYMPTOM, 0.5, Blames.RANK,
        "killed by somebody, and not for memory: the kernel of its node counts no such kill", _VMSTAT,
    ),
    _case(
        "case.killed-as-host-ran-out", "killed_as_host_ran_out", Verdict.OOM_HOST, Strength.CAUSE, 0.75, Blames.NODE,
        "killed while the kernel of its node was killing for memory", _VMSTAT,
    ),
    _case(
        "case.aborted-first", "aborted_first", Verdict.PROCESS_FAULT, Strength.SYMPTOM, 0.5, Blames.RANK,
        "the process ended itself (SIGABRT) before anything else had failed: a library found its own state impossible", _SIGNALS,
    ),
    _case(
        "case.killed-by-launcher", "killed_by_launcher", Verdict.UNKNOWN, Strength.ECHO, 0.1, Blames.NOBODY,
        "killed after the launcher had asked this very process to stop", _ELASTIC,
    ),
    _case(
        "case.connect-after-start", "connect_after_start", Verdict.UNKNOWN, Strength.ECHO, 0.2, Blames.PEER,
        "a peer that could be reached before is gone", _NCCL,
    ),
    _case(
        "case.both-ends-reset", "both_ends_reset", Verdict.TRANSIENT, Strength.SYMPTOM, 0.5, Blames.LINK,
        "both ends of a connection were reset: something between them cut it", _NCCL,
    ),
    _case(
        "case.everybody-blames-one", "everybody_blames_one", Verdict.NODE_FAULT, Strength.SYMPTOM, 0.6, Blames.PEER,
        "all nodes lost the same peer and only that one", _WC,
    ),
    _case(
        "case.terminated-after-failure", "terminated_after_failure", Verdict.UNKNOWN, Strength.ECHO, 0.2, Blames.NOBODY,
        "the launcher was told to stop after ranks had lost each other", _ELASTIC,
    ),
    _case(
        "case.memory-before-model", "memory_before_model", Verdict.NODE_FAULT, Strength.CAUSE, 0.6, Blames.GPU,
        "no GPU memory before any model was built: another process holds it, or the GPU is sick", _OPERATIONS,
    ),
    _case(
        "case.retries-then-error", "retries_then_error", Verdict.TRANSIENT, Strength.CAUSE, 0.75, Blames.NOBODY,
        "the network failed for long, and the exception at the end only looks like a wrong path", _HUB,
    ),
    _case(
        "case.timeout-while-saving", "timeout_while_saving", Verdict.USER_ERROR, Strength.SYMPTOM, 0.45, Blames.CODE,
        "a checkpoint took longer than the collectives may wait: raise the time-out or save in shards", _WATCH,
    ),
    _case(
        "case.silent-hang", "silent_hang", Verdict.PROCESS_FAULT, Strength.SYMPTOM, 0.45, Blames.NOBODY,
        "no step is finished any more and nobody says why: a lock or a loader that is stuck in some process", _WATCH,
    ),
    _case(
        "case.link-flaps", "link_flaps", Verdict.NODE_FAULT, Strength.CAUSE, 0.65, Blames.NODE,
        "a link of this node keeps going down", _NCCL,
    ),
    _case(
        "case.loss-spike", "loss_spike", Verdict.NUMERICAL, Strength.SYMPTOM, 0.7, Blames.NOBODY,
        "gradient norm and loss jumped: keep the checkpoint before it and watch whether it recovers", _OPERATIONS,
    ),
    _case(
        "case.slowdown", "slowdown", Verdict.NODE_FAULT, Strength.SYMPTOM, 0.5, Blames.NODE,
        "every step became slower at once and stays so: one slow GPU holds up all; health facts say whose", _OPERATIONS,
    ),
)  # fmt: skip

LINE_RULES: tuple[Rule, ...] = (
    *XID_RULES,
    *SXID_RULES,
    *FIRST,
    *FACT_RULES,
    *HARDWARE,
    *SYSTEM,
    *ACCELERATORS,
    *NETWORK,
    *PROGRAM,
    *LAST,
    *EXCEPTION_RULES,
    *COMPLAINT_RULES,
)

RULES: tuple[Rule, ...] = (*LINE_RULES, *CASES)
"""All of hotswap's own rules, in the order in which they are tried."""
