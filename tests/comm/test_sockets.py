from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from hotswap.comm import sockets
from hotswap.comm.sockets import SocketId, TcpSocket


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket, socket.socket]]:
    """A listener and both ends of a connection to it."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        server, _ = listener.accept()
        with server:
            yield listener, client, server


def _found(sock: socket.socket) -> TcpSocket:
    (found,) = (tcp for tcp in sockets.open_tcp_sockets() if tcp.id.fd == sock.fileno())
    return found


def test_open_sockets_are_described(pair: tuple[socket.socket, socket.socket, socket.socket]) -> None:
    listener, client, server = map(_found, pair)
    assert listener.listening
    assert listener.remote is None
    assert client.remote == listener.local == server.local
    assert server.remote == client.local
    assert not client.listening
    with socket.socket(socket.AF_UNIX) as other, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagram:
        assert not {other.fileno(), datagram.fileno()} & {tcp.id.fd for tcp in sockets.open_tcp_sockets()}


def test_shutting_ends_the_connection_for_its_owner(pair: tuple[socket.socket, socket.socket, socket.socket]) -> None:
    _, client, server = pair
    client_id = _found(client).id
    assert sockets.is_established(client_id)
    assert sockets.shut_for_reading(client_id)
    assert client.recv(1) == b""
    server.close()
    assert not sockets.is_established(client_id)


def test_a_peer_that_does_not_read_has_a_host_that_answers(
    pair: tuple[socket.socket, socket.socket, socket.socket],
) -> None:
    listener, client, _ = pair
    client.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            client.send(bytes(1 << 20))
    assert not sockets.is_unanswered(_found(client).id)
    assert not sockets.is_unanswered(_found(listener).id)
    assert not sockets.is_unanswered(SocketId(fd=10**6, inode="gone"))


def test_a_listener_is_never_shut(pair: tuple[socket.socket, socket.socket, socket.socket]) -> None:
    listener, *_ = pair
    assert not sockets.shut_for_reading(_found(listener).id)
    with socket.create_connection(listener.getsockname()):
        listener.accept()[0].close()


def test_a_reused_descriptor_is_left_alone(pair: tuple[socket.socket, socket.socket, socket.socket]) -> None:
    listener, client, _ = pair
    old = _found(client).id
    with socket.create_connection(listener.getsockname()) as other, listener.accept()[0]:
        os.dup2(other.fileno(), old.fd)
        assert not sockets.shut_for_reading(old)
        assert not sockets.is_established(old)
        assert sockets.is_established(_found(other).id)
    missing = SocketId(fd=999_999, inode="socket:[1]")
    assert not sockets.shut_for_reading(missing)
    assert not sockets.is_established(missing)


@pytest.mark.parametrize(
    ("address", "packed"),
    [
        (("127.0.0.1", 258), b"\x02\x00\x01\x02\x7f\x00\x00\x01"),
        (("::1", 258), b"\x0a\x00\x01\x02" + bytes(4) + bytes(15) + b"\x01"),
    ],
)
def test_addresses_are_packed_as_the_kernel_does(address: tuple[str, int], packed: bytes) -> None:
    assert sockets.packed_address(address) == packed
