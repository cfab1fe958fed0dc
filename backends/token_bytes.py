"""The raw bytes of tokens.

A token may be a part of a character, so only its bytes describe it fully. The bytes of the tokens
of a text join to the text in UTF-8.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

_FALLBACK: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A token of a single byte, in vocabularies with byte fallback."""


def _byte_characters() -> Iterator[tuple[str, int]]:
    """Yield the character that stands for each byte in a byte-level vocabulary.

    Printable characters of Latin-1 stand for themselves, and the other bytes follow from U+0100 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = 0
    for byte in range(256):
        if byte in visible:
            yield chr(byte), byte
        else:
            yield chr(0x100 + others), byte
            others += 1


_BYTES: Final = dict(_byte_characters())


class TokenBytes(dict[int, bytes]):
    """The bytes that each token adds after other text, by id.

    A special token has the bytes of its text, and an unused id has none. Entries are computed on
    first use, because most tokens of a large vocabulary are never used.
    """

    def __init__(
        self,
        token: Callable[[int], str | None],
        decode: Callable[[Sequence[int]], str],
        decoder: Mapping[str, Any] | None,
        anchor: Sequence[int],
    ) -> None:
        """Start empty.

        Args:
            token: returns the entry of the vocabulary, or None for an unused id.
            decode: computes the text of tokens, including special tokens.
            decoder: settings of the decoder, as in `tokenizer.json`.
            anchor: tokens of complete characters to put before each token, because some decoders
                strip the start of a text.
        """
        super().__init__()
        self._token = token
        self._decode = decode
        self._anchor = tuple(anchor)
        self._before = decode(anchor)
        kinds = set(_kinds(decoder or {}))
        self._byte_level = "ByteLevel" in kinds
        self._falls_back = "ByteFallback" in kinds

    def __missing__(self, token_id: int) -> bytes:
        """Compute the bytes of a token, once."""
        found = self[token_id] = self._bytes(token_id)
        return found

    def name(self, token_id: int) -> str:
        """Return the text of a token, or for a part of a character its bytes as OpenAI writes them.

        The first bytes of the euro sign have the name `bytes:` with `xe2` and `x82`, each after a
        backslash.
        """
        found = self[token_id]
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + found.decode(errors="backslashreplace")

    def _bytes(self, token_id: int) -> bytes:
        token = self._token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            found = [_BYTES.get(character) for character in token]
            known = bytes(byte for byte in found if byte is not None)
            # The decoder leaves a token with any other character as it is.
            return known if len(known) == len(found) else token.encode()
        fallback = _FALLBACK.fullmatch(token) if self._falls_back else None
        if fallback is not None:
            return bytes.fromhex(fallback[1])
        text = self._decode([*self._anchor, token_id])
        if not self._before or not text.startswith(self._before):
            return self._decode([token_id]).encode()
        return text[len(self._before) :].encode()


def _kinds(decoder: Mapping[str, Any]) -> Iterator[str]:
    """Yield the types of a decoder and of its parts."""
    yield str(decoder.get("type"))
    for part in decoder.get("decoders", ()):
        yield from _kinds(part)
