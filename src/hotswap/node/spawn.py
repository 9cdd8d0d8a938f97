"""Starting processes for an agent: through the fork server, or one interpreter at a time. One interface for both."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from hotswap.errors import AuthError, PeerUnreachable, ProtocolError

LINE_BYTES_MAX = 4 * 1024 * 1024
ANSWER_S = 30.0


@dataclass(frozen=True, kw_only=True)
class SpawnRequest:
    """What to run and where.

    ``target``: ``"module:function"``, called with *args* (plain JSON values). ``env`` is added to the environment. The
    descriptors passed along are announced to the process in the environment variables *fd_names*. ``pgid``: process group
    to join, so that a whole node can be signalled at once.
    """

    target: str
    args: list[Any] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    cwd: str = "/"
    stdout_path: str = os.devnull
    stderr_path: str = os.devnull
    pgid: int | None = None
    fd_names: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Exited:
    """A process has ended: exit code, or minus the number of the signal."""

    pid: int
    status: int


class Spawner(Protocol):
    """Starts processes and reports their ends."""

    def spawn(self, request: SpawnRequest, fds: list[int]) -> int:
        """Start a process; its pid. The caller keeps *fds*."""

    def fileno(self) -> int:
        """Readable when ``poll`` has news."""

    def poll(self) -> list[Exited]:
        """Processes that have ended since the last call; never blocks."""

    def close(self) -> None:
        """End every process that is still running and let go."""


class ForkServer:
    """A connection to a fork server. When it closes, by whatever cause, the server kills what it started for it."""

    def __init__(self, sock: socket.socket) -> None:
        """Use ``connect``."""
        self._sock = sock
        self._buffer = b""
        self._exited: deque[Exited] = deque()

    @classmethod
    def connect(cls, path: str, token: str) -> ForkServer:
        """PeerUnreachable if nobody serves there, AuthError if the server was started with another token."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(path)
        except OSError as error:
            sock.close()
            raise PeerUnreachable(f"no fork server at {path}: {error}") from None
        server = cls(sock)
        server._say({"token": token}, [])
        answer = server._answer()
        if "error" in answer:
            sock.close()
            raise AuthError(f"the fork server at {path} refused: {answer['error']}")
        return server

    def spawn(self, request: SpawnRequest, fds: list[int]) -> int:
        """Start a process; ProtocolError if the server could not."""
        assert len(fds) == len(request.fd_names), f"{len(fds)} descriptors for {len(request.fd_names)} names"
        self._say(asdict(request), fds)
        answer = self._answer()
        if "error" in answer:
            raise ProtocolError(f"the fork server could not start {request.target}: {answer['error']}")
        return int(answer["pid"])

    def fileno(self) -> int:
        """The connection's descriptor."""
        return self._sock.fileno()

    def poll(self) -> list[Exited]:
        """Ends reported so far. PeerUnreachable when the server is gone: its processes are then gone too."""
        while select.select([self._sock], [], [], 0)[0]:
            self._receive()
        found = list(self._exited)
        self._exited.clear()
        return found

    def close(self) -> None:
        """Leave; the server ends what is still running."""
        self._sock.close()

    def _say(self, message: dict[str, Any], fds: list[int]) -> None:
        data = json.dumps(message).encode() + b"\n"
        try:
            sent = socket.send_fds(self._sock, [data], fds)
            self._sock.sendall(data[sent:])
        except OSError as error:
            raise PeerUnreachable(f"the fork server is gone: {error}") from None

    def _answer(self) -> dict[str, Any]:
        """The next message that is not the report of an end."""
        while True:
            line = self._line()
            if line is not None:
                message: dict[str, Any] = json.loads(line)
                if "exited" not in message:
                    return message
                self._note(message)
                continue
            if not select.select([self._sock], [], [], ANSWER_S)[0]:
                raise PeerUnreachable(f"the fork server did not answer within {ANSWER_S:g} s")
            self._fill()

    def _receive(self) -> None:
        self._fill()
        while (line := self._line()) is not None:
            self._note(json.loads(line))

    def _fill(self) -> None:
        try:
            data = self._sock.recv(65536)
        except OSError as error:
            raise PeerUnreachable(f"the fork server is gone: {error}") from None
        if not data:
            raise PeerUnreachable("the fork server is gone")
        self._buffer += data

    def _line(self) -> bytes | None:
        head, separator, rest = self._buffer.partition(b"\n")
        if not separator:
            return None
        self._buffer = rest
        return head

    def _note(self, message: dict[str, Any]) -> None:
        self._exited.append(Exited(pid=int(message["exited"]), status=int(message["status"])))


class ExecSpawner:
    """Starts a new interpreter for each process: slower, but nothing is shared with a preloaded parent."""

    def __init__(self) -> None:
        """Nothing is started yet."""
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._theirs.setblocking(False)
        signal.signal(signal.SIGCHLD, self._woken)

    def _woken(self, *_: Any) -> None:
        with contextlib.suppress(BlockingIOError):
            self._theirs.send(b"x")

    def spawn(self, request: SpawnRequest, fds: list[int]) -> int:
        """Start a process."""
        with open(request.stdout_path, "ab") as out, open(request.stderr_path, "ab") as err:
            names = dict(zip(request.fd_names, map(str, fds), strict=True))
            process = subprocess.Popen(
                [sys.executable, "-m", "hotswap.node.spawn_child"],
                env={**os.environ, **request.env, **names, "PYTHONUNBUFFERED": "1"},
                cwd=request.cwd,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                pass_fds=fds,
            )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(json.dumps(asdict(request)).encode())
        self._processes[process.pid] = process
        return process.pid

    def fileno(self) -> int:
        """Readable after a child has ended."""
        return self._ours.fileno()

    def poll(self) -> list[Exited]:
        """Reap what has ended."""
        with contextlib.suppress(BlockingIOError):
            self._ours.recv(4096)
        ended = [process for process in self._processes.values() if process.poll() is not None]
        for process in ended:
            del self._processes[process.pid]
        return [Exited(pid=process.pid, status=int(process.returncode)) for process in ended]

    def close(self) -> None:
        """Kill and reap what is left."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._ours.close()
        self._theirs.close()
