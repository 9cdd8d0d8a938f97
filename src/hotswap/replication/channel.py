"""One connection between two agents' memories: its messages, its deadlines, and bytes moved without copying them.

    pusher                        holder          fetcher                  source
      | Push(inline), bytes, End -> |               | Fetch --------------> |
      | <------------------- Acked  |               | <- Offer, bytes, End  |

      | Push -----------------------> |   a large section is cut into parts,
      | <------------- Ready(transfer)|   each on a connection of its own
      | Part(transfer), bytes, End -> |
      | <------------------- Received |
      | Commit(transfer) -----------> |
      | <---------------------- Acked |

Messages are authenticated frames; the bytes between them are not, but their checksums in ``End`` are. A checksum finds
accidents, not an attacker on the path: like all state on this channel, bytes are neither secret nor forgery-proof.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, get_args

from hotswap.core.types import Slot, Step
from hotswap.errors import Fenced, HotswapError, IntegrityError, PeerFault, PeerUnreachable, ProtocolError, UsageError
from hotswap.replication.crc import crc32
from hotswap.replication.sections import CHUNK_NBYTES, NotHeld, SectionId, SectionKind
from hotswap.wire.codec import Codec
from hotswap.wire.frames import MAC_BYTES, FrameReader, FrameWriter

PURPOSE = "data"
HEADER_BYTES_MAX = 1024 * 1024
INLINE_NBYTES_MAX = CHUNK_NBYTES
"""Up to here a push sends its bytes unasked and needs one round trip only; a refusing holder has to read them away."""
PIECE_NBYTES = 512 * 1024
_LENGTH = struct.Struct("!I")


class Busy(PeerFault):
    """The peer has as many transfers going on as it allows. Nothing is wrong; ask again."""


class ConnectionLost(PeerUnreachable):
    """The peer ended the connection, or its host did; with a new connection it may be reached again."""


class Oversize(ProtocolError):
    """A header longer than any hotswap peer sends."""


class Reason(str, Enum):
    """Why a request was refused."""

    BUSY = "busy"
    FENCED = "fenced"
    CORRUPT = "corrupt"
    NOT_HELD = "not_held"
    MEMORY = "memory"
    MALFORMED = "malformed"


_ERRORS: dict[Reason, type[HotswapError]] = {
    Reason.BUSY: Busy,
    Reason.FENCED: Fenced,
    Reason.CORRUPT: IntegrityError,
    Reason.NOT_HELD: NotHeld,
    Reason.MEMORY: UsageError,
    Reason.MALFORMED: ProtocolError,
}


@dataclass(frozen=True, kw_only=True)
class Push:
    """Here comes a unique section. ``inline``: its bytes and End follow at once; else wait for Ready."""

    section: SectionId
    inline: bool


@dataclass(frozen=True, kw_only=True)
class Ready:
    """Send the parts of this transfer."""

    transfer: int


@dataclass(frozen=True, kw_only=True)
class Part:
    """``nbytes`` bytes of the section from ``offset`` on, and End, follow. ``offset`` is a multiple of CHUNK_NBYTES."""

    transfer: int
    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class End:
    """Checksums of the chunks that were sent. ``intact``: False if the source was overwritten meanwhile."""

    checksums: tuple[int, ...]
    intact: bool = True


@dataclass(frozen=True, kw_only=True)
class Received:
    """The part has arrived as it was sent."""

    offset: int


@dataclass(frozen=True, kw_only=True)
class Commit:
    """All parts were acknowledged: make the replica visible."""

    transfer: int


@dataclass(frozen=True, kw_only=True)
class Ack:
    """The replica of this section is whole, checked and visible at the holder."""

    section: SectionId


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """Asks for ``nbytes`` bytes from ``offset`` on of a section that must have ``section_nbytes`` bytes in all."""

    owner: Slot
    step: Step
    kind: SectionKind
    section_nbytes: int
    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Offer:
    """The bytes asked for, and End, follow. They belong to this version."""

    section: SectionId


@dataclass(frozen=True, kw_only=True)
class Refused:
    """No, and why."""

    reason: Reason
    detail: str

    def error(self, peer: str) -> HotswapError:
        """As the exception the asking side raises."""
        return _ERRORS[self.reason](f"{peer}: {self.detail}")


def refusal(error: HotswapError) -> Refused:
    """An error of the answering side as the answer that makes the asking side raise the same."""
    reason = next((reason for reason, kind in _ERRORS.items() if isinstance(error, kind)), Reason.MALFORMED)
    return Refused(reason=reason, detail=str(error))


Request = Push | Part | Commit | Fetch
Message = Request | Ready | End | Received | Ack | Offer | Refused
_CODEC: Codec[Any] = Codec(get_args(Message))


class Deadline:
    """Two limits at once: for the whole of something, and for each step of progress within it. Seconds."""

    def __init__(self, total_s: float, progress_s: float) -> None:
        """Starts now."""
        self._end = time.monotonic() + total_s
        self._total_s = total_s
        self._progress_s = progress_s

    @property
    def left_s(self) -> float:
        """Seconds until the end; negative after it."""
        return self._end - time.monotonic()

    def next_s(self, peer: str) -> float:
        """How long the next operation may wait. PeerUnreachable if the time is up."""
        left = self.left_s
        if left <= 0:
            raise PeerUnreachable(f"{peer} was not done within {self._total_s:g} s")
        return min(left, self._progress_s)


class Connection:
    """A connected, blocking socket. One thread uses it at a time; ``interrupt`` may come from any thread.

    PeerUnreachable from every operation when the peer is gone or makes no progress within the deadline.
    """

    def __init__(self, sock: socket.socket, peer: str) -> None:
        """Owns *sock*; *peer* names the other end in messages."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _keep_alive(sock)
        self.peer = peer
        self._sock = sock
        self._lock = threading.Lock()
        self._closed = False
        self._writer = FrameWriter(None)
        self._reader = FrameReader(None)

    def authenticate(self, send_key: bytes, receive_key: bytes) -> None:
        """From here on every message carries a code that only the two ends can make."""
        self._writer = FrameWriter(send_key)
        self._reader = FrameReader(receive_key)

    def interrupt(self) -> None:
        """Make whatever the connection's thread is waiting for fail now. The connection is of no more use."""
        with self._lock:
            if not self._closed:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        with self._lock:
            self._closed = True
            self._sock.close()

    @property
    def quiet(self) -> bool:
        """Whether an unused connection is as it should be: open, and nothing to read."""
        return not self.readable(0.0)

    def readable(self, timeout_s: float) -> bool:
        """Whether there is something to read, or the connection has ended, within *timeout_s* seconds."""
        poller = select.poll()
        poller.register(self._sock.fileno(), select.POLLIN)
        return bool(poller.poll(timeout_s * 1000))

    # --- messages ----------------------------------------------------------------------------------------------

    def send(self, message: Message, deadline: Deadline) -> None:
        """Send one message."""
        self.send_raw(self._writer.frame(_CODEC.encode(message)), deadline)

    def receive(self, deadline: Deadline) -> Message:
        """Next message. ProtocolError or AuthError for anything else: close the connection then."""
        head = self.receive_raw(_LENGTH.size, deadline)
        (length,) = _LENGTH.unpack(head)
        if length > HEADER_BYTES_MAX:
            raise Oversize(f"{self.peer} announces a header of {length} bytes; the limit is {HEADER_BYTES_MAX}")
        rest = self.receive_raw(length + MAC_BYTES, deadline)
        (payload,) = self._reader.feed(head + rest)
        message: Message = _CODEC.decode(payload)
        return message

    def send_raw(self, data: bytes, deadline: Deadline) -> None:
        """Send *data* as it is."""
        view = memoryview(data)
        while view:
            with self._mapped():
                self._sock.settimeout(deadline.next_s(self.peer))
                view = view[self._sock.send(view) :]

    def receive_raw(self, nbytes: int, deadline: Deadline) -> bytes:
        """Exactly *nbytes* bytes."""
        data = bytearray(nbytes)
        self._fill(memoryview(data), deadline)
        return bytes(data)

    # --- sections ----------------------------------------------------------------------------------------------

    def send_file(
        self,
        fd: int,
        offset: int,
        view: memoryview,
        deadline: Deadline,
        *,
        summing: bool = True,
        on_piece: Callable[[int], None] = lambda nbytes: None,
    ) -> tuple[int, ...]:
        """Send the bytes of *view*, which lie at *offset* in *fd*, from the page cache; their checksums if *summing*.

        *on_piece* is told the length of each piece when the kernel has taken it.
        """
        summer = Summer()
        for start in range(0, len(view), PIECE_NBYTES):
            piece = view[start : start + PIECE_NBYTES]
            self._send_piece(fd, offset + start, len(piece), deadline)
            # Summed while the kernel sends what it has just been given.
            if summing:
                summer.add(piece)
            on_piece(len(piece))
        return summer.result()

    def _send_piece(self, fd: int, offset: int, nbytes: int, deadline: Deadline) -> None:
        sent = 0
        while sent < nbytes:
            with self._mapped():
                try:
                    sent += os.sendfile(self._sock.fileno(), fd, offset + sent, nbytes - sent)
                except BlockingIOError:
                    self._wait_writable(deadline.next_s(self.peer))

    def _wait_writable(self, timeout_s: float) -> None:
        poller = select.poll()
        poller.register(self._sock.fileno(), select.POLLOUT)
        if not poller.poll(timeout_s * 1000):
            raise TimeoutError(f"took nothing for {timeout_s:g} s")

    def receive_into(
        self, view: memoryview, deadline: Deadline, check: Callable[[], None] = lambda: None
    ) -> tuple[int, ...]:
        """Fill *view*; the checksums of what arrived. *check* is called now and then and may raise to stop it."""
        summer = Summer()
        for start in range(0, len(view), PIECE_NBYTES):
            piece = view[start : start + PIECE_NBYTES]
            self._fill(piece, deadline)
            # Summed while it is still in the processor's cache.
            summer.add(piece)
            check()
        return summer.result()

    def drain(self, nbytes: int, deadline: Deadline) -> None:
        """Read *nbytes* bytes away."""
        scratch = memoryview(bytearray(min(nbytes, PIECE_NBYTES)))
        while nbytes:
            part = scratch[: min(nbytes, PIECE_NBYTES)]
            self._fill(part, deadline)
            nbytes -= len(part)

    def _fill(self, view: memoryview, deadline: Deadline) -> None:
        while view:
            with self._mapped():
                self._sock.settimeout(deadline.next_s(self.peer))
                got = self._sock.recv_into(view)
            if not got:
                raise ConnectionLost(f"{self.peer} closed the connection")
            view = view[got:]

    @contextlib.contextmanager
    def _mapped(self) -> Iterator[None]:
        """Foreign exceptions become ours here and nowhere else."""
        try:
            yield
        except TimeoutError as error:
            raise PeerUnreachable(f"{self.peer} made no progress: {error}") from None
        except OSError as error:
            raise ConnectionLost(f"{self.peer}: connection lost: {error}") from None


class Summer:
    """Checksums of chunks, from pieces that divide them."""

    def __init__(self) -> None:
        """Nothing summed."""
        self._done: list[int] = []
        self._sum = 0
        self._nbytes = 0

    def add(self, piece: memoryview) -> None:
        """The next bytes, at most PIECE_NBYTES of them."""
        self._sum = crc32(piece, self._sum)
        self._nbytes += len(piece)
        if self._nbytes >= CHUNK_NBYTES:
            self._next_chunk()

    def _next_chunk(self) -> None:
        self._done.append(self._sum)
        self._sum = self._nbytes = 0

    def result(self) -> tuple[int, ...]:
        """One checksum for each chunk."""
        if self._nbytes:
            self._next_chunk()
        return tuple(self._done)


def numeric_family(host: str) -> socket.AddressFamily:
    """Address family of a numeric address. UsageError for a name: no name server, slow or gone, may matter."""
    try:
        return socket.AF_INET6 if isinstance(ipaddress.ip_address(host), ipaddress.IPv6Address) else socket.AF_INET
    except ValueError:
        raise UsageError(f"{host!r} is not a numeric address; the data channel never asks a name server") from None


def _keep_alive(sock: socket.socket) -> None:
    """So that an idle connection to a host that vanished without a word ends within half a minute."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
