"""Links between two processes: an asyncio one for agents and the coordinator, a blocking one for workers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from hotswap.errors import PeerUnreachable
from hotswap.wire.codec import Codec
from hotswap.wire.frames import FrameReader, FrameWriter

T = TypeVar("T")
CHUNK = 256 * 1024
QUEUE_MAX = 100_000
FDS_MAX = 16
FLUSH_S = 2.0
"""How long the last words on a link may take to get away."""


class AsyncLink(Generic[T]):
    """One authenticated or private connection in an asyncio program. Sending never blocks; a stuck peer fills the queue and is cut off."""

    def __init__(
        self, sock: socket.socket, codec: Codec[Any], *, send_key: bytes | None = None, receive_key: bytes | None = None
    ) -> None:
        """*sock* is connected and becomes non-blocking; the link owns it."""
        sock.setblocking(False)
        self._sock = sock
        self._codec = codec
        self._writer = FrameWriter(send_key)
        self._reader = FrameReader(receive_key)
        self._inbox: deque[Any] = deque()
        self._outbox: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._sender: asyncio.Task[None] | None = None
        self._sending = False
        self._receiving = False
        self.closed = False

    def send(self, message: T, fds: Sequence[int] = ()) -> None:
        """Queue *message*; *fds* (unix sockets only) travel with it. Silently dropped once the link is closed: the reader reports that."""
        if self.closed:
            return
        if len(self._outbox) >= QUEUE_MAX:
            self.close()
            return
        self._outbox.append((self._writer.frame(self._codec.encode(message)), tuple(fds)))
        self._idle.clear()
        if self._sender is None:
            self._sending = True
            self._sender = asyncio.get_running_loop().create_task(self._drain())
        self._wake.set()

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while not self.closed:
                while self._outbox:
                    data, fds = self._outbox.popleft()
                    if fds:
                        await self._send_with_fds(data, fds)
                        continue
                    while self._outbox and not self._outbox[0][1] and len(data) < CHUNK:
                        data += self._outbox.popleft()[0]
                    await loop.sock_sendall(self._sock, data)
                self._idle.set()
                self._wake.clear()
                await self._wake.wait()
        except OSError:
            pass
        finally:
            self._idle.set()
            self._sending = False
            self.close()
            self._release()

    async def _send_with_fds(self, data: bytes, fds: tuple[int, ...]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sent = socket.send_fds(self._sock, [data], list(fds))
                break
            except (BlockingIOError, InterruptedError):
                await self._writable()
        await loop.sock_sendall(self._sock, data[sent:])

    async def _writable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_writer(self._sock, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_writer(self._sock)

    async def receive(self) -> T:
        """Next message; PeerUnreachable at the end of the connection, ProtocolError for anything that must not be obeyed."""
        while not self._inbox:
            data = await self._read()
            self._inbox.extend(self._codec.decode(payload) for payload in self._reader.feed(data))
        message: T = self._inbox.popleft()
        return message

    async def _read(self) -> bytes:
        if self.closed:
            raise PeerUnreachable("connection closed")
        self._receiving = True
        try:
            data, why = await asyncio.get_running_loop().sock_recv(self._sock, CHUNK), "closed by the peer"
        except OSError as error:
            data, why = b"", f"lost: {error}"
        finally:
            self._receiving = False
            self._release()
        if not data:
            self.close()
            raise PeerUnreachable(f"connection {why}")
        return data

    async def flush(self, timeout_s: float) -> None:
        """Wait until everything queued is with the kernel, at most *timeout_s* seconds."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)

    def close(self) -> None:
        """End the connection; what is queued is lost."""
        if self.closed:
            return
        self.closed = True
        self._wake.set()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._release()

    def _release(self) -> None:
        """Free the descriptor once the event loop watches it no longer: its number may be reused at once."""
        if self.closed and not self._sending and not self._receiving:
            self._sock.close()


class WorkerLink:
    """The worker's end of the socket pair to its agent. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket, codec: Codec[Any]) -> None:
        """*sock*: the connected unix stream socket the worker was started with."""
        sock.setblocking(True)
        self._sock = sock
        self._codec = codec
        self._writer = FrameWriter(None)
        self._reader = FrameReader(None)
        self._lock = threading.Lock()
        self._inbox: deque[Any] = deque()
        self.fds: deque[int] = deque()

    def send(self, message: Any) -> None:
        """Send *message*; PeerUnreachable when the agent is gone."""
        frame = self._codec.encode(message)
        try:
            with self._lock:
                self._sock.sendall(self._writer.frame(frame))
        except OSError as error:
            raise PeerUnreachable(f"this node's agent is gone: {error}") from None

    def receive(self) -> Any:
        """Next message; file descriptors that came along are appended to ``fds`` in order. PeerUnreachable when the agent is gone."""
        while not self._inbox:
            try:
                data, fds, _flags, _address = socket.recv_fds(self._sock, CHUNK, FDS_MAX)
            except OSError as error:
                raise PeerUnreachable(f"this node's agent is gone: {error}") from None
            self.fds.extend(fds)
            if not data:
                raise PeerUnreachable("this node's agent is gone")
            self._inbox.extend(self._codec.decode(payload) for payload in self._reader.feed(data))
        return self._inbox.popleft()

    def close(self) -> None:
        """Close the socket and any descriptor nobody took."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
