"""Finding and shutting the sockets of a library that offers no way to stop it."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

TCP_ESTABLISHED = 1
RETRANSMISSIONS_MAX = 4
"""So many in a row that nobody acknowledges take about three seconds."""
SockAddr = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class SocketId:
    """A descriptor together with the inode behind it: descriptor numbers are reused, the pair is not."""

    fd: int
    inode: str


@dataclass(frozen=True, kw_only=True)
class TcpSocket:
    """An open TCP socket of this process."""

    id: SocketId
    local: SockAddr
    remote: SockAddr | None
    """None for a listener or an unconnected socket."""
    listening: bool


def open_tcp_sockets() -> list[TcpSocket]:
    """All TCP sockets that this process has open now."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        inode = _inode(int(name))
        if inode is not None:
            with _borrowed(SocketId(fd=int(name), inode=inode)) as sock:
                if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
                    found.append(_describe(SocketId(fd=int(name), inode=inode), sock))
    return [tcp for tcp in found if tcp is not None]


def is_established(socket_id: SocketId) -> bool:
    """Whether it is still the same socket and both directions are open."""
    with _borrowed(socket_id) as sock:
        if sock is None:
            return False
        try:
            return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_ESTABLISHED
        except OSError:
            return False


def is_unanswered(socket_id: SocketId) -> bool:
    """Whether the peer's kernel has not acknowledged something for seconds: not a peer that is slow, but a network that is cut."""
    with _borrowed(socket_id) as sock:
        try:
            return (
                sock is not None and sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 3)[2] >= RETRANSMISSIONS_MAX
            )
        except OSError:
            return False


def shut_for_reading(socket_id: SocketId) -> bool:
    """End a connection so that its owner sees end-of-file; False if it is gone already.

    Only for reading: a writer that gets EPIPE leaves its operation queued in gloo and is never woken.
    Never a listener: gloo terminates the process when its listener fails.
    """
    with _borrowed(socket_id) as sock:
        if sock is None or sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        try:
            sock.shutdown(socket.SHUT_RD)
        except OSError:
            return False
        return True


def packed_address(address: SockAddr) -> bytes:
    """The bytes that a ``sockaddr`` of this address has in memory (without what follows the address)."""
    ip = ipaddress.ip_address(address[0])
    if ip.version == 4:
        return struct.pack("=H", socket.AF_INET) + struct.pack("!H", address[1]) + ip.packed
    return struct.pack("=H", socket.AF_INET6) + struct.pack("!HI", address[1], 0) + ip.packed


def _inode(fd: int) -> str | None:
    try:
        target = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return None
    return target if target.startswith("socket:") else None


@contextlib.contextmanager
def _borrowed(socket_id: SocketId) -> Iterator[socket.socket | None]:
    """A second handle on the socket, or None if the descriptor has been closed or reused since."""
    try:
        copy = os.dup(socket_id.fd)
    except OSError:
        yield None
        return
    # Compared after the dup, so that the socket that is used is the one that was compared.
    if _inode(copy) != socket_id.inode:
        os.close(copy)
        yield None
        return
    with contextlib.closing(socket.socket(fileno=copy)) as sock:
        yield sock


def _describe(socket_id: SocketId, sock: socket.socket) -> TcpSocket | None:
    if sock.type != socket.SOCK_STREAM:
        return None
    try:
        local = sock.getsockname()
        listening = bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return None
    try:
        peer = sock.getpeername()
    except OSError:
        return TcpSocket(id=socket_id, local=(local[0], local[1]), remote=None, listening=listening)
    return TcpSocket(id=socket_id, local=(local[0], local[1]), remote=(peer[0], peer[1]), listening=listening)
