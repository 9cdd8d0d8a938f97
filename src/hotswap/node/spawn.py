"""Starting processes for an agent: through the fork server, or one interpreter at a time. One interface for both."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from hotswap.errors import AuthError, PeerUnreachable
from hotswap.node.process import SAFE_PATH, adopt_orphans, append_privately, children, kill_orphans

LINE_BYTES_MAX = 4 * 1024 * 1024
ANSWER_S = 30.0


@dataclass(frozen=True, kw_only=True)
class SpawnRequest:
    """What to run and where.

    ``target``: ``"module:function"``, called with *args* (plain JSON values). ``env`` is added to the caller's environment.
    The descriptors passed along are announced to the process in the environment variables *fd_names*. ``pgid``: process
    group to join, so that a whole node can be signalled at once.
    """

    target: str
    args: list[Any] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    cwd: str = "/"
    stdout_path: str = os.devnull
    stderr_path: str = os.devnull
    pgid: int | None = None
    fd_names: list[str] = field(default_factory=list)

    def to_message(self) -> dict[str, Any]:
        """As JSON, completed by what the process inherits from the caller, whoever starts it."""
        return {**asdict(self), "environ": {**os.environ, **self.env}, "parent": os.getpid()}


@dataclass(frozen=True, kw_only=True)
class Exited:
    """A process has ended: exit code, or minus the number of the signal. ``error``: why it could not even be started."""

    number: int
    status: int
    error: str = ""


class Spawner(Protocol):
    """Starts processes and reports their ends. Nothing here waits: an agent's event loop has heartbeats to send."""

    def spawn(self, request: SpawnRequest, fds: list[int]) -> int:
        """Have a process started; the number by which it is spoken of. The caller keeps *fds*."""

    def pid(self, number: int) -> int:
        """The process' pid, 0 while it is not known to have been started."""

    def fileno(self) -> int:
        """Readable when ``poll`` has something to do or to tell."""

    def poll(self) -> list[Exited]:
        """Processes that have ended since the last call."""

    def kill(self, number: int, signal_number: int) -> None:
        """Signal a process; nothing happens when it has ended, even if its pid belongs to another one by now."""

    def close(self) -> None:
        """End every process that is still running, with its descendants, and let go."""


class ForkServer:
    """A connection to a fork server. When it closes, by whatever cause, the server kills what it started for it."""

    def __init__(self, sock: socket.socket) -> None:
        """Use ``connect``."""
        self._sock = sock
        self._news = select.epoll()
        self._news.register(sock, select.EPOLLIN)
        self._numbers = itertools.count(1)
        self._pids: dict[int, int] = {}
        self._outbox: deque[tuple[bytes, list[int]]] = deque()
        self._buffer = b""

    @classmethod
    def connect(cls, path: str, token: str) -> ForkServer:
        """PeerUnreachable if nobody serves there, AuthError if the server was started with another token. May wait."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(ANSWER_S)
        try:
            sock.connect(path)
        except OSError as error:
            sock.close()
            raise PeerUnreachable(f"no fork server at {path}: {error}") from None
        server = cls(sock)
        try:
            server._say({"token": token}, [])
            while (answer := server._message()) is None:
                server._fill()
        except PeerUnreachable:
            server.close()
            raise
        if "error" in answer:
            server.close()
            raise AuthError(f"the fork server at {path} refused: {answer['error']}")
        sock.setblocking(False)
        return server

    def spawn(self, request: SpawnRequest, fds: list[int]) -> int:
        """Ask for a process. That it cannot be started is reported as its end."""
        assert len(fds) == len(request.fd_names), f"{len(fds)} descriptors for {len(request.fd_names)} names"
        number = next(self._numbers)
        self._say({**request.to_message(), "number": number}, fds)
        return number

    def pid(self, number: int) -> int:
        """0 before the server has said it."""
        return self._pids.get(number, 0)

    def fileno(self) -> int:
        """Readable when ``poll`` has something to do or to tell."""
        return self._news.fileno()

    def poll(self) -> list[Exited]:
        """Ends reported so far. PeerUnreachable when the server is gone: its processes are then gone too."""
        self._flush()
        with contextlib.suppress(BlockingIOError):
            while True:
                self._fill()
        found = []
        while (message := self._message()) is not None:
            number = int(message["number"])
            if "pid" in message:
                self._pids[number] = int(message["pid"])
            else:
                self._pids.pop(number, None)
                found.append(Exited(number=number, status=int(message["status"]), error=message.get("error", "")))
        return found

    def kill(self, number: int, signal_number: int) -> None:
        """Signal a process, from where it cannot have been reaped unnoticed."""
        self._say({"kill": number, "signal": signal_number}, [])

    def close(self) -> None:
        """Leave; the server ends what is still running."""
        if self._sock.fileno() >= 0:
            self._sock.close()
            self._news.close()
            self._forget_outbox()

    def _say(self, message: dict[str, Any], fds: list[int]) -> None:
        self._outbox.append((json.dumps(message).encode() + b"\n", [os.dup(fd) for fd in fds]))
        self._flush()

    def _flush(self) -> None:
        """Send what the server takes now; ``fileno`` tells when it takes more."""
        try:
            while self._outbox:
                data, fds = self._outbox[0]
                sent = socket.send_fds(self._sock, [data], fds)
                for fd in fds:
                    os.close(fd)
                self._outbox[0] = (data[sent:], [])
                if sent == len(data):
                    self._outbox.popleft()
        except BlockingIOError:
            pass
        except OSError as error:
            self._forget_outbox()
            raise PeerUnreachable(f"the fork server is gone: {error}") from None
        self._news.modify(self._sock, select.EPOLLIN | (select.EPOLLOUT if self._outbox else 0))

    def _forget_outbox(self) -> None:
        for _, fds in self._outbox:
            for fd in fds:
                os.close(fd)
        self._outbox.clear()

    def _fill(self) -> None:
        try:
            data = self._sock.recv(65536)
        except BlockingIOError:
            raise
        except OSError as error:
            raise PeerUnreachable(f"the fork server is gone: {error}") from None
        if not data:
            raise PeerUnreachable("the fork server is gone")
        self._buffer += data

    def _message(self) -> dict[str, Any] | None:
        head, separator, rest = self._buffer.partition(b"\n")
        if not separator:
            return None
        self._buffer = rest
        return dict(json.loads(head))


class ExecSpawner:
    """Starts a new interpreter for each process: slower, but nothing is shared with a preloaded parent.

    Takes over SIGCHLD and adopts orphans: from now on, the process that has one starts its children through it alone.
    """

    def __init__(self) -> None:
        """Nothing is started yet."""
        self._others = frozenset(children())
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._theirs.setblocking(False)
        adopt_orphans()
        signal.signal(signal.SIGCHLD, self._woken)

    def _woken(self, *_: Any) -> None:
        with contextlib.suppress(BlockingIOError):
            self._theirs.send(b"x")

    def spawn(self, request: SpawnRequest, fds: list[int]) -> int:
        """Start a process."""
        names = dict(zip(request.fd_names, map(str, fds), strict=True))
        with append_privately(request.stdout_path) as out, append_privately(request.stderr_path) as err:
            process = subprocess.Popen(
                [sys.executable, *SAFE_PATH, "-u", "-m", "hotswap.node.spawn_child"],
                env={**os.environ, **request.env, **names},
                cwd=request.cwd,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                pass_fds=fds,
            )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(json.dumps(request.to_message()).encode())
        self._processes[process.pid] = process
        return process.pid

    def pid(self, number: int) -> int:
        """Here it is the number."""
        return number

    def fileno(self) -> int:
        """Readable after a child has ended."""
        return self._ours.fileno()

    def poll(self) -> list[Exited]:
        """Reap what has ended, and end what it has left behind."""
        with contextlib.suppress(BlockingIOError):
            self._ours.recv(4096)
        ended = [process for process in self._processes.values() if process.poll() is not None]
        for process in ended:
            del self._processes[process.pid]
        self._end_orphans()
        return [Exited(number=process.pid, status=int(process.returncode)) for process in ended]

    def kill(self, number: int, signal_number: int) -> None:
        """Signal a process that ``poll`` has not reported yet."""
        if number in self._processes:
            self._processes[number].send_signal(signal_number)

    def close(self) -> None:
        """Kill and reap what is left."""
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._processes.clear()
        # Each death can hand up further ones.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        end = time.monotonic() + ANSWER_S
        while self._end_orphans() and (left := end - time.monotonic()) > 0:
            signal.sigtimedwait([signal.SIGCHLD], left)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._ours.close()
        self._theirs.close()

    def _end_orphans(self) -> bool:
        """Reap dead orphans and kill living ones; whether there are any left."""
        known = self._others.union(self._processes)
        kill_orphans(known)
        orphans = [pid for pid in children() if pid not in known]
        return 0 in [os.waitpid(pid, os.WNOHANG)[0] for pid in orphans]
