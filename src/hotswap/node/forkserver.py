"""A process that has imported torch, and what the user names, once, and forks workers from that state.

Single-threaded by construction: a fork copies only the calling thread, and a lock another thread holds at that moment would
stay locked in the child for ever. One server can serve several agents; what it started for one is killed when that one's
connection ends, and with each process its descendants.
"""

from __future__ import annotations

import contextlib
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
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotswap.errors import UsageError
from hotswap.node import gpus, spawn_child
from hotswap.node.process import adopt_orphans, die_with_parent, kill_orphans
from hotswap.node.spawn import LINE_BYTES_MAX
from hotswap.node.spawn_child import redirect

FDS_MAX = 16
SEND_S = 5
"""How long a client that does not read may hold the others up before it counts as gone."""
END_S = 10.0
COUNT_S = 60.0
"""How long the number of GPUs may be waited for; a driver that has slept takes seconds."""


@dataclass(eq=False)
class _Client:
    sock: socket.socket
    trusted: bool = False
    buffer: bytes = b""
    fds: list[int] = field(default_factory=list)
    children: dict[int, int] = field(default_factory=dict)
    """Pids of living processes, by the numbers that the client gave them."""


class Server:
    """The poll loop."""

    def __init__(self, path: str, token: str) -> None:
        """Listen at *path*, for the same user only. Its folder is made, and removed with it, unless it is there."""
        self._token = token
        self._path = Path(path)
        self._owns_folder = not self._path.parent.exists()
        if self._owns_folder:
            self._path.parent.mkdir(mode=0o700)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        mask = os.umask(0o177)
        try:
            self._listener.bind(path)
        finally:
            os.umask(mask)
        self._listener.listen(128)
        self._clients: dict[int, _Client] = {}
        self._owner: dict[int, tuple[_Client, int]] = {}
        self._asked_to_leave = False
        self._wake_in, self._wake_out = socket.socketpair()
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._leave)
        signal.set_wakeup_fd(self._wake_out.fileno(), warn_on_full_buffer=False)

    def serve(self) -> None:
        """Until standard input ends or SIGTERM comes, that is until whoever started this is gone or done."""
        poll = select.poll()
        for fd in (0, self._listener.fileno(), self._wake_in.fileno()):
            poll.register(fd, select.POLLIN)
        while not self._asked_to_leave:
            for fd, _ in poll.poll():
                if fd == 0:
                    self._asked_to_leave = self._asked_to_leave or not os.read(0, 4096)
                elif fd == self._wake_in.fileno():
                    with contextlib.suppress(BlockingIOError):
                        self._wake_in.recv(4096)
                    self._reap()
                elif fd == self._listener.fileno():
                    poll.register(self._accept(), select.POLLIN)
                elif fd in self._clients and not self._hear(self._clients[fd]):
                    poll.unregister(fd)
                    self._drop(self._clients[fd])

    def close(self) -> None:
        """Kill everything that descends from this process, wait until it is gone, remove the socket."""
        signal.set_wakeup_fd(-1)
        self._listener.close()
        with contextlib.suppress(OSError):
            self._path.unlink()
            if self._owns_folder:
                self._path.parent.rmdir()
        for client in list(self._clients.values()):
            self._drop(client)
        # Each death can hand up grandchildren, so this is over when nobody is left, not when all known ones are.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        deadline = time.monotonic() + END_S
        while self._reap_all(lambda *_: None) and (left := deadline - time.monotonic()) > 0:
            kill_orphans(())
            signal.sigtimedwait([signal.SIGCHLD], left)

    def _leave(self, *_: object) -> None:
        self._asked_to_leave = True

    # --- clients ---------------------------------------------------------------------------------------------------

    def _accept(self) -> int:
        sock, _ = self._listener.accept()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_S, 0))
        self._clients[sock.fileno()] = _Client(sock)
        return sock.fileno()

    def _hear(self, client: _Client) -> bool:
        """Read and obey; False when the client has to go."""
        try:
            data, fds, _flags, _address = socket.recv_fds(client.sock, 65536, FDS_MAX)
        except OSError:
            return False
        client.fds += fds
        client.buffer += data
        if not data or len(client.buffer) > LINE_BYTES_MAX or len(client.fds) > FDS_MAX:
            return False
        while b"\n" in client.buffer:
            line, _, client.buffer = client.buffer.partition(b"\n")
            try:
                if not self._obey(client, json.loads(line)):
                    return False
            except (ValueError, KeyError, TypeError):
                return False
        return True

    def _obey(self, client: _Client, message: dict[str, Any]) -> bool:
        if not client.trusted:
            client.trusted = self._trusts(client, str(message["token"]))
            return (
                self._say(client, {} if client.trusted else {"error": "wrong token or another user"}) and client.trusted
            )
        if "kill" in message:
            # Only what is not reaped yet: its pid cannot have passed to another process.
            if message["kill"] in client.children:
                os.kill(client.children[message["kill"]], message["signal"])
            return True
        number, count = int(message["number"]), len(message["fd_names"])
        if len(client.fds) < count:
            return False
        fds, client.fds = client.fds[:count], client.fds[count:]
        try:
            pid = self._fork(message, fds)
        except OSError as error:
            return self._say(client, {"number": number, "status": 1, "error": str(error)})
        finally:
            for fd in fds:
                os.close(fd)
        client.children[number] = pid
        self._owner[pid] = client, number
        return self._say(client, {"number": number, "pid": pid})

    def _trusts(self, client: _Client, token: str) -> bool:
        credentials = client.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _pid, uid, _gid = struct.unpack("3i", credentials)
        return uid == os.getuid() and hmac.compare_digest(token.encode(), self._token.encode())

    def _say(self, client: _Client, message: dict[str, Any]) -> bool:
        try:
            client.sock.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            # The loop then reads its end and drops it.
            with contextlib.suppress(OSError):
                client.sock.shutdown(socket.SHUT_RDWR)
            return False
        return True

    def _drop(self, client: _Client) -> None:
        del self._clients[client.sock.fileno()]
        client.sock.close()
        for fd in client.fds:
            os.close(fd)
        for pid in client.children.values():
            del self._owner[pid]
            os.kill(pid, signal.SIGKILL)

    # --- processes -------------------------------------------------------------------------------------------------

    def _fork(self, request: dict[str, Any], fds: list[int]) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        server = os.getpid()
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
            die_with_parent(parent=server)
            self._close_in_child(fds)
            spawn_child.become(request, fds)
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
                os.close(fd)
            client.sock.close()
        for fd in keep:
            os.set_inheritable(fd, False)

    def _reap(self) -> None:
        if self._reap_all(self._report):
            kill_orphans(self._owner)

    def _reap_all(self, report: Callable[[int, int], None]) -> bool:
        """Reap and report the dead; whether living children are left."""
        try:
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                report(*found)
        except ChildProcessError:
            return False
        return True

    def _report(self, pid: int, status: int) -> None:
        if pid in self._owner:
            owner, number = self._owner.pop(pid)
            del owner.children[number]
            self._say(owner, {"number": number, "status": os.waitstatus_to_exitcode(status)})


@contextlib.contextmanager
def _driver_asleep() -> Iterator[None]:
    """Modules that ask torch how many GPUs there are while they are imported get the answer of a child process.

    Here the question would load the driver's library, with a thread and open devices, which no fork may inherit.
    """
    if not gpus.visible():
        yield
        return
    cuda: Any = importlib.import_module("torch").cuda
    count, asked = _in_child(cuda.device_count), cuda.device_count
    cuda.device_count = lambda: count
    try:
        yield
    finally:
        cuda.device_count = asked


def _in_child(ask: Callable[[], int]) -> int:
    """What *ask* returns in a child process, whose state is lost with it; UsageError if it does not answer."""
    readable, writable = os.pipe()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            os.write(writable, b"%d" % ask())
        os._exit(0)
    os.close(writable)
    try:
        answered = select.select([readable], [], [], COUNT_S)[0]
        answer = os.read(readable, 64) if answered else b""
    finally:
        os.close(readable)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if not answer:
        raise UsageError(
            "torch could not count the GPUs of this node: see nvidia-smi, or start workers with --no-preload"
        )
    return int(answer)


def preload(names: Sequence[str]) -> None:
    """Import *names*. UsageError naming the module that fails or starts a thread."""
    with _driver_asleep():
        _import(names)


def _import(names: Sequence[str]) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            raise UsageError(
                f"preloading {name!r} failed: {type(error).__name__}: {error}; take it out of --preload, or start workers with --no-preload"
            ) from error
        threads = len(os.listdir("/proc/self/task"))
        if threads != 1:
            raise UsageError(
                f"preloading {name!r} left {threads} threads in the fork server, and forking them is not safe; "
                "take it out of --preload, or start workers with --no-preload"
            )


def main() -> int:
    """Entry point of ``python -m hotswap.node.forkserver [MODULE...]``.

    Modules given as arguments are imported at once. Then one line on standard input says the rest: ``{"socket", "token",
    "preload", "path", "log"}``, of which the last two are optional: folders to import from, and where standard error goes.
    """
    # Not SIGKILL: what descends from the workers is ended by this process, so it must live long enough to do it.
    die_with_parent(signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt_orphans()
    # BLAS libraries start their threads on import; workers set their own number afterwards.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    # A module that asks torch for GPUs while it is imported must not wake the driver, which no fork may inherit.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    try:
        preload(sys.argv[1:])
        settings = json.loads(sys.stdin.buffer.readline())
        if "log" in settings:
            redirect(settings["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 2)
        sys.path[:0] = settings.get("path", [])
        preload(settings["preload"])
    except UsageError as error:
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
