"""Messages between processes: msgpack, in which token ids are bytes.

An engine's own process hears them over a socket (`engine/wire.py`), another node over HTTP
(`peer/messages.py`).
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from draftgate.backends.token_ids import TokenIds, from_bytes, to_bytes

Received = TypeVar("Received")


class Codec(Generic[Received]):
    """Makes bytes of any message, and messages of one kind of bytes."""

    def __init__(self, received: object) -> None:
        """Read messages of this type: a struct, or a union of structs."""
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_to_bytes)
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(
            received, dec_hook=_of_bytes
        )

    def encode(self, message: msgspec.Struct) -> bytes:
        """Return a message as bytes."""
        return self._encoder.encode(message)

    def decode(self, data: bytes) -> Received:
        """Return the message that these bytes are.

        Raises:
            ValueError: they are none.
        """
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"no message of this protocol: {error}") from None


def _to_bytes(ids: TokenIds) -> bytes:
    return to_bytes(ids)


def _of_bytes(_: type, data: Any) -> TokenIds:
    """Return token ids; a TypeError or ValueError says that these are none."""
    return from_bytes(data)
