"""The asking side of the data channel: pushes an own snapshot to its holder, fetches sections for a restore."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from hotswap.core.types import Endpoint, HeldKind, Slot, Step
from hotswap.errors import IntegrityError, LayoutMismatch, PeerUnreachable, ProtocolError
from hotswap.replication.channel import (
    INLINE_NBYTES_MAX,
    PURPOSE,
    Ack,
    Busy,
    Commit,
    Connection,
    ConnectionLost,
    Deadline,
    End,
    Fetch,
    Message,
    Offer,
    Part,
    Push,
    Ready,
    Received,
    Refused,
    numeric_family,
)
from hotswap.replication.handles import Lease
from hotswap.replication.sections import SectionId, SectionKind, require_equal, spans
from hotswap.replication.server import ServerLimits, TransferServer, TransferStats
from hotswap.replication.vault import Vault
from hotswap.wire.auth import CHALLENGE_BYTES, Initiator

__all__ = ["Ack", "Busy", "ServerLimits", "TransferClient", "TransferServer", "TransferStats"]

BUSY_WAIT_S = 0.01
BUSY_WAIT_S_MAX = 0.2
LAST_WORDS_S = 0.5

M = TypeVar("M", bound=Message)
T = TypeVar("T")


class TransferClient:
    """Thread-safe; connections are kept and used again.

    Raises PeerUnreachable when the peer is gone or stalls, Fenced when it is in a later generation, Busy when it was
    so until the deadline, NotHeld, IntegrityError and LayoutMismatch as their names say, UsageError when the peer has
    no memory. A transfer that raised has changed nothing visible, and may be repeated.
    """

    def __init__(
        self,
        *,
        token: str,
        streams: int = 2,
        connect_s: float = 5.0,
        progress_s: float = 10.0,
        on_chunk: Callable[[SectionId, int], None] | None = None,
    ) -> None:
        """*streams*: connections for one large section. *progress_s*: longest time without a byte.

        *on_chunk* is called in the middle of a push with the number of bytes sent so far, always before the holder can
        have the whole: a place to inject faults.
        """
        assert streams >= 1, f"{streams} streams"
        self._token = token
        self._streams = streams
        self._connect_s = connect_s
        self._progress_s = progress_s
        self.on_chunk = on_chunk
        self._lock = threading.Lock()
        self._closed = False
        self._interrupted = threading.Event()
        self._idle: dict[Endpoint, list[Connection]] = {}
        self._active: set[Connection] = set()

    # --- public ------------------------------------------------------------------------------------------------

    def push(self, endpoint: Endpoint, vault: Vault, section: SectionId, *, deadline_s: float) -> Ack:
        """Copy the unique section of an own snapshot in *vault* to the holder at *endpoint*.

        Returns when it is whole, checked and visible there. ``section.generation`` may be later than that in which the
        snapshot was made: after a recovery the same bytes belong to the new generation.
        """
        deadline = Deadline(deadline_s, self._progress_s)
        with vault.open(section.owner, section.step, SectionKind.UNIQUE, HeldKind.OWN) as lease:
            if lease.nbytes != section.unique_nbytes:
                raise LayoutMismatch(
                    f"{section.unique_nbytes} bytes are to be pushed of {lease.section}: {lease.nbytes}"
                )
            send = self._push_inline if lease.nbytes <= INLINE_NBYTES_MAX else self._push_parts
            ack, sums = self._patiently(
                endpoint, deadline, lambda first: send(endpoint, first, lease, section, deadline)
            )
            lease.remember(sums)
            return ack

    def fetch(
        self, endpoint: Endpoint, owner: Slot, step: Step, kind: SectionKind, into: memoryview, *, deadline_s: float
    ) -> tuple[int, ...]:
        """Copy a section from the node at *endpoint* into memory of exactly its length; its checksums, verified.

        Until this returns, the contents of *into* are undefined.
        """
        deadline = Deadline(deadline_s, self._progress_s)
        parts = spans(len(into), self._streams)

        def fetch_one(connection: Connection, start: int, stop: int) -> tuple[SectionId, tuple[int, ...]]:
            request = Fetch(
                owner=owner, step=step, kind=kind, section_nbytes=len(into), offset=start, nbytes=stop - start
            )
            return _fetch_range(connection, request, into[start:stop], deadline)

        def fetch_all(first: Connection) -> tuple[int, ...]:
            results = self._on_streams(endpoint, first, parts, deadline, fetch_one)
            if len({section for section, _ in results}) != 1:
                raise IntegrityError(f"slot {owner} at step {step} on {first.peer} was replaced while it was fetched")
            return tuple(value for _, sums in results for value in sums)

        return self._patiently(endpoint, deadline, fetch_all)

    def interrupt(self) -> None:
        """Make all transfers that are going on raise PeerUnreachable now: their generation has ended."""
        with self._lock:
            waiting, self._interrupted = self._interrupted, threading.Event()
            active = list(self._active)
        waiting.set()
        for connection in active:
            connection.interrupt()

    def close(self) -> None:
        """Interrupt everything and close all connections; later transfers raise PeerUnreachable."""
        with self._lock:
            self._closed = True
            idle = [connection for pool in self._idle.values() for connection in pool]
            self._idle.clear()
        self.interrupt()
        for connection in idle:
            connection.close()

    # --- pushing -----------------------------------------------------------------------------------------------

    def _push_inline(
        self, endpoint: Endpoint, connection: Connection, lease: Lease, section: SectionId, deadline: Deadline
    ) -> tuple[Ack, tuple[int, ...]]:
        connection.send(Push(section=section, inline=True), deadline)
        sums = self._send(connection, lease, section, (0, lease.nbytes), deadline)
        return _expect(connection, Ack, deadline), sums

    def _push_parts(
        self, endpoint: Endpoint, first: Connection, lease: Lease, section: SectionId, deadline: Deadline
    ) -> tuple[Ack, tuple[int, ...]]:
        first.send(Push(section=section, inline=False), deadline)
        transfer = _expect(first, Ready, deadline).transfer

        def send_one(connection: Connection, start: int, stop: int) -> tuple[int, ...]:
            connection.send(Part(transfer=transfer, offset=start, nbytes=stop - start), deadline)
            sums = self._send(connection, lease, section, (start, stop), deadline)
            _expect(connection, Received, deadline)
            return sums

        parts = self._on_streams(endpoint, first, spans(lease.nbytes, self._streams), deadline, send_one)
        first.send(Commit(transfer=transfer), deadline)
        return _expect(first, Ack, deadline), tuple(value for sums in parts for value in sums)

    def _send(
        self, connection: Connection, lease: Lease, section: SectionId, span: tuple[int, int], deadline: Deadline
    ) -> tuple[int, ...]:
        start, stop = span
        sent = start

        def on_piece(nbytes: int) -> None:
            nonlocal sent
            sent += nbytes
            if self.on_chunk is not None:
                self.on_chunk(section, sent)

        try:
            sums = connection.send_file(
                lease.fd, lease.offset + start, lease.view[start:stop], deadline, on_piece=on_piece
            )
            connection.send(End(checksums=sums, intact=lease.intact), deadline)
        except PeerUnreachable:
            _raise_last_words(connection)
            raise
        return sums

    # --- connections -------------------------------------------------------------------------------------------

    def _patiently(self, endpoint: Endpoint, deadline: Deadline, exchange: Callable[[Connection], T]) -> T:
        """Run *exchange* on a connection; again while the peer is busy, and once if a kept connection had died."""
        with self._lock:
            interrupted = self._interrupted
        wait_s = BUSY_WAIT_S
        retried = False
        while True:
            try:
                with self._connection(endpoint, deadline) as connection:
                    return exchange(connection)
            except Busy:
                if deadline.left_s <= wait_s or interrupted.wait(wait_s):
                    raise
                wait_s = min(2 * wait_s, BUSY_WAIT_S_MAX)
            except ConnectionLost:
                if retried or interrupted.is_set() or deadline.left_s <= 0:
                    raise
                retried = True
                self._forget(endpoint)

    def _on_streams(
        self,
        endpoint: Endpoint,
        first: Connection,
        parts: list[tuple[int, int]],
        deadline: Deadline,
        move: Callable[[Connection, int, int], T],
    ) -> list[T]:
        """*move* each part over a connection of its own, at the same time. The first failure ends all and is raised."""
        if len(parts) == 1:
            return [move(first, *parts[0])]
        results: dict[int, T] = {}
        errors: list[BaseException] = []
        with contextlib.ExitStack() as stack:
            connections = [first, *(stack.enter_context(self._connection(endpoint, deadline)) for _ in parts[1:])]

            def run(index: int) -> None:
                try:
                    results[index] = move(connections[index], *parts[index])
                except BaseException as error:
                    errors.append(error)
                    for connection in connections:
                        connection.interrupt()

            threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(1, len(parts))]
            for thread in threads:
                thread.start()
            run(0)
            # Each of them has a deadline of its own.
            for thread in threads:
                thread.join()
            if errors:
                raise errors[0]
        return [results[index] for index in range(len(parts))]

    @contextlib.contextmanager
    def _connection(self, endpoint: Endpoint, deadline: Deadline) -> Iterator[Connection]:
        """A connection that is kept for later unless something goes wrong on it."""
        connection = self._kept(endpoint) or self._connect(endpoint, deadline)
        try:
            yield connection
        except BaseException:
            self._leave(connection)
            connection.close()
            raise
        self._leave(connection)
        with self._lock:
            keep = not self._closed
            if keep:
                self._idle.setdefault(endpoint, []).append(connection)
        if not keep:
            connection.close()

    def _kept(self, endpoint: Endpoint) -> Connection | None:
        """An idle connection, taken out. Those that their peers have closed are dropped, whichever peer it is."""
        with self._lock:
            dead = []
            for pool in self._idle.values():
                dead += [connection for connection in pool if not connection.quiet]
                pool[:] = [connection for connection in pool if connection not in dead]
            self._idle = {key: pool for key, pool in self._idle.items() if pool}
            pool = self._idle.get(endpoint, [])
            connection = pool.pop() if pool and not self._closed else None
            if connection is not None:
                self._active.add(connection)
        for lost in dead:
            lost.close()
        return connection

    def _connect(self, endpoint: Endpoint, deadline: Deadline) -> Connection:
        peer = f"{endpoint.host}:{endpoint.port}"
        sock = socket.socket(numeric_family(endpoint.host), socket.SOCK_STREAM)
        sock.settimeout(min(self._connect_s, deadline.next_s(peer)))
        try:
            sock.connect((endpoint.host, endpoint.port))
        except OSError as error:
            sock.close()
            raise PeerUnreachable(f"{peer} cannot be reached: {error}") from None
        # What a network swallows is noticed by its kernel's silence; a holder that is slow still has a kernel that answers.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * self._connect_s))
        connection = Connection(sock, peer)
        try:
            self._enter(connection)
            self._authenticate(connection, Deadline(min(self._connect_s, deadline.next_s(peer)), self._connect_s))
        except BaseException:
            self._leave(connection)
            connection.close()
            raise
        return connection

    def _authenticate(self, connection: Connection, deadline: Deadline) -> None:
        side = Initiator(self._token, PURPOSE)
        connection.send_raw(side.hello(), deadline)
        proof, keys = side.prove(connection.receive_raw(CHALLENGE_BYTES, deadline))
        connection.send_raw(proof, deadline)
        connection.authenticate(keys.send, keys.receive)

    def _enter(self, connection: Connection) -> None:
        with self._lock:
            if self._closed:
                raise PeerUnreachable(f"{connection.peer}: this node's transfers have ended")
            self._active.add(connection)

    def _leave(self, connection: Connection) -> None:
        with self._lock:
            self._active.discard(connection)

    def _forget(self, endpoint: Endpoint) -> None:
        with self._lock:
            pool = self._idle.pop(endpoint, [])
        for connection in pool:
            connection.close()


def _fetch_range(
    connection: Connection, request: Fetch, into: memoryview, deadline: Deadline
) -> tuple[SectionId, tuple[int, ...]]:
    connection.send(request, deadline)
    section = _expect(connection, Offer, deadline).section
    if (section.owner, section.step, section.nbytes(request.kind)) != (
        request.owner,
        request.step,
        request.section_nbytes,
    ):
        raise IntegrityError(
            f"{connection.peer} offers {section} where slot {request.owner} at step {request.step} was asked"
        )
    found = connection.receive_into(into, deadline)
    end = _expect(connection, End, deadline)
    if not end.intact:
        raise IntegrityError(f"{section} on {connection.peer} was overwritten while it was fetched")
    where = f"fetched from {connection.peer}"
    require_equal(found, end.checksums, what=f"{request.kind.value} section of {section}", where=where)
    return section, found


def _expect(connection: Connection, kind: type[M], deadline: Deadline) -> M:
    message = connection.receive(deadline)
    if isinstance(message, Refused):
        raise message.error(connection.peer)
    if not isinstance(message, kind):
        raise ProtocolError(f"{connection.peer} answered {type(message).__name__} instead of {kind.__name__}")
    return message


def _raise_last_words(connection: Connection) -> None:
    """A holder that refuses in the middle says why before it hangs up."""
    message: Message | None = None
    with contextlib.suppress(PeerUnreachable, ProtocolError):
        message = connection.receive(Deadline(LAST_WORDS_S, LAST_WORDS_S))
    if isinstance(message, Refused):
        raise message.error(connection.peer)
