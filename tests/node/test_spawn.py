"""Starting processes: everything is shown for the fork server and for one interpreter at a time."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hotswap.errors import AuthError, PeerUnreachable
from hotswap.node.spawn import ExecSpawner, Exited, ForkServer, Spawner, SpawnRequest

HERE = str(Path(__file__).parent)
PATH = os.pathsep.join([HERE, *filter(None, [os.environ.get("PYTHONPATH")])])
DEADLINE_S = 20.0


class RunningServer:
    """A fork server process."""

    def __init__(self, directory: Path, *preload: str, early: Sequence[str] = ()) -> None:
        self.path, self.token = str(directory / "private" / "fork.sock"), secrets.token_hex(16)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hotswap.node.forkserver", *early],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OF_THE_SERVER": "1"},
        )
        settings = {"socket": self.path, "token": self.token, "preload": list(preload), "path": [HERE]}
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(settings).encode() + b"\n")
        self.process.stdin.flush()
        self.answer = json.loads(self.process.stdout.readline())

    def connect(self) -> ForkServer:
        return ForkServer.connect(self.path, self.token)

    def children(self) -> list[str]:
        return Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(DEADLINE_S)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    server = RunningServer(tmp_path_factory.mktemp("server"), "xml.dom.minidom")
    assert server.answer == {"ready": True}
    yield server
    server.close()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[RunningServer]:
    """For tests that end it."""
    server = RunningServer(tmp_path)
    yield server
    server.close()


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A child that was not started by a spawner."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@pytest.fixture(params=["fork", "exec"])
def spawner(request: pytest.FixtureRequest, shared: RunningServer) -> Iterator[Spawner]:
    made: Spawner = shared.connect() if request.param == "fork" else ExecSpawner()
    yield made
    made.close()
    if request.param == "fork":
        until(lambda: not shared.children())


@pytest.fixture
def ask(tmp_path: Path) -> Callable[..., SpawnRequest]:
    def make(target: str, *args: object, **fields: object) -> SpawnRequest:
        common: dict[str, Any] = {
            "env": {"PYTHONPATH": PATH},
            "cwd": str(tmp_path),
            "stdout_path": str(tmp_path / "out"),
            "stderr_path": str(tmp_path / "err"),
        }
        return SpawnRequest(target=f"spawn_targets:{target}", args=list(args), **{**common, **fields})

    return make


def until(condition: Callable[[], object]) -> None:
    """Wait for something that no descriptor announces."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "deadline"
        time.sleep(0.005)


def ends(spawner: Spawner, count: int = 1) -> list[Exited]:
    found: list[Exited] = []
    end = time.monotonic() + DEADLINE_S
    while len(found) < count:
        assert select.select([spawner.fileno()], [], [], max(0, end - time.monotonic()))[0], f"only {found}"
        found += spawner.poll()
    return found


def started(spawner: Spawner, number: int) -> int:
    """The pid of a process that does not end at once."""
    until(lambda: spawner.pid(number) or spawner.poll())
    return spawner.pid(number)


def lines(path: Path, count: int) -> list[str]:
    """The first *count* lines of a log, once they are there."""
    until(lambda: path.exists() and path.read_text().count("\n") >= count)
    return path.read_text().splitlines()[:count]


def gone(pid: int) -> bool:
    """A zombie that its new parent has not reaped yet is gone too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


Ask = Callable[..., SpawnRequest]


@pytest.mark.parametrize(
    ("target", "args", "status"),
    [
        ("nothing", [], 0),
        ("leave", [0], 0),
        ("leave", [None], 0),
        ("leave", [7], 7),
        ("leave", [300], 300 & 0xFF),
        ("leave", ["a message"], 1),
        ("fail", [], 1),
        ("interrupt", [], -signal.SIGINT),
    ],
)
def test_exit_status_is_what_the_interpreter_would_give(
    spawner: Spawner, ask: Ask, target: str, args: list[object], status: int
) -> None:
    number = spawner.spawn(ask(target, *args), [])
    assert ends(spawner) == [Exited(number=number, status=status)]


def test_an_exception_and_a_message_go_to_standard_error(spawner: Spawner, ask: Ask, tmp_path: Path) -> None:
    spawner.spawn(ask("fail"), [])
    ends(spawner)
    text = (tmp_path / "err").read_text()
    assert "Traceback" in text and "ValueError: on purpose" in text
    spawner.spawn(ask("leave", "a message"), [])
    ends(spawner)
    # Appended: a second process does not wipe out what the first one said.
    assert (tmp_path / "err").read_text() == text + "a message\n"


def test_threads_exit_handlers_and_buffers_are_finished(spawner: Spawner, ask: Ask, tmp_path: Path) -> None:
    spawner.spawn(ask("farewell", str(tmp_path / "goodbye")), [])
    assert ends(spawner)[0].status == 0
    assert (tmp_path / "goodbye").read_text() == "goodbye"
    assert (tmp_path / "out").read_text() == "no line end from a thread without one either"


def test_the_process_has_the_callers_identity_and_nothing_else(spawner: Spawner, ask: Ask, tmp_path: Path) -> None:
    spawner.spawn(ask("describe", env={"PYTHONPATH": PATH, "MINE": "1"}, pgid=os.getpgrp()), [])
    assert ends(spawner)[0].status == 0
    found = json.loads((tmp_path / "out").read_text())
    assert (found["pgid"], found["sid"]) == (os.getpgrp(), os.getsid(0))
    assert found["cwd"] == str(tmp_path)
    assert found["environ"] == {**os.environ, "PYTHONPATH": PATH, "MINE": "1"}
    assert found["fds"][:3] == [0, 1, 2] and len(found["fds"]) == 4, "the fourth reads the list"
    assert found["blocked"] == 0 and found["sigchld"] and found["sigint"] and found["stdin"] == ""
    assert ("xml.dom.minidom" in found["modules"]) == isinstance(spawner, ForkServer)


def test_descriptors_arrive_and_go_no_further(spawner: Spawner, ask: Ask) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        spawner.spawn(ask("say", "MY_FD", fd_names=["MY_FD"]), [theirs.fileno()])
        theirs.close()
        ours.settimeout(DEADLINE_S)
        assert ours.recv(16) == b"hello"
        assert ours.recv(16) == b"", "the process has ended and nobody else has the descriptor"
    assert ends(spawner)[0].status == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_kill_reaches_a_process_and_never_a_stranger(
    stranger: subprocess.Popen[bytes], spawner: Spawner, ask: Ask, tmp_path: Path, number: int
) -> None:
    sleeper = spawner.spawn(ask("sleep"), [])
    lines(tmp_path / "out", 1)
    pid = started(spawner, sleeper)
    assert not gone(pid)
    spawner.kill(sleeper, number)
    assert ends(spawner) == [Exited(number=sleeper, status=-number)]
    assert gone(pid)
    spawner.kill(stranger.pid, signal.SIGKILL)
    spawner.kill(sleeper, signal.SIGKILL)
    # Answered after the two: they have been looked at by then.
    spawner.spawn(ask("nothing"), [])
    ends(spawner)
    assert stranger.poll() is None


def test_a_request_that_cannot_be_met_says_so(shared: RunningServer, ask: Ask, tmp_path: Path) -> None:
    with contextlib.closing(shared.connect()) as server:
        number = server.spawn(ask("nothing", pgid=1), [])
        assert ends(server) == [Exited(number=number, status=1)], "the process cannot join a group of another session"


def test_nothing_waits_for_a_server_that_is_busy(own: RunningServer, ask: Ask, tmp_path: Path) -> None:
    with contextlib.closing(own.connect()) as server:
        own.process.send_signal(signal.SIGSTOP)
        large = {"PYTHONPATH": PATH, "LARGE": "x" * 100_000}
        ours, theirs = socket.socketpair()
        with ours, theirs:
            for _ in range(10):  # far more than a socket takes
                server.spawn(ask("say", "MY_FD", env=large, fd_names=["MY_FD"]), [theirs.fileno()])
        stopped = server.spawn(ask("sleep"), [])
        server.kill(stopped, signal.SIGKILL)
        assert server.poll() == [] and server.pid(stopped) == 0
        own.process.send_signal(signal.SIGCONT)
        found = {exited.number: exited.status for exited in ends(server, 11)}
        assert found.pop(stopped) == -signal.SIGKILL
        assert len(found) == 10


def test_many_at_once(spawner: Spawner, ask: Ask) -> None:
    count = 20 if isinstance(spawner, ForkServer) else 5
    pids = [spawner.spawn(ask("leave", number), []) for number in range(count)]
    assert {exited.number: exited.status for exited in ends(spawner, count)} == dict(
        zip(pids, range(count), strict=True)
    )


def test_descendants_end_with_their_worker(spawner: Spawner, ask: Ask, tmp_path: Path) -> None:
    worker = spawner.spawn(ask("family"), [])
    bystander = spawner.spawn(ask("sleep", stdout_path=str(tmp_path / "other")), [])
    family = [int(line) for line in lines(tmp_path / "out", 4) if line != "ready"]
    bystanders_pid = started(spawner, bystander)
    assert len(family) == 3
    # Whoever looks for orphans does so when a process ends.
    another = spawner.spawn(ask("nothing"), [])
    assert [exited.number for exited in ends(spawner)] == [another]
    spawner.spawn(ask("nothing"), [])
    ends(spawner)
    assert not any(gone(pid) for pid in family), "nobody ends what belongs to a living worker"
    spawner.kill(worker, signal.SIGKILL)
    assert ends(spawner) == [Exited(number=worker, status=-signal.SIGKILL)]
    until(lambda: spawner.poll() == [] and all(gone(pid) for pid in family))
    assert not gone(bystanders_pid)


# --- the fork server alone ---------------------------------------------------------------------------------------------


def test_the_socket_is_for_its_user_only(shared: RunningServer) -> None:
    path = Path(shared.path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_wrong_token_is_refused(shared: RunningServer) -> None:
    with pytest.raises(AuthError, match="wrong token"):
        ForkServer.connect(shared.path, "guessed")


def test_nobody_serves_there(tmp_path: Path) -> None:
    with pytest.raises(PeerUnreachable, match="no fork server at"):
        ForkServer.connect(str(tmp_path / "nothing"), "token")


@pytest.mark.parametrize("line", [b"not json", b'{"target": "x:y"}', b"[]", b'{"token": "%s"}\n{"fd_names": ["A"]}'])
def test_nonsense_costs_a_client_its_connection_and_nothing_else(shared: RunningServer, ask: Ask, line: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as rude:
        rude.settimeout(DEADLINE_S)
        rude.connect(shared.path)
        rude.sendall(line.replace(b"%s", shared.token.encode()) + b"\n")
        while rude.recv(4096):
            pass
    with contextlib.closing(shared.connect()) as server:
        server.spawn(ask("leave", 3), [])
        assert ends(server)[0].status == 3


def test_a_client_that_leaves_takes_its_own_processes_with_it(shared: RunningServer, ask: Ask, tmp_path: Path) -> None:
    with contextlib.closing(shared.connect()) as stays:
        kept = started(stays, stays.spawn(ask("sleep", stdout_path=str(tmp_path / "kept")), []))
        leaves = shared.connect()
        worker = started(leaves, leaves.spawn(ask("family"), []))
        family = [int(line) for line in lines(tmp_path / "out", 4) if line != "ready"]
        leaves.close()
        until(lambda: all(gone(pid) for pid in (worker, *family)))
        assert not gone(kept)
    until(lambda: gone(kept))


@pytest.mark.parametrize("how", ["end of input", "SIGTERM", "SIGKILL"])
def test_nothing_outlives_the_server(own: RunningServer, ask: Ask, tmp_path: Path, how: str) -> None:
    with contextlib.closing(own.connect()) as server:
        worker = started(server, server.spawn(ask("family"), []))
        family = [int(line) for line in lines(tmp_path / "out", 4) if line != "ready"]
        if how == "end of input":
            own.close()
        else:
            own.process.send_signal(getattr(signal, how))
        until(lambda: gone(worker))
        with pytest.raises(PeerUnreachable, match="gone"):
            ends(server)
        with pytest.raises(PeerUnreachable, match="gone"):
            server.spawn(ask("nothing"), [])
    if how == "SIGKILL":
        # Nobody is left to end them but the one who has the whole node's process group.
        for pid in family:
            os.kill(pid, signal.SIGKILL)
    else:
        assert own.process.wait(DEADLINE_S) == 0
        assert all(gone(pid) for pid in family)
        assert not Path(own.path).parent.exists()


def test_the_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    program = (
        "import json, os, signal, subprocess, sys\n"
        "server = subprocess.Popen([sys.executable, '-m', 'hotswap.node.forkserver'], stdin=subprocess.PIPE)\n"
        f"settings = {{'socket': {str(tmp_path / 'private' / 'fork.sock')!r}, 'token': 't', 'preload': []}}\n"
        "server.stdin.write(json.dumps(settings).encode() + b'\\n'); server.stdin.flush()\n"
        "print(server.pid, flush=True); signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        assert json.loads(starter.stdout.readline()) == {"ready": True}
        starter.kill()
    until(lambda: gone(pid))
    assert not (tmp_path / "private").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module_anywhere", "ModuleNotFoundError"),
        ("starts_a_thread", "left 2 threads"),
        ("fails_to_import", "ZeroDivisionError"),
    ],
)
def test_a_bad_preload_is_named(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=[60], daemon=True).start()"
    )
    (tmp_path / "fails_to_import.py").write_text("1 / 0")
    process = subprocess.run(
        [sys.executable, "-m", "hotswap.node.forkserver"],
        input=json.dumps(
            {"socket": str(tmp_path / "s"), "token": "t", "preload": ["json", name], "path": [str(tmp_path)]}
        )
        + "\n",
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert process.returncode == 2
    error = json.loads(process.stdout)["error"]
    assert f"preloading {name!r}" in error and said in error and "--no-preload" in error


def test_counting_gpus_on_import_leaves_the_driver_asleep(
    tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first module stands for the driver's library, which starts a thread in whatever process asks it.
    monkeypatch.setenv("PYTHONPATH", PATH)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    server = RunningServer(tmp_path, "spawn_gpu_user", early=["spawn_gpu_driver"])
    try:
        assert server.answer == {"ready": True}
        with contextlib.closing(server.connect()) as client:
            client.spawn(ask("count_gpus", stdout_path=str(tmp_path / "counted")), [])
            assert [exited.status for exited in ends(client, 1)] == [0]
    finally:
        server.close()
    assert json.loads((tmp_path / "counted").read_text()) == {"on import": 3, "in the worker": 3, "threads": 2}


def test_libraries_do_not_share_what_they_drew_on_import(tmp_path: Path, ask: Ask) -> None:
    server = RunningServer(tmp_path, "torch", "numpy.random")
    assert server.answer == {"ready": True}
    try:
        with contextlib.closing(server.connect()) as client:
            for number in range(2):
                client.spawn(ask("draw", env={"OMP_NUM_THREADS": "2"}, stdout_path=str(tmp_path / str(number))), [])
            assert [exited.status for exited in ends(client, 2)] == [0, 0]
    finally:
        server.close()
    (first, threads), (second, _) = (json.loads((tmp_path / name).read_text()) for name in "01")
    assert first != second
    assert threads == 2
