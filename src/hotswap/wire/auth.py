"""Mutual proof that both ends of a connection know the job's token, without sending it. Bytes in, bytes out, no IO.

    initiator                              acceptor
        | -- hello: magic, its nonce --------> |
        | <-- challenge: its nonce, proof ---- |
        | -- proof --------------------------> |

Each proof is an HMAC over both nonces, the channel's purpose and the prover's role. So a recorded handshake proves
nothing to a peer with a fresh nonce, a proof cannot be reflected to its author, and one for the data channel is worth
nothing on the control channel. Both ends derive two keys, one for each direction, to authenticate what follows.

This authenticates; it does not encrypt. Whoever can read the network reads the state that crosses it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from dataclasses import dataclass, field

from hotswap.errors import AuthError, ProtocolError, UsageError

NONCE_BYTES = 32
PROOF_BYTES = 32
TOKEN_BYTES_MIN = 16
MAGIC = b"hotswap\x01"
HELLO_BYTES = len(MAGIC) + NONCE_BYTES
CHALLENGE_BYTES = NONCE_BYTES + PROOF_BYTES


@dataclass(frozen=True, kw_only=True)
class SessionKeys:
    """The keys of one connection, 32 bytes each: one side's ``send`` is the other's ``receive``."""

    send: bytes = field(repr=False)
    receive: bytes = field(repr=False)


class Initiator:
    """The side that opened the connection. Call ``hello``, then ``prove``; use an object once."""

    def __init__(self, token: str, purpose: str) -> None:
        """*purpose* names the channel, for example ``"control"``; both sides must agree on it."""
        self._secret = _secret(token)
        self._purpose = purpose
        self._nonce = os.urandom(NONCE_BYTES)

    def hello(self) -> bytes:
        """The first HELLO_BYTES bytes to send."""
        return MAGIC + self._nonce

    def prove(self, challenge: bytes) -> tuple[bytes, SessionKeys]:
        """Check the acceptor's CHALLENGE_BYTES bytes; the PROOF_BYTES bytes to send back, and the keys.

        AuthError: the acceptor does not know the token; close the connection and send nothing.
        """
        if len(challenge) != CHALLENGE_BYTES:
            raise ProtocolError(f"a challenge has {CHALLENGE_BYTES} bytes, not {len(challenge)}")
        transcript = _transcript(self._purpose, self._nonce, challenge[:NONCE_BYTES])
        _require(challenge[NONCE_BYTES:], _mac(self._secret, b"acceptor", transcript), self._purpose)
        return _mac(self._secret, b"initiator", transcript), _keys(self._secret, transcript, b"upward", b"downward")


class Acceptor:
    """The side that was connected to. Call ``challenge``, then ``verify``; use an object once."""

    def __init__(self, token: str, purpose: str) -> None:
        """As for the initiator."""
        self._secret = _secret(token)
        self._purpose = purpose
        self._nonce = os.urandom(NONCE_BYTES)
        self._transcript = b""

    def challenge(self, hello: bytes) -> bytes:
        """Answer to the initiator's HELLO_BYTES bytes. ProtocolError: not a hotswap peer of this protocol version."""
        if len(hello) != HELLO_BYTES or not hello.startswith(MAGIC):
            raise ProtocolError("the peer speaks another protocol or version of it: run the same hotswap on all nodes")
        assert not self._transcript, "an acceptor answers one hello only"
        self._transcript = _transcript(self._purpose, hello[len(MAGIC) :], self._nonce)
        return self._nonce + _mac(self._secret, b"acceptor", self._transcript)

    def verify(self, proof: bytes) -> SessionKeys:
        """Check the initiator's PROOF_BYTES bytes. AuthError: it does not know the token; close the connection."""
        assert self._transcript, "verify comes after challenge"
        _require(proof, _mac(self._secret, b"initiator", self._transcript), self._purpose)
        return _keys(self._secret, self._transcript, b"downward", b"upward")


def _secret(token: str) -> bytes:
    raw = token.encode()
    if len(raw) < TOKEN_BYTES_MIN:
        raise UsageError(f"the job's token has {len(raw)} bytes, use {TOKEN_BYTES_MIN} or more: secrets.token_hex(32)")
    return hashlib.sha256(b"hotswap token\0" + raw).digest()


def _transcript(purpose: str, initiator_nonce: bytes, acceptor_nonce: bytes) -> bytes:
    return MAGIC + initiator_nonce + acceptor_nonce + purpose.encode()


def _mac(secret: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret, role + b"\0" + transcript, "sha256")


def _keys(secret: bytes, transcript: bytes, send: bytes, receive: bytes) -> SessionKeys:
    return SessionKeys(send=_mac(secret, send, transcript), receive=_mac(secret, receive, transcript))


def _require(given: bytes, expected: bytes, purpose: str) -> None:
    if not hmac.compare_digest(given, expected):
        raise AuthError(f"the peer on the {purpose} channel does not know this job's token; is it of another job?")
