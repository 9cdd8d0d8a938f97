from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launch_kit import HERE, alive, until

from hotswap.errors import UsageError
from hotswap.launch.processes import Child, Waker, end, expect, start

HASTY = """
import os, signal, sys
from hotswap.launch import processes
child = processes.start("child", "slow_to_start", answers=True)
print(child.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where modules for children are looked for."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{HERE}")
    return tmp_path


def run(module: Path, text: str, **fields: object) -> Child:
    (module / "program.py").write_text(text)
    return start("child", "program", log=module / "logs" / "child.log", answers=True, **fields)  # type: ignore[arg-type]


def test_lines_are_heard_one_by_one_even_if_they_come_together(module: Path) -> None:
    child = run(module, 'import os; os.write(1, b\'{"a": 1}\\n{"b": 2}\\nnot json\\n{\')')
    assert child.hear(20) == {"a": 1}
    assert child.hear(0) == {"b": 2}
    assert child.hear(0) == {"error": "not json"}
    assert child.hear(20) is None, "a line without an end is none"
    end([child])


def test_silence_has_a_deadline(module: Path) -> None:
    child = run(module, "import time; time.sleep(600)")
    assert child.hear(0.01) is None
    end([child])
    assert child.code == -signal.SIGTERM


def test_a_child_that_fails_is_quoted_from_its_log(module: Path) -> None:
    child = run(module, "raise RuntimeError('no such luck')")
    with pytest.raises(UsageError, match=r"the child did not start: RuntimeError: no such luck \(log: .*child.log\)"):
        expect(child, "port", module / "logs" / "child.log")
    assert not alive(child.process.pid)


def test_a_child_that_says_why_is_quoted(module: Path) -> None:
    child = run(module, 'print(\'{"error": "no room"}\', flush=True); import time; time.sleep(600)')
    with pytest.raises(UsageError, match="the child did not start: no room"):
        expect(child, "port", module / "logs" / "child.log")
    assert not alive(child.process.pid)


def test_the_users_folder_cannot_break_a_child(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("this Python has no -P")
    trap = module / "trap"
    trap.mkdir()
    (trap / "json.py").write_text("raise SystemExit('a file of the user')")
    monkeypatch.chdir(trap)
    child = run(module, "import json; print(json.dumps({'ok': True}), flush=True)")
    assert child.hear(20) == {"ok": True}
    end([child])


def test_what_a_leader_leaves_in_its_group_is_ended_too(module: Path) -> None:
    text = (
        "import signal, subprocess; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('{\"pid\": %d}' % subprocess.Popen(['sleep', '600']).pid, flush=True)"
    )
    child = run(module, text)
    worker = expect(child, "pid", module / "logs" / "child.log")
    until(lambda: child.code is not None)
    assert alive(worker)
    end([child])
    until(lambda: not alive(worker))


def test_a_launcher_that_is_killed_right_after_a_start_leaves_nothing(module: Path) -> None:
    """The child has not run a line of its own by then: it is tied to the launcher before."""
    (module / "slow_to_start.py").write_text("import time; time.sleep(600)")
    launcher = subprocess.run([sys.executable, "-c", HASTY], stdout=subprocess.PIPE, text=True, check=False, timeout=20)
    assert launcher.returncode == -signal.SIGKILL
    until(lambda: not alive(int(launcher.stdout)))


def test_signals_wake_and_are_given_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    waker = Waker([signal.SIGUSR1])
    try:
        waker.wait(0)
        assert waker.asked is None
        os.kill(os.getpid(), signal.SIGUSR1)
        waker.wait(20)
        assert waker.asked == signal.SIGUSR1 and not waker.hurry
        os.kill(os.getpid(), signal.SIGUSR1)
        waker.wait(20)
        assert waker.hurry
        with subprocess.Popen(["true"]) as child:
            # The end of a child wakes too.
            waker.wait(20)
            child.wait()
    finally:
        waker.close()
    assert signal.getsignal(signal.SIGUSR1) is before


def test_the_first_notice_ends_nothing() -> None:
    waker = Waker([signal.SIGTERM], [signal.SIGUSR1, signal.SIGTERM])
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert (waker.noticed, waker.asked) == ("SIGTERM", None)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert waker.asked is None
        # Of a signal that usually ends the job the second one does.
        os.kill(os.getpid(), signal.SIGTERM)
        assert waker.asked == signal.SIGTERM
    finally:
        waker.close()
