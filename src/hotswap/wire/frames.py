"""Frames on a byte stream: ``length (4) | payload | MAC (16, on authenticated links)``.

The MAC covers the direction's frame counter, so frames cannot be forged, replayed, dropped or reordered unnoticed.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterator

from hotswap.errors import AuthError, ProtocolError

FRAME_BYTES_MAX = 32 * 1024 * 1024
MAC_BYTES = 16
_LENGTH = struct.Struct("!I")
_COUNTER = struct.Struct("!Q")


class FrameWriter:
    """Turns payloads into frames of one direction of one link."""

    def __init__(self, key: bytes | None) -> None:
        """*key*: the direction's session key; None on a link that only its two processes can reach."""
        self._key = key
        self._count = 0

    def frame(self, payload: bytes) -> bytes:
        """One frame; ProtocolError if the payload is larger than any peer would accept."""
        if len(payload) > FRAME_BYTES_MAX:
            raise ProtocolError(f"message of {len(payload)} bytes is larger than the limit of {FRAME_BYTES_MAX}")
        head = _LENGTH.pack(len(payload))
        mac = b"" if self._key is None else _mac(self._key, self._count, payload)
        self._count += 1
        return b"".join((head, payload, mac))


class FrameReader:
    """Collects bytes of one direction of one link and yields whole, genuine payloads."""

    def __init__(self, key: bytes | None) -> None:
        """*key*: as for the writer at the other end."""
        self._key = key
        self._count = 0
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Payloads completed by *data*. ProtocolError or AuthError: close the link, nothing after it can be trusted."""
        self._buffer += data
        trailer = 0 if self._key is None else MAC_BYTES
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > FRAME_BYTES_MAX:
                raise ProtocolError(f"the peer announces a frame of {length} bytes; the limit is {FRAME_BYTES_MAX}")
            end = _LENGTH.size + length
            if len(self._buffer) < end + trailer:
                return
            payload = bytes(self._buffer[_LENGTH.size : end])
            mac = bytes(self._buffer[end : end + trailer])
            del self._buffer[: end + trailer]
            if self._key is not None and not hmac.compare_digest(mac, _mac(self._key, self._count, payload)):
                raise AuthError("a frame's authentication code is wrong: it was altered, or the peer has another key")
            self._count += 1
            yield payload


def _mac(key: bytes, count: int, payload: bytes) -> bytes:
    digest = hashlib.blake2b(payload, key=key[:64], digest_size=MAC_BYTES, salt=_COUNTER.pack(count).ljust(16, b"\0"))
    return digest.digest()
