"""What the tests of this folder share: a node's worth of memory, deterministic bytes, and a network that misbehaves."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType

from hotswap.core.types import Endpoint, Held, HeldKind
from hotswap.replication.channel import PURPOSE, Connection, Deadline
from hotswap.replication.sections import SectionId
from hotswap.replication.transfer import ServerLimits, TransferClient, TransferServer
from hotswap.replication.vault import Vault
from hotswap.wire.auth import CHALLENGE_BYTES, Initiator

TOKEN = "0123456789abcdef" * 4
OTHER_TOKEN = "fedcba9876543210" * 4
LIMITS = ServerLimits(progress_s=2.0, handshake_s=2.0)


def content(owner: int, step: int, generation: int, nbytes: int) -> bytes:
    """Bytes that no other version has."""
    return random.Random(f"{owner} {step} {generation} {nbytes}").randbytes(nbytes)


def complete(vault: Vault, section: SectionId) -> bytes:
    """Do what a worker does: take the next buffer, fill it, say so. Returns both sections' bytes."""
    nbytes = section.shared_nbytes + section.unique_nbytes
    vault.reserve(section.owner, max(1, nbytes), 2)
    index = vault.next_buffer(section.owner)
    vault.snapshot_begin(section.owner, index)
    data = content(section.owner, section.step, section.generation, nbytes)
    vault.granted(section.owner)[index].view()[:nbytes] = data
    vault.snapshot_complete(
        section.owner,
        generation=section.generation,
        step=section.step,
        buffer=index,
        shared_nbytes=section.shared_nbytes,
        unique_nbytes=section.unique_nbytes,
    )
    return data


def section(owner: int = 0, step: int = 1, generation: int = 1, shared: int = 100, unique: int = 1000) -> SectionId:
    return SectionId(owner=owner, step=step, generation=generation, shared_nbytes=shared, unique_nbytes=unique)


def held(vault: Vault, kind: HeldKind) -> list[tuple[int, int]]:
    """Slot and step of each complete version."""
    return [(item.slot, item.step) for item in vault.inventory() if item.kind is kind]


def replicas(vault: Vault) -> list[Held]:
    return [item for item in vault.inventory() if item.kind is HeldKind.REPLICA]


def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait for what another thread or process will do."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)


class Site:
    """One node: its vault, its data port, and its client."""

    def __init__(self, *, limits: ServerLimits = LIMITS, token: str = TOKEN, streams: int = 2) -> None:
        self.vault = Vault(where="in this test's memory")
        self.server = TransferServer(self.vault, token=token, limits=limits)
        self.server.start()
        self.client = TransferClient(token=token, streams=streams, progress_s=2.0, connect_s=2.0)
        self.endpoint = Endpoint(host="127.0.0.1", port=self.server.port)

    def __enter__(self) -> Site:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        self.server.close()
        self.vault.close()

    def raw(self) -> Connection:
        """An authenticated connection to this node, for saying what no client would say."""
        sock = socket.create_connection((self.endpoint.host, self.endpoint.port), timeout=2.0)
        connection = Connection(sock, "the server")
        deadline = Deadline(2.0, 2.0)
        side = Initiator(TOKEN, PURPOSE)
        connection.send_raw(side.hello(), deadline)
        proof, keys = side.prove(connection.receive_raw(CHALLENGE_BYTES, deadline))
        connection.send_raw(proof, deadline)
        connection.authenticate(keys.send, keys.receive)
        return connection


class Proxy:
    """Stands between client and server. *upward* and *downward* see (position in the stream, bytes) and may change them.

    Returning None cuts both directions. ``recorded`` is what the client sent, before it was changed.
    """

    def __init__(
        self,
        target: Endpoint,
        upward: Callable[[int, bytes], bytes | None] = lambda position, data: data,
        downward: Callable[[int, bytes], bytes | None] = lambda position, data: data,
    ) -> None:
        self._target = target
        self._hooks = (upward, downward)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint(host="127.0.0.1", port=self._listener.getsockname()[1])
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self.recorded: list[bytearray] = []
        self._start(self._accept)

    def _start(self, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection((self._target.host, self._target.port))
                self._sockets += [near, far]
                record = bytearray()
                self.recorded.append(record)
                self._start(partial(self._pump, near, far, self._hooks[0], record))
                self._start(partial(self._pump, far, near, self._hooks[1], bytearray()))

    def _pump(
        self, source: socket.socket, sink: socket.socket, hook: Callable[[int, bytes], bytes | None], record: bytearray
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                changed = hook(len(record), data)
                record += data
                if changed is None:
                    break
                sink.sendall(changed)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(5)
        self._listener.close()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
        for sock in self._sockets:
            sock.close()


def flip(target: int) -> Callable[[int, bytes], bytes]:
    """A hook that turns over one bit of the byte at position *target* of a stream."""

    def hook(position: int, data: bytes) -> bytes:
        if position <= target < position + len(data):
            changed = bytearray(data)
            changed[target - position] ^= 4
            return bytes(changed)
        return data

    return hook


def once(hook: Callable[[int, bytes], bytes]) -> Callable[[int, bytes], bytes]:
    """*hook* until it has changed something; the network is well again after that."""
    done = False

    def only_once(position: int, data: bytes) -> bytes:
        nonlocal done
        changed = data if done else hook(position, data)
        done = done or changed != data
        return changed

    return only_once


def cut(target: int) -> Callable[[int, bytes], bytes | None]:
    """A hook that ends a stream before the byte at position *target*. Bytes before it in the same read are lost too."""
    return lambda position, data: None if position + len(data) > target else data
