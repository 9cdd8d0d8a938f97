"""The holder's side of the data channel: receives replicas into the vault, serves sections out of it."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from hotswap.errors import (
    AuthError,
    Fenced,
    HotswapError,
    IntegrityError,
    LayoutMismatch,
    PeerUnreachable,
    ProtocolError,
)
from hotswap.replication.channel import (
    INLINE_NBYTES_MAX,
    PURPOSE,
    Ack,
    Busy,
    Commit,
    Connection,
    Deadline,
    End,
    Fetch,
    Message,
    Offer,
    Oversize,
    Part,
    Push,
    Ready,
    Received,
    numeric_family,
    refusal,
)
from hotswap.replication.handles import Lease, ReplicaWriter
from hotswap.replication.sections import CHUNK_NBYTES, NotHeld, SectionId, require_equal
from hotswap.replication.vault import Vault
from hotswap.wire.auth import HELLO_BYTES, PROOF_BYTES, Acceptor


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Bounds on what peers can make a server do; times in seconds.

    ``transfers_max`` transfers at once, further ones are told Busy. ``progress_s`` without a byte ends a transfer: too
    short and a loaded peer is cut off, too long and a dead peer's unfinished replica occupies a buffer that long.
    """

    connections_max: int = 256
    transfers_max: int = 32
    handshake_s: float = 5.0
    progress_s: float = 10.0
    transfer_s: float = 3600.0
    idle_s: float = 3600.0


@dataclass(frozen=True, kw_only=True)
class TransferStats:
    """What a server has done so far; connections and transfers are those of now. ``refused`` counts by reason."""

    bytes_in: int
    bytes_out: int
    replicas: int
    connections: int
    transfers: int
    refused: dict[str, int] = field(default_factory=dict)


class TransferServer:
    """Serves one vault. One thread accepts, one serves each connection. The vault decides, this only moves bytes."""

    def __init__(
        self,
        vault: Vault,
        *,
        token: str,
        bind_host: str = "127.0.0.1",
        port: int = 0,
        limits: ServerLimits | None = None,
    ) -> None:
        """Listens from here on; *port* 0 takes a free one. UsageError if *bind_host* is not a numeric address."""
        self._vault = vault
        self._token = token
        self._limits = limits or ServerLimits()
        self._listener = socket.socket(numeric_family(bind_host), socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind((bind_host, port))
            self._listener.listen(128)
        except OSError:
            self._listener.close()
            raise
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._threads: dict[threading.Thread, Connection] = {}
        self._incoming: dict[int, _Incoming] = {}
        self._places = threading.BoundedSemaphore(self._limits.transfers_max)
        self._counts: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._acceptor = threading.Thread(target=self._accept, name="hotswap-transfer-accept", daemon=True)

    def start(self) -> None:
        """Accept connections."""
        self._acceptor.start()

    def close(self) -> None:
        """Stop listening, cut all connections and wait for their threads."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._acceptor.ident is not None:
            self._acceptor.join(self._limits.handshake_s)
        self._listener.close()
        with self._lock:
            open_now = dict(self._threads)
        for thread, connection in open_now.items():
            connection.interrupt()
            thread.join(self._limits.handshake_s)

    def stats(self) -> TransferStats:
        """Counts so far."""
        with self._lock:
            return TransferStats(
                bytes_in=self._counts["bytes_in"],
                bytes_out=self._counts["bytes_out"],
                replicas=self._counts["replicas"],
                connections=len(self._threads),
                transfers=self._counts["transfers"],
                refused=dict(self._refused),
            )

    # --- connections -------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, address = self._listener.accept()
            except OSError:
                # Out of descriptors or shut down; in the first case there will be some again.
                self._closed.wait(0.05)
                continue
            connection = Connection(sock, f"{address[0]}:{address[1]}")
            thread = threading.Thread(target=self._run, args=(connection,), name="hotswap-transfer", daemon=True)
            with self._lock:
                full = len(self._threads) >= self._limits.connections_max or self._closed.is_set()
                if not full:
                    self._threads[thread] = connection
            if full:
                self._refuse("connections")
                connection.close()
                continue
            thread.start()

    def _run(self, connection: Connection) -> None:
        try:
            self._authenticate(connection)
            while not self._closed.is_set():
                self._await_request(connection)
                self._answer(connection, connection.receive(Deadline(self._limits.idle_s, self._limits.idle_s)))
        except PeerUnreachable:
            pass
        except AuthError:
            self._refuse("auth")
        except Oversize:
            self._refuse("oversize")
        except ProtocolError:
            self._refuse("malformed")
        except _Broken:
            pass
        finally:
            self._abandon_transfers(connection)
            connection.close()
            with self._lock:
                del self._threads[threading.current_thread()]

    def _authenticate(self, connection: Connection) -> None:
        deadline = Deadline(self._limits.handshake_s, self._limits.handshake_s)
        side = Acceptor(self._token, PURPOSE)
        try:
            connection.send_raw(side.challenge(connection.receive_raw(HELLO_BYTES, deadline)), deadline)
            keys = side.verify(connection.receive_raw(PROOF_BYTES, deadline))
        except PeerUnreachable:
            # A peer of another job sees that this one does not know its token, and hangs up first.
            self._refuse("handshake")
            raise
        connection.authenticate(keys.send, keys.receive)

    def _await_request(self, connection: Connection) -> None:
        """An unused connection may be silent for long; one whose transfer makes no progress may not."""
        while not connection.readable(self._limits.progress_s):
            with self._lock:
                mine = [incoming for incoming in self._incoming.values() if incoming.connection is connection]
            if any(not incoming.active for incoming in mine):
                raise PeerUnreachable(f"{connection.peer} began a transfer and does not go on with it")

    def _answer(self, connection: Connection, request: Message) -> None:
        deadline = Deadline(self._limits.transfer_s, self._limits.progress_s)
        if isinstance(request, Push) and request.inline:
            self._receive_inline(connection, request, deadline)
        elif isinstance(request, Push):
            self._begin(connection, request, deadline)
        elif isinstance(request, Part):
            self._receive_part(connection, request, deadline)
        elif isinstance(request, Commit):
            self._commit(connection, request, deadline)
        elif isinstance(request, Fetch):
            self._serve(connection, request, deadline)
        else:
            raise ProtocolError(f"{connection.peer} sent {type(request).__name__}, which is not a request")

    # --- receiving ---------------------------------------------------------------------------------------------

    def _receive_inline(self, connection: Connection, push: Push, deadline: Deadline) -> None:
        section = push.section
        if section.unique_nbytes > INLINE_NBYTES_MAX:
            raise ProtocolError(f"{connection.peer} pushes {section.unique_nbytes} bytes at once: {section}")
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._place())
                writer = self._vault.begin_replica(section)
            except HotswapError as error:
                connection.drain(section.unique_nbytes, deadline)
                _expect_end(connection, deadline)
                self._send_refusal(connection, error, deadline)
                return
            stack.callback(writer.abandon)
            found = self._receive_bytes(connection, writer, 0, section.unique_nbytes, deadline)
            end = _expect_end(connection, deadline)
            with self._answering(connection, deadline):
                _require_intact(end, section)
                writer.commit(end.checksums, found)
                self._count("replicas", 1)
                connection.send(Ack(section=section), deadline)

    def _begin(self, connection: Connection, push: Push, deadline: Deadline) -> None:
        self._abandon_transfers(connection)
        with self._answering(connection, deadline):
            with contextlib.ExitStack() as stack:
                stack.enter_context(self._place())
                writer = self._vault.begin_replica(push.section)
                incoming = _Incoming(connection, writer, stack.pop_all())
            with self._lock:
                transfer = secrets.randbits(63)
                self._incoming[transfer] = incoming
            connection.send(Ready(transfer=transfer), deadline)

    def _receive_part(self, connection: Connection, part: Part, deadline: Deadline) -> None:
        with self._lock:
            incoming = self._incoming.get(part.transfer)
        if incoming is None:
            # Its bytes follow unasked, so the connection can't be used any further.
            self._send_refusal(connection, NotHeld("the transfer of this part has ended"), deadline)
            raise _Broken
        incoming.enter(connection, part)
        try:
            found = self._receive_bytes(connection, incoming.writer, part.offset, part.nbytes, deadline)
            end = _expect_end(connection, deadline)
            with self._answering(connection, deadline):
                section = incoming.writer.section
                _require_intact(end, section)
                where = f"received from {connection.peer}"
                require_equal(found, end.checksums, what=f"replica of {section}", where=where)
                incoming.received(part, found)
                connection.send(Received(offset=part.offset), deadline)
        finally:
            incoming.leave(connection)

    def _receive_bytes(
        self, connection: Connection, writer: ReplicaWriter, offset: int, nbytes: int, deadline: Deadline
    ) -> tuple[int, ...]:
        view = writer.view[offset : offset + nbytes]
        try:
            found = connection.receive_into(view, deadline, writer.require_alive)
        except Fenced as error:
            # The sender is in the middle of its bytes: answer, then hang up.
            self._send_refusal(connection, error, deadline)
            raise _Broken from None
        self._count("bytes_in", nbytes)
        return found

    def _commit(self, connection: Connection, commit: Commit, deadline: Deadline) -> None:
        with self._lock:
            incoming = self._incoming.get(commit.transfer)
        with self._answering(connection, deadline):
            if incoming is None or incoming.connection is not connection:
                raise NotHeld("this transfer has ended")
            try:
                sums = incoming.checksums()
                incoming.writer.commit(sums, sums)
                self._count("replicas", 1)
            finally:
                self._abandon_transfers(connection)
            connection.send(Ack(section=incoming.writer.section), deadline)

    def _abandon_transfers(self, connection: Connection) -> None:
        """The connection that began a transfer ends it; one of its other connections can't."""
        with self._lock:
            ended = [key for key, incoming in self._incoming.items() if incoming.connection is connection]
            incoming = [self._incoming.pop(key) for key in ended]
        for item in incoming:
            item.close()

    # --- serving -----------------------------------------------------------------------------------------------

    def _serve(self, connection: Connection, fetch: Fetch, deadline: Deadline) -> None:
        with (
            self._answering(connection, deadline),
            self._place(),
            self._vault.open(fetch.owner, fetch.step, fetch.kind) as lease,
        ):
            _require_range(fetch, lease)
            connection.send(Offer(section=lease.section), deadline)
            self._send_range(connection, lease, fetch, deadline)

    def _send_range(self, connection: Connection, lease: Lease, fetch: Fetch, deadline: Deadline) -> None:
        view = lease.view[fetch.offset : fetch.offset + fetch.nbytes]
        known = lease.checksums
        found = connection.send_file(lease.fd, lease.offset + fetch.offset, view, deadline, summing=known is None)
        if known is not None:
            # Those of the owner, so that the copy is checked against its origin and not against this memory.
            first = fetch.offset // CHUNK_NBYTES
            found = known[first : first - (-fetch.nbytes // CHUNK_NBYTES)]
        connection.send(End(checksums=found, intact=lease.intact), deadline)
        self._count("bytes_out", fetch.nbytes)

    # --- bookkeeping -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        if not self._places.acquire(blocking=False):
            raise Busy(f"{self._limits.transfers_max} transfers are going on")
        self._count("transfers", 1)
        try:
            yield
        finally:
            self._count("transfers", -1)
            self._places.release()

    @contextlib.contextmanager
    def _answering(self, connection: Connection, deadline: Deadline) -> Iterator[None]:
        """An error of the vault is told to the peer; one of the connection ends it."""
        try:
            yield
        except PeerUnreachable:
            raise
        except HotswapError as error:
            self._send_refusal(connection, error, deadline)

    def _send_refusal(self, connection: Connection, error: HotswapError, deadline: Deadline) -> None:
        answer = refusal(error)
        self._refuse(answer.reason.value)
        connection.send(answer, deadline)

    def _refuse(self, reason: str) -> None:
        with self._lock:
            self._refused[reason] += 1

    def _count(self, what: str, amount: int) -> None:
        with self._lock:
            self._counts[what] += amount


class _Broken(Exception):
    """The connection is out of step after a refusal that has been sent; hang up."""


class _Incoming:
    """A large replica that arrives in parts over several connections."""

    def __init__(self, connection: Connection, writer: ReplicaWriter, resources: contextlib.ExitStack) -> None:
        """*connection* began it and will commit it. *resources* are given back when nobody writes any more."""
        self.connection = connection
        self.writer = writer
        self._resources = resources
        self._lock = threading.Lock()
        self._closed = False
        self._active: set[Connection] = set()
        self._claimed: dict[int, int] = {}
        self._sums: dict[int, tuple[int, ...]] = {}

    def enter(self, connection: Connection, part: Part) -> None:
        """*connection* is about to write *part*. ProtocolError if it may not, or others have."""
        end = part.offset + part.nbytes
        inside = part.offset % CHUNK_NBYTES == 0 and 0 <= part.offset < end <= self.writer.section.unique_nbytes
        with self._lock:
            overlaps = any(part.offset < stop and start < end for start, stop in self._claimed.items())
            if self._closed or overlaps or not inside:
                raise ProtocolError(f"{connection.peer} sends bytes {part.offset} to {end} of {self.writer.section}")
            self._claimed[part.offset] = end
            self._active.add(connection)

    @property
    def active(self) -> bool:
        """Whether a part is on its way."""
        with self._lock:
            return bool(self._active)

    def received(self, part: Part, sums: tuple[int, ...]) -> None:
        """*part* is complete and has these checksums."""
        with self._lock:
            self._sums[part.offset] = sums

    def leave(self, connection: Connection) -> None:
        """*connection* writes no more."""
        with self._lock:
            self._active.discard(connection)
            last = self._closed and not self._active
        if last:
            self._release()

    def checksums(self) -> tuple[int, ...]:
        """Those of all parts in order. ProtocolError if the parts are not the whole."""
        position = 0
        found: list[int] = []
        with self._lock:
            for offset, sums in sorted(self._sums.items()):
                if offset == position:
                    position = self._claimed[offset]
                    found += sums
        if position != self.writer.section.unique_nbytes:
            raise ProtocolError(f"only {position} bytes of {self.writer.section} have come without a gap")
        return tuple(found)

    def close(self) -> None:
        """No more parts. Whoever is still sending one is cut off; the last of them gives the buffer back."""
        with self._lock:
            self._closed = True
            active = list(self._active)
        for connection in active:
            connection.interrupt()
        if not active:
            self._release()

    def _release(self) -> None:
        self.writer.abandon()
        self._resources.close()


def _expect_end(connection: Connection, deadline: Deadline) -> End:
    message = connection.receive(deadline)
    if not isinstance(message, End):
        raise ProtocolError(f"{connection.peer} sent {type(message).__name__} where a section ends")
    return message


def _require_intact(end: End, section: SectionId) -> None:
    if not end.intact:
        raise IntegrityError(f"the snapshot of {section} was overwritten by its worker while it was pushed")


def _require_range(fetch: Fetch, lease: Lease) -> None:
    if fetch.section_nbytes != lease.nbytes:
        raise LayoutMismatch(
            f"the {fetch.kind.value} section of {lease.section} has {lease.nbytes} bytes, not {fetch.section_nbytes}"
        )
    fits = fetch.offset % CHUNK_NBYTES == 0 and 0 <= fetch.offset <= fetch.offset + fetch.nbytes <= lease.nbytes
    if not fits:
        raise ProtocolError(f"{fetch.nbytes} bytes from {fetch.offset} on are no range of {lease.nbytes}")
