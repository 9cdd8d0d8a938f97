"""Root against echo: whole failures, told in a few lines, and what the answer must name."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotswap.diagnosis import Blames, Diagnosis, Evidence, RuleBook, Strength, Verdict, diagnose
from hotswap.diagnosis.readers import read_text
from hotswap.diagnosis.rule import Text, text_rule
from hotswap.diagnosis.table import CASES, RULES

TIMEOUT = (
    "[rank{rank}]: [PG ID {group} PG GUID {group} Rank {rank}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={size}, NumelOut={size}, Timeout(ms)=600000) ran for 600056 milliseconds"
)


def timeout(rank: int, *, seq: int = 90, op: str = "ALLREDUCE", size: int = 64, group: int = 1) -> str:
    return TIMEOUT.format(rank=rank, seq=seq, op=op, size=size, group=group)


def unnamed(rank: int, *, op: str) -> str:
    return f"[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType={op}, Timeout(ms)=600000)"


def answer(*lines: str) -> Diagnosis:
    return diagnose(read_text("\n".join(lines)))


def xid(code: int, *, gpu: str = "3d", pid: int = 1, minute: int = 0, detail: str = "Ch 8") -> str:
    return f"[Mon Mar  2 10:{minute:02d}:00 2026] NVRM: Xid (PCI:0000:{gpu}:00): {code}, pid={pid}, {detail}"


def step(number: int, *, seconds: float = 1.0, loss: float = 2.0, norm: float = 0.2) -> str:
    return f"iteration {number:6d}/ 9000 | elapsed time per iteration (s): {seconds} | lm loss: {loss:.4E} | grad norm: {norm} |"


CASE_EXAMPLES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "case.xid-repeats": (
        tuple(xid(31, pid=pid, minute=5 * pid) for pid in (1, 2, 3)),
        tuple(xid(31, pid=pid, gpu=gpu, minute=5) for pid, gpu in ((1, "3d"), (2, "4d"), (3, "5d"))),
    ),
    "case.nvlink-hang": (
        (xid(145, detail="RLW_CTRL Nonfatal Link 3"), xid(137, detail="on link 3")),
        (xid(145, detail="RLW_CTRL Nonfatal Link 3"),),
    ),
    "case.parked-after-memory-error": (
        (xid(94, detail="Contained: SM"), "'nvidia.com/gpu' device marked unhealthy: GPU-1"),
        (xid(94, detail="Contained: SM"),),
    ),
    "case.collective-mismatch": (
        (timeout(0), timeout(1, op="BROADCAST")),
        (timeout(0), timeout(1, op="BROADCAST", group=2)),
    ),
    "case.collective-mismatch-unnamed": (
        (unnamed(0, op="ALLREDUCE"), unnamed(1, op="BROADCAST")),
        (unnamed(0, op="ALLREDUCE"), unnamed(1, op="ALLREDUCE")),
    ),
    "case.alike-everywhere": (
        tuple(f"[rank{rank}]: RuntimeError: the frobnicator is out of tune" for rank in range(4)),
        ("[rank0]: RuntimeError: the frobnicator is out of tune", timeout(1), timeout(2), timeout(3)),
    ),
    "case.crash-everywhere": (
        tuple(f"[rank{rank}]: Fatal Python error: Segmentation fault" for rank in range(4)),
        ("[rank2]: Fatal Python error: Segmentation fault",),
    ),
    "case.killed-for-memory": (
        (
            "CPU memory usage: 20000 MB",
            "CPU memory usage: 90000 MB",
            "failed (exitcode: -9) local_rank: 0 (pid: 4) of binary: python",
        ),
        (
            "CPU memory usage: 90000 MB",
            "CPU memory usage: 2000 MB",
            "failed (exitcode: -9) local_rank: 0 (pid: 4) of binary: python",
        ),
    ),
    "case.killed-by-launcher": (
        ("Sending process 4 closing signal SIGTERM", "failed (exitcode: -9) local_rank: 0 (pid: 4) of binary: python"),
        ("Sending process 5 closing signal SIGTERM", "failed (exitcode: -9) local_rank: 0 (pid: 4) of binary: python"),
    ),
    "case.connect-after-start": (
        (timeout(0, seq=4000), "socketPollConnect: Connect to 10.0.0.4<4> returned 113(No route to host)"),
        (timeout(0, seq=1), "socketPollConnect: Connect to 10.0.0.4<4> returned 113(No route to host)"),
    ),
    "case.before-first-step": (
        ("Starting elastic_operator with launch configs:", "RuntimeError: the frobnicator is closed"),
        ("Starting elastic_operator with launch configs:", step(7), "RuntimeError: the frobnicator is closed"),
    ),
    "case.both-ends-reset": (
        (
            "node-1:1:2 [3] NCCL WARN Call to write failed : Connection reset by peer",
            "node-2:1:2 [3] NCCL WARN Call to recv failed : Connection reset by peer",
        ),
        ("node-1:1:2 [3] NCCL WARN Call to write failed : Connection reset by peer",),
    ),
    "case.everybody-blames-one": (
        tuple(
            f"node-{node}:1:2 [0] NCCL WARN NET/IB : Got completion from peer 10.0.0.9<1> with status=12 opcode=0"
            for node in (1, 2, 3)
        ),
        tuple(
            f"node-{node}:1:2 [0] NCCL WARN NET/IB : Got completion from peer 10.0.0.{node}<1> with status=12 opcode=0"
            for node in (1, 2, 3)
        ),
    ),
    "case.common-cause": (
        tuple(f"Mar  2 10:00:0{node} node-{node} kubelet[1]: Node is not ready" for node in (1, 2, 3)),
        tuple(f"Mar  2 10:0{node}:00 node-{node} kubelet[1]: Node is not ready" for node in (1, 2, 3)),
    ),
    "case.terminated-after-failure": (
        (timeout(0), "W0409 07:35:44 Received 15 death signal, shutting down workers"),
        ("W0409 07:35:44 Received 15 death signal, shutting down workers", timeout(0)),
    ),
    "case.memory-before-model": (
        ("    torch.distributed.barrier()", "RuntimeError: CUDA error: out of memory"),
        (step(12), "    torch.distributed.barrier()", "RuntimeError: CUDA error: out of memory"),
    ),
    "case.retries-then-error": (
        ("WARNING HTTPSConnectionPool(host='hub.local', port=443): Read timed out. Retrying", "FileNotFoundError"),
        ("FileNotFoundError", "WARNING HTTPSConnectionPool(host='hub.local', port=443): Read timed out. Retrying"),
    ),
    "case.timeout-while-saving": (
        (step(5), "INFO Saving checkpoint. This may take some time.", timeout(3)),
        ("INFO Saving checkpoint. This may take some time.", step(6), timeout(3)),
    ),
    "case.silent-hang": (
        (
            step(5),
            "[2026-03-02 04:00:00] PULSE: job is running",
            "[2026-03-02 05:00:00] PULSE: job is running for long",
        ),
        (
            "[2026-03-02 04:00:00] PULSE: job is running",
            "[2026-03-02 05:00:00] PULSE: job is running for long",
            step(5),
        ),
    ),
    "case.link-flaps": (
        tuple(f"Mar  2 1{hour}:00:00 node-1 kernel: mlx5_core 0000:5e:00.0 eth2: Link down" for hour in range(3)),
        tuple(f"Mar  2 1{node}:00:00 node-{node} kernel: mlx5_core 0000:5e:00.0 eth2: Link down" for node in range(3)),
    ),
    "case.loss-spike": (
        (step(1), step(2), step(3, loss=5.0, norm=900.0), step(4, loss=3.0, norm=100.0)),
        (step(1), step(2, norm=0.4), step(3, loss=2.1, norm=0.3)),
    ),
    "case.slowdown": (
        (step(1, seconds=10.0), step(2, seconds=10.01), step(3, seconds=11.0), step(4, seconds=11.1)),
        (step(1, seconds=10.0), step(2, seconds=11.2), step(3, seconds=10.0), step(4, seconds=11.1)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASE_EXAMPLES)
def test_case(name: str) -> None:
    yes, no = (answer(*lines) for lines in CASE_EXAMPLES[name])
    rule = next(rule for rule in CASES if rule.id == name)
    assert name in (*yes.rules, *yes.echo_rules), yes
    assert name not in (*no.rules, *no.echo_rules), no
    if rule.strength > Strength.ECHO:
        assert (yes.verdict, yes.rules[0]) == (rule.verdict, name)


def test_every_case_has_an_example() -> None:
    # Of what a job knows itself there are no lines; see test_facts.py.
    of_a_job = {"case.killed-not-for-memory", "case.killed-as-host-ran-out", "case.aborted-first"}
    assert {*CASE_EXAMPLES, *of_a_job} == {rule.id for rule in CASES}


def test_one_bad_gpu_and_a_hundred_echoes() -> None:
    lines = [timeout(rank) for rank in range(100) if rank != 17]
    lines += [f"[rank{rank}]: RuntimeError: Connection closed by peer [10.0.0.9]:5000" for rank in range(40)]
    lines.insert(50, "[rank17]: RuntimeError: CUDA error: uncorrectable ECC error encountered")
    found = answer(*lines)
    assert (found.verdict, found.culprit.rank, found.confident) == (Verdict.NODE_FAULT, 17, True)
    assert found.rules[0] == "gpu.ecc-uncorrectable"
    assert [one.rank for one in found.deciding] == [17]
    assert {"collective.timeout", "net.peer-gone"} <= set(found.echo_rules)


def test_only_echoes_are_unknown_and_name_the_silent_rank() -> None:
    found = answer(*(timeout(rank) for rank in (0, 1, 3)))
    assert (found.verdict, found.confident) == (Verdict.UNKNOWN, False)
    assert (found.culprit.kind, found.culprit.rank) == (Blames.RANK, 2)


def test_the_rank_behind_in_the_same_group_is_suspected() -> None:
    found = answer(timeout(0, seq=90), timeout(1, seq=90), timeout(2, seq=88))
    assert [one.rank for one in found.suspects] == [2]
    apart = answer(timeout(0, seq=90, group=1), timeout(2, seq=88, group=2))
    assert all("behind" not in one.detail for one in apart.suspects)


def test_what_is_raised_again_says_less_than_the_error_itself() -> None:
    again = "OSError: Caught OSError in DataLoader worker process 0."
    found = answer(again, "Original Traceback (most recent call last):", "OSError: [Errno 5] Input/output error")
    assert (found.verdict, found.rules[0]) == (Verdict.STORAGE, "storage.io-error")
    alone = answer("FileNotFoundError: Caught FileNotFoundError in DataLoader worker process 2.")
    assert (alone.verdict, alone.confident) == (Verdict.USER_ERROR, False)


def test_nothing_recognised() -> None:
    found = answer("all is well", "iteration 3 done")
    assert (found.verdict, found.confidence, found.rules) == (Verdict.UNKNOWN, 0.0, ())


def test_the_first_of_two_causes_in_time_is_the_root_whatever_the_order_of_the_files() -> None:
    late = Evidence(source="a", time=200.0, text="OSError: [Errno 28] No space left on device", node="node-1")
    early = Evidence(source="b", time=100.0, text="OSError: [Errno 116] Stale file handle", node="node-2")
    for order in ((late, early), (early, late)):
        found = diagnose(order)
        assert (found.rules[0], found.culprit.node) == ("storage.stale-handle", "node-2")


def test_a_line_without_time_belongs_to_the_one_before_it() -> None:
    first = Evidence(source="a", time=100.0, order=0, text="starting")
    then = Evidence(source="a", order=1, text="OSError: [Errno 116] Stale file handle")
    other = Evidence(source="b", time=150.0, text="OSError: [Errno 28] No space left on device")
    assert diagnose([other, then, first]).rules[0] == "storage.stale-handle"


def test_a_gpu_that_dies_explains_what_its_programs_and_peers_say() -> None:
    found = answer(
        xid(31, pid=5),
        xid(79),
        xid(45, pid=5),
        "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 3 LTSSM Fault Up",
    )
    assert (found.verdict, found.rules[0], found.culprit.gpu) == (Verdict.NODE_FAULT, "xid.79", "0000:3d:00")
    assert {"xid.31", "xid.45", "sxid.20034"} <= set(found.echo_rules)


def test_clean_up_names_the_gpu_where_it_began() -> None:
    found = answer(
        *(xid(45, gpu=gpu, detail="Ch 1 caused by previous Xid 145") for gpu in ("11", "22")),
        xid(45, gpu="33", detail="Ch 1 caused by previous Xid 149"),
    )
    assert (found.verdict, found.culprit.gpu) == (Verdict.NODE_FAULT, "0000:33:00")


def test_a_user_error_is_not_hidden_by_bookkeeping_of_the_hardware() -> None:
    found = answer(xid(63, detail="Row Remapper: pending"), "[rank0]: ValueError: the batch is empty")
    assert found.verdict is Verdict.USER_ERROR


def test_a_hardware_code_is_never_a_user_error() -> None:
    for code in (48, 62, 64, 74, 79, 95, 119, 140, 149):
        found = answer("[rank0]: ValueError: the batch is empty", xid(code, detail="x"))
        assert found.verdict is Verdict.NODE_FAULT, code


def test_a_warning_that_was_survived_does_not_hide_what_came_later() -> None:
    found = answer(
        "WARNING HTTPSConnectionPool(host='hub.local', port=443): Read timed out. Retrying in 1s",
        "[rank0]: KeyError: 'labels'",
    )
    assert found.verdict is Verdict.USER_ERROR


def test_the_oom_killer_explains_a_bare_kill() -> None:
    found = answer(
        "srun: error: node-7: task 3: Killed",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=77.0. Some of the step tasks have been OOM Killed.",
    )
    assert (found.verdict, found.rules[0]) == (Verdict.OOM_HOST, "host.oom-killer")


def test_words_alone_are_a_guess_and_only_if_nothing_else_was_seen() -> None:
    guess = "sentinel: critical firmware event"
    found = answer(guess)
    assert (found.verdict, found.confident, found.rules) == (Verdict.NODE_FAULT, False, ("words.hardware",))
    assert answer(guess, "{3}[Hardware Error]: event severity: corrected").verdict is Verdict.TRANSIENT
    assert answer(guess, "[rank0]: KeyError: 'labels'").verdict is Verdict.USER_ERROR


def test_the_same_exception_on_all_ranks_is_surer() -> None:
    alone = answer("[rank0]: RuntimeError: the frobnicator is closed")
    everywhere = answer(*(f"[rank{rank}]: RuntimeError: the frobnicator is closed" for rank in range(4)))
    assert (alone.verdict, alone.confident) == (Verdict.USER_ERROR, False)
    assert (everywhere.verdict, everywhere.rules[0], everywhere.confident) == (
        Verdict.USER_ERROR,
        "case.alike-everywhere",
        True,
    )


def test_own_rules_come_first() -> None:
    mine = text_rule(
        "site.filer",
        "Stale file handle",
        Verdict.TRANSIENT,
        Strength.CAUSE,
        0.9,
        Blames.STORAGE,
        "known filer",
        "https://wiki.site",
    )
    found = diagnose(read_text("OSError: [Errno 116] Stale file handle"), book=RuleBook((mine, *RULES)))
    assert (found.verdict, found.rules[0]) == (Verdict.TRANSIENT, "site.filer")


SAMPLES = tuple(line for pair in CASE_EXAMPLES.values() for lines in pair for line in lines)


@settings(deadline=None)
@given(st.lists(st.sampled_from(SAMPLES), max_size=12), st.randoms(use_true_random=False))
def test_any_mixture_has_an_answer_that_does_not_depend_on_the_order_of_delivery(
    lines: list[str], shuffle: random.Random
) -> None:
    evidence = read_text("\n".join(lines))
    shuffled = list(evidence)
    shuffle.shuffle(shuffled)
    first, second = diagnose(evidence), diagnose(shuffled)
    assert first == second
    assert 0 <= first.confidence <= 1
    assert first.verdict is Verdict.UNKNOWN or first.rules


def test_text_rules_are_what_the_book_asks_the_scanner_for() -> None:
    patterns = set(RuleBook(RULES).text_patterns())
    assert patterns == {rule.when.pattern for rule in RULES if isinstance(rule.when, Text)}


def test_a_fabric_manager_without_switches_does_not_condemn_the_node() -> None:
    lines = (
        "fabricmanager[7]: the driver answered WARNING [NV_WARN_NOTHING_TO_DO]",
        "systemd[1]: nvidia-fabricmanager.service: Failed with result 'exit-code'.",
    )
    assert diagnose(read_text("\n".join(lines))).verdict is Verdict.USER_ERROR
    assert diagnose(read_text(lines[1])).verdict is Verdict.NODE_FAULT
