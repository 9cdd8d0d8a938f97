"""A process that has imported torch, and what the user names, once, and forks workers from that state.

Single-threaded by construction: a fork copies only the calling thread, and a lock another thread holds at that moment would
stay locked in the child for ever. One server can serve several agents; what it started for one is killed when that one's
connection ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hmac
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotswap.errors import UsageError
from hotswap.node import spawn_child
from hotswap.node.process import die_with_parent
from hotswap.node.spawn import LINE_BYTES_MAX

_PR_SET_CHILD_SUBREAPER = 36
FDS_MAX = 16


@dataclass(eq=False)
class _Client:
    sock: socket.socket
    trusted: bool = False
    buffer: bytes = b""
    fds: list[int] = field(default_factory=list)
    children: set[int] = field(default_factory=set)


class Server:
    """The select loop."""

    def __init__(self, path: str, token: str) -> None:
        """Listen at *path*, for the same user only."""
        self._token = token
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        mask = os.umask(0o177)
        try:
            self._listener.bind(path)
        finally:
            os.umask(mask)
        self._listener.listen(128)
        self._path = path
        self._clients: dict[int, _Client] = {}
        self._owner: dict[int, _Client] = {}
        self._wake_in, self._wake_out = socket.socketpair()
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, _wake)
        signal.set_wakeup_fd(self._wake_out.fileno(), warn_on_full_buffer=False)

    def serve(self) -> None:
        """Until standard input ends, that is until whoever started this is gone or done."""
        while True:
            watched = [0, self._listener.fileno(), self._wake_in.fileno(), *self._clients]
            ready = select.select(watched, [], [])[0]
            if self._wake_in.fileno() in ready:
                with contextlib.suppress(BlockingIOError):
                    self._wake_in.recv(4096)
                self._reap()
            if 0 in ready and not os.read(0, 4096):
                return
            if self._listener.fileno() in ready:
                sock, _ = self._listener.accept()
                self._clients[sock.fileno()] = _Client(sock)
            for number in ready:
                if number in self._clients:
                    self._hear(self._clients[number])

    def close(self) -> None:
        """Kill everything and remove the socket."""
        signal.set_wakeup_fd(-1)
        for client in list(self._clients.values()):
            self._drop(client)
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    def _hear(self, client: _Client) -> None:
        try:
            data, fds, _flags, _address = socket.recv_fds(client.sock, 65536, FDS_MAX)
        except OSError:
            data, fds = b"", []
        client.fds.extend(fds)
        client.buffer += data
        if not data or len(client.buffer) > LINE_BYTES_MAX:
            self._drop(client)
            return
        while b"\n" in client.buffer:
            line, _, client.buffer = client.buffer.partition(b"\n")
            if not self._obey(client, line):
                self._drop(client)
                return

    def _obey(self, client: _Client, line: bytes) -> bool:
        try:
            message: dict[str, Any] = json.loads(line)
        except ValueError:
            return False
        if not client.trusted:
            client.trusted = self._trusts(client, str(message.get("token", "")))
            self._say(client, {} if client.trusted else {"error": "wrong token or another user"})
            return client.trusted
        fds = [client.fds.pop(0) for _ in message["fd_names"]]
        try:
            pid = self._fork(message, fds)
            client.children.add(pid)
            self._owner[pid] = client
            self._say(client, {"pid": pid})
        except OSError as error:
            self._say(client, {"error": str(error)})
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _trusts(self, client: _Client, token: str) -> bool:
        credentials = client.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _pid, uid, _gid = struct.unpack("3i", credentials)
        return uid == os.getuid() and hmac.compare_digest(token.encode(), self._token.encode())

    def _fork(self, request: dict[str, Any], fds: list[int]) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            # Both sides set it, so that neither can act before it is true.
            if request["pgid"] is not None:
                with contextlib.suppress(OSError):
                    os.setpgid(pid, request["pgid"])
            return pid
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with_parent()
            self._close_in_child(fds)
            spawn_child.become(request, fds)
            _set_threads()
            code = spawn_child.run(request)
        except BaseException as error:
            print(f"hotswap: the worker could not start: {error}", file=sys.stderr)
        finally:
            spawn_child.leave(code)

    def _close_in_child(self, keep: list[int]) -> None:
        for sock in (self._listener, self._wake_in, self._wake_out):
            sock.close()
        for client in self._clients.values():
            for fd in client.fds:
                if fd not in keep:
                    os.close(fd)
            client.sock.close()

    def _say(self, client: _Client, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            client.sock.sendall(json.dumps(message).encode() + b"\n")

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            owner = self._owner.pop(pid, None)
            if owner is not None:
                owner.children.discard(pid)
                self._say(owner, {"exited": pid, "status": os.waitstatus_to_exitcode(status)})
            self._kill_orphans()

    def _kill_orphans(self) -> None:
        """Children of dead workers have become ours, for we are their subreaper; nobody needs them any more."""
        for pid in _children():
            if pid not in self._owner:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _drop(self, client: _Client) -> None:
        self._clients.pop(client.sock.fileno(), None)
        client.sock.close()
        for fd in client.fds:
            os.close(fd)
        for pid in client.children:
            self._owner.pop(pid, None)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _wake(*_: Any) -> None:
    """SIGCHLD has to have a handler for the wake-up descriptor to be written."""


def _children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def _set_threads() -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def preload(names: list[str]) -> None:
    """Import *names*. UsageError naming the module if one of them starts a thread."""
    for name in names:
        importlib.import_module(name)
        threads = len(os.listdir("/proc/self/task"))
        if threads != 1:
            raise UsageError(
                f"preloading {name!r} left {threads} threads in the fork server, and forking them is not safe; "
                "take it out of --preload, or start workers with --no-preload"
            )


def main() -> int:
    """Entry point of ``python -m hotswap.node.forkserver``: ``{"socket", "token", "preload"}`` as one line on standard input."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    settings = json.loads(sys.stdin.buffer.readline())
    # BLAS libraries start their threads on import; workers set their own number afterwards.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    try:
        preload(settings["preload"])
    except (UsageError, ImportError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 2
    # What was imported lives as long as the process; children then share its pages instead of copying them on collection.
    gc.collect()
    gc.freeze()
    server = Server(settings["socket"], settings["token"])
    print(json.dumps({"ready": True}), flush=True)
    try:
        server.serve()
    finally:
        server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
