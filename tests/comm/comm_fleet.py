"""A small fleet of forked slots with a key-value server, for tests of what only shows between processes.

The parent imports torch once and owns no threads; every slot is forked from it, so that a whole fleet starts in
milliseconds. Results travel as JSON over pipes. Nothing outlives ``Fleet.run``.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import struct
import tempfile
import termios
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hotswap.comm import CONTROL_KEY, Groups
from hotswap.errors import Fenced, PeerUnreachable

HEADER = struct.Struct("<BdII")
SET, GET = 0, 1
PR_SET_PDEATHSIG = 1


class KeyValueServer:
    """Values by key; a get waits for its key."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(256)
        self._values: dict[bytes, bytes] = {}
        self._changed = threading.Condition()

    def serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve_one, args=(connection,), daemon=True).start()

    def _serve_one(self, connection: socket.socket) -> None:
        with contextlib.suppress(ConnectionError), connection, connection.makefile("rwb") as stream:
            while header := stream.read(HEADER.size):
                kind, timeout_s, key_size, size = HEADER.unpack(header)
                key, value = stream.read(key_size), stream.read(size)
                if kind == SET:
                    with self._changed:
                        self._values[key] = value
                        self._changed.notify_all()
                    continue
                with self._changed:
                    there = self._changed.wait_for(lambda key=key: key in self._values, timeout_s)  # type: ignore[misc]
                    answer = self._values[key] if there else b""
                stream.write(struct.pack("<?I", there, len(answer)) + answer)
                stream.flush()


class KeyValues:
    """Client of the server; one connection per thread. Also the Rendezvous of the tests."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._local = threading.local()
        self.gets = 0

    def set(self, key: str, value: bytes) -> None:
        stream = self._stream()
        stream.write(HEADER.pack(SET, 0.0, len(key.encode()), len(value)) + key.encode() + value)
        stream.flush()

    def get(self, key: str, timeout_s: float) -> bytes:
        self.gets += 1
        stream = self._stream()
        stream.write(HEADER.pack(GET, timeout_s, len(key.encode()), 0) + key.encode())
        stream.flush()
        there, size = struct.unpack("<?I", stream.read(5))
        value: bytes = stream.read(size)
        if not there:
            raise PeerUnreachable(f"nobody set {key}")
        return value

    def close(self) -> None:
        """Close this thread's connection."""
        if hasattr(self._local, "stream"):
            self._local.stream.close()
            del self._local.stream

    def _stream(self) -> Any:
        if not hasattr(self._local, "stream"):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(self._path)
                self._local.stream = sock.makefile("rwb")
        return self._local.stream


class SlotProcess:
    """What the function that runs in a forked slot gets."""

    def __init__(
        self, slot: int, world_size: int, path: str, *, spare: bool, timeout_s: float, on_gpu: bool = False
    ) -> None:
        self.slot = slot
        self.device = torch.device("cuda", slot) if on_gpu else torch.device("cpu")
        self.world_size = world_size
        self.spare = spare
        self.values = KeyValues(path)
        if on_gpu:
            torch.cuda.set_device(self.device)
        self.groups = Groups(
            slot=slot,
            world_size=world_size,
            timeout_s=timeout_s,
            connect_timeout_s=10.0,
            device=self.device if on_gpu else None,
        )

    def barrier(self, name: str) -> None:
        self.values.set(f"barrier/{name}/{self.slot}", b"")
        for slot in range(self.world_size):
            self.values.get(f"barrier/{name}/{slot}", 20.0)

    def gather(self, name: str, value: Any) -> list[Any]:
        """Everybody's value, through the server."""
        self.values.set(f"gather/{name}/{self.slot}", json.dumps(value).encode())
        return [json.loads(self.values.get(f"gather/{name}/{slot}", 20.0)) for slot in range(self.world_size)]

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, generation: int, parked: threading.Event, **abort: Any) -> Watch:
        """Abort when somebody fences the generation, as the listener thread of a worker does."""
        return Watch(self, generation, parked, abort)


def queued_bytes(process: SlotProcess) -> int:
    """Bytes of the connections of all slots, the world group's among them, that the peer has not acknowledged."""
    link: Any = process.groups._links[CONTROL_KEY]
    buffers = [fcntl.ioctl(socket_id.fd, termios.TIOCOUTQ, b"\0" * 4) for socket_id in link.socket_ids]
    return sum(struct.unpack("i", buffer)[0] for buffer in buffers)


class Watch(threading.Thread):
    """Waits for the end of one generation and aborts."""

    def __init__(self, process: SlotProcess, generation: int, parked: threading.Event, abort: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._process, self._generation, self._parked, self._abort = process, generation, parked, abort
        self.report: Any = None
        self.replaced: frozenset[int] = frozenset()
        self.start()

    def run(self) -> None:
        try:
            value = self._process.values.get(f"fence/{self._generation}", 60.0)
        except (PeerUnreachable, ConnectionError, struct.error):
            return
        self.replaced = frozenset(json.loads(value))
        options = {"settle_s": 0.05, "deadline_s": 5.0, **self._abort}
        self.report = self._process.groups.abort(parked=self._parked, replaced=self.replaced, **options)

    def park(self) -> Any:
        """Called by the main thread when it has raised; the abort's report."""
        self._parked.set()
        self.join(20.0)
        return self.report


class Fleet:
    """Forks, watches and reaps."""

    def __init__(
        self, world_size: int, *, deadline_s: float = 30.0, timeout_s: float = 20.0, on_gpu: bool = False
    ) -> None:
        """*on_gpu*: each slot has the GPU of its number; a spare shares that of the slot it stands by for."""
        self.on_gpu = on_gpu
        self.world_size = world_size
        self.deadline_s = deadline_s
        self.timeout_s = timeout_s

    def run(
        self,
        main: Callable[[SlotProcess], Any],
        *,
        spare_for: frozenset[int] = frozenset(),
        preload: tuple[str, ...] = (),
    ) -> dict[Any, Any]:
        """Run *main* in every slot and in one spare for each of *spare_for*; results by slot, the spares' by ``"spare<slot>"``.

        With *preload*, these modules are imported in a process of its own from which the slots are forked. A slot that is killed has the result ``"killed"`` and is announced at ``fence/1``, ``fence/2`` and so on.
        """
        directory = tempfile.mkdtemp(prefix="comm-fleet-")
        path = str(Path(directory) / "kv")
        try:
            if preload:
                return self._run_in_nursery(main, path, spare_for, preload)
            return self._run(main, path, spare_for)
        finally:
            shutil.rmtree(directory)

    def _run_in_nursery(
        self, main: Callable[[SlotProcess], Any], path: str, spare_for: frozenset[int], preload: tuple[str, ...]
    ) -> dict[Any, Any]:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            _never_return(self._nurse, main, path, spare_for, preload, writing)
        os.close(writing)
        with open(reading, "rb") as pipe:
            outcome = json.loads(pipe.read() or b'{"error": "the nursery died"}')
        os.waitpid(pid, 0)
        assert "error" not in outcome, outcome["error"]
        return {name if isinstance(name, str) else int(name): result for name, result in outcome["results"]}

    def _nurse(
        self,
        main: Callable[[SlotProcess], Any],
        path: str,
        spare_for: frozenset[int],
        preload: tuple[str, ...],
        writing: int,
    ) -> None:
        warnings.simplefilter("ignore")
        try:
            for name in preload:
                importlib.import_module(name)
            outcome: dict[str, Any] = {"results": list(self._run(main, path, spare_for).items())}
        except BaseException:
            outcome = {"error": traceback.format_exc()}
        os.write(writing, json.dumps(outcome).encode())

    def _run(self, main: Callable[[SlotProcess], Any], path: str, spare_for: frozenset[int]) -> dict[Any, Any]:
        server = KeyValueServer(path)
        children: dict[int, Any] = {}
        pipes: dict[Any, int] = {}
        server_pid = os.fork()
        if server_pid == 0:
            _never_return(server.serve)
        server._listener.close()
        for name, slot in [(slot, slot) for slot in range(self.world_size)] + [
            (f"spare{slot}", slot) for slot in sorted(spare_for)
        ]:
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                _never_return(self._child, main, slot, path, writing, name != slot)
            os.close(writing)
            children[pid] = name
            pipes[name] = reading
        values = KeyValues(path)
        try:
            return self._collect(children, pipes, values)
        finally:
            values.close()
            for pid in [*children, server_pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
            for fd in pipes.values():
                os.close(fd)

    def _child(self, main: Callable[[SlotProcess], Any], slot: int, path: str, writing: int, spare: bool) -> None:
        torch.set_num_threads(1)
        process = SlotProcess(slot, self.world_size, path, spare=spare, timeout_s=self.timeout_s, on_gpu=self.on_gpu)
        try:
            process.groups.install()
            result = main(process)
        except BaseException:
            result = {"error": traceback.format_exc()}
        os.write(writing, json.dumps(result).encode())

    def _collect(self, children: dict[int, Any], pipes: dict[Any, int], values: KeyValues) -> dict[Any, Any]:
        outputs: dict[Any, bytes] = dict.fromkeys(pipes, b"")
        generation = 0
        deadline = time.monotonic() + self.deadline_s
        with selectors.DefaultSelector() as selector:
            for name, fd in pipes.items():
                selector.register(fd, selectors.EVENT_READ, name)
            while selector.get_map():
                if time.monotonic() > deadline:
                    raise AssertionError(
                        f"no result from {sorted(str(key.data) for key in selector.get_map().values())} in {self.deadline_s} s"
                    )
                for key, _ in selector.select(timeout=0.1):
                    data = os.read(key.fd, 65536)
                    outputs[key.data] += data
                    if not data:
                        selector.unregister(key.fd)
                        if not outputs[key.data] and isinstance(key.data, int):
                            generation += 1
                            values.set(f"fence/{generation}", json.dumps([key.data]).encode())
        results = {name: json.loads(output) if output else "killed" for name, output in outputs.items()}
        failed = {
            name: result["error"] for name, result in results.items() if isinstance(result, dict) and "error" in result
        }
        assert not failed, "\n".join(f"slot {name}: {text}" for name, text in failed.items())
        return results


def _never_return(function: Callable[..., Any], *args: Any) -> None:
    # Nothing stays behind when the test process itself is killed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        function(*args)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


__all__ = ["Fenced", "Fleet", "KeyValues", "SlotProcess", "Watch", "queued_bytes"]
