"""What was survived is history: the cause is looked for in what came after the training last went on."""

from __future__ import annotations

import pytest

from hotswap.diagnosis import Diagnosis, Verdict, diagnose
from hotswap.diagnosis.incidents import STEPS_SURVIVED
from hotswap.diagnosis.readers import read_text

STEP = "iteration {:8d}/  100000 | lm loss: 2.100000E+00 | grad norm: 0.500 |"
LAUNCH = "I0302 10:00:00.000000 77 launcher.py:9] Starting elastic_operator with launch configs:"
TIMEOUT = "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE) ran for 600001 milliseconds"
ECC = "[rank3]: RuntimeError: CUDA error: uncorrectable ECC error encountered"
USER = "[rank0]: KeyError: 'labels'"


def answer(*lines: str) -> Diagnosis:
    return diagnose(read_text("\n".join(lines)))


def steps(first: int, count: int = STEPS_SURVIVED) -> list[str]:
    return [STEP.format(number) for number in range(first, first + count)]


def test_a_complaint_before_many_steps_is_not_the_cause() -> None:
    before = "FileNotFoundError: [Errno 2] No such file or directory: '/cache/index'"
    found = answer(before, *steps(1), "OSError: [Errno 116] Stale file handle")
    assert found.verdict is Verdict.STORAGE
    assert "user.usage" in found.echo_rules


def test_peers_of_a_dead_rank_make_a_step_or_two() -> None:
    found = answer(USER, *steps(1, 2), TIMEOUT)
    assert found.verdict is Verdict.USER_ERROR


def test_the_program_going_on_does_not_heal_hardware() -> None:
    assert answer(ECC, *steps(1, 9), USER).verdict is Verdict.NODE_FAULT


def test_after_a_restart_that_trained_the_old_cause_is_history() -> None:
    found = answer(ECC, LAUNCH, *steps(1, 2), USER)
    assert (found.verdict, found.confident) == (Verdict.USER_ERROR, True)


def test_a_restart_that_never_trained_belongs_to_the_same_incident() -> None:
    assert answer(ECC, LAUNCH, USER).verdict is Verdict.NODE_FAULT


def test_an_old_cause_is_a_guess_where_the_end_shows_only_consequences() -> None:
    found = answer(ECC, LAUNCH, *steps(1, 2), TIMEOUT)
    assert (found.verdict, found.confident) == (Verdict.NODE_FAULT, False)


@pytest.mark.parametrize("between", [[LAUNCH, *steps(1, 2)], steps(1)])
def test_the_same_words_said_again_count_again(between: list[str]) -> None:
    found = answer(USER, *between, USER)
    assert (found.verdict, found.deciding[0].count) == (Verdict.USER_ERROR, 1)


def test_a_log_that_ends_well_is_one_incident() -> None:
    assert answer(USER, *steps(1, 9)).verdict is Verdict.USER_ERROR


def test_other_files_are_cut_by_time_only() -> None:
    launched = LAUNCH.replace("I0302 10:00:00.000000 ", "2026-03-02 10:00:00 ")
    trained = [f"2026-03-02 10:0{number}:00 {STEP.format(number)}" for number in (1, 2)]
    end = "2026-03-02 10:05:00 " + USER.removeprefix("[rank0]: ")
    main = read_text("\n".join((launched, *trained, end)), source="rank 0")
    for when, verdict in (("09", Verdict.USER_ERROR), ("11", Verdict.NODE_FAULT)):
        kernel = read_text(f"2026-03-02 {when}:00:00 kernel: NVRM: Xid (PCI:0000:3d:00): 79, pid=7", source="kernel")
        assert diagnose([*main, *kernel]).verdict is verdict
