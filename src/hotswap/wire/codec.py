"""Messages to bytes and back: typed, versioned, strict. Only the types a codec was made with can come out of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import msgspec

from hotswap.errors import ProtocolError

VERSION = 1

T = TypeVar("T")
_ENVELOPE: msgspec.msgpack.Decoder[tuple[int, str, msgspec.Raw]] = msgspec.msgpack.Decoder(tuple[int, str, msgspec.Raw])


class Codec(Generic[T]):
    """Encodes and decodes a closed set of dataclasses as ``[version, type name, body]`` in msgpack."""

    def __init__(self, types: Iterable[type[T]]) -> None:
        """*types*: every message this side accepts or sends; class names must be distinct."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {}
        for kind in types:
            assert kind.__name__ not in self._decoders, f"two messages named {kind.__name__}"
            self._decoders[kind.__name__] = msgspec.msgpack.Decoder(kind)

    def encode(self, message: T) -> bytes:
        """Bytes of one message."""
        name = type(message).__name__
        assert name in self._decoders, f"{name} is not a message of this channel"
        return self._encoder.encode((VERSION, name, message))

    def decode(self, data: bytes | bytearray | memoryview) -> T:
        """The message in *data*; ProtocolError for anything else than a whole, known, well-typed message."""
        try:
            version, name, body = _ENVELOPE.decode(data)
            if version != VERSION:
                raise ProtocolError(
                    f"the peer speaks protocol version {version}, this side {VERSION}: run the same hotswap on all nodes"
                )
            decoder = self._decoders.get(name)
            if decoder is None:
                raise ProtocolError(f"message type {name!r} does not belong on this channel")
            message: T = decoder.decode(body)
            return message
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError, AssertionError) as error:
            raise ProtocolError(f"malformed message: {error}") from None
