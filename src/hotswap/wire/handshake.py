"""Authenticated control connections: the handshake of ``auth`` driven over asyncio sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

from hotswap.errors import PeerUnreachable
from hotswap.wire.auth import CHALLENGE_BYTES, HELLO_BYTES, PROOF_BYTES, Acceptor, Initiator
from hotswap.wire.codec import Codec
from hotswap.wire.links import AsyncLink

PURPOSE = "control"


async def open_link(
    host: str, port: int, codec: Codec[Any], token: str, timeout_s: float, *, purpose: str = PURPOSE
) -> AsyncLink[Any]:
    """Connect to a numeric address and prove the token. PeerUnreachable within *timeout_s* seconds, or AuthError.

    The link ends when the peer's kernel leaves something unacknowledged for as long.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * timeout_s))
        return await asyncio.wait_for(_initiate(sock, (host, port), codec, token, purpose), timeout_s)
    except (OSError, asyncio.TimeoutError) as error:
        sock.close()
        raise PeerUnreachable(f"{host}:{port} cannot be reached: {str(error) or 'no answer in time'}") from None
    except BaseException:
        sock.close()
        raise


async def _initiate(
    sock: socket.socket, address: tuple[str, int], codec: Codec[Any], token: str, purpose: str
) -> AsyncLink[Any]:
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, address)
    _tune(sock)
    side = Initiator(token, purpose)
    await loop.sock_sendall(sock, side.hello())
    proof, keys = side.prove(await _exactly(sock, CHALLENGE_BYTES))
    await loop.sock_sendall(sock, proof)
    return AsyncLink(sock, codec, send_key=keys.send, receive_key=keys.receive)


async def accept_link(
    sock: socket.socket, codec: Codec[Any], token: str, timeout_s: float, *, purpose: str = PURPOSE
) -> AsyncLink[Any]:
    """Let the peer on an accepted socket prove the token. Raises as ``open_link``; the caller closes the socket then."""
    sock.setblocking(False)
    _tune(sock)
    try:
        return await asyncio.wait_for(_accept(sock, codec, token, purpose), timeout_s)
    except (OSError, asyncio.TimeoutError) as error:
        raise PeerUnreachable(f"handshake broken off: {str(error) or 'no answer in time'}") from None


async def _accept(sock: socket.socket, codec: Codec[Any], token: str, purpose: str) -> AsyncLink[Any]:
    loop = asyncio.get_running_loop()
    side = Acceptor(token, purpose)
    await loop.sock_sendall(sock, side.challenge(await _exactly(sock, HELLO_BYTES)))
    keys = side.verify(await _exactly(sock, PROOF_BYTES))
    return AsyncLink(sock, codec, send_key=keys.send, receive_key=keys.receive)


async def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < nbytes:
        more = await loop.sock_recv(sock, nbytes - len(data))
        if not more:
            raise PeerUnreachable("the peer closed the connection during the handshake; does it have another token?")
        data += more
    return data


def _tune(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
