"""Texts of single tokens, where they are the same wherever the token stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

_REPLACEMENT: Final = "\ufffd"

_LOCAL: Final = frozenset({"ByteLevel", "ByteFallback", "Fuse"})
"""Decoders (of the `tokenizers` library) that map bytes to bytes, token by token. Of bytes that are
no character `ByteFallback` gives up a whole run, which does not matter behind whole characters."""


class TokenTexts(dict[int, str | None]):
    """Text that a token adds behind whole characters, by id; None if that depends on others.

    A dictionary that fills itself: of a large vocabulary most tokens are never asked for.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        decoder: Mapping[str, Any] | None,
        anchor: Sequence[int],
    ) -> None:
        """Start empty.

        Args:
            decode: what the texts must agree with.
            decoder: as in `tokenizer.json`.
            anchor: tokens of whole characters: some decoders strip what stands at the start.
        """
        super().__init__()
        self._decode = decode
        self._anchor = tuple(anchor)
        self._before = len(decode(anchor))
        self._local = self._before > 0 and decoder is not None and _is_local(decoder)

    def __missing__(self, token_id: int) -> str | None:
        """Look a token up, once."""
        text: str | None = None
        if self._local:
            text = self._decode([*self._anchor, token_id])[self._before :]
            if _REPLACEMENT in text:
                text = None
        self[token_id] = text
        return text


def _is_local(decoder: Mapping[str, Any]) -> bool:
    """Return whether each token's text is its own, but for half characters and a start."""
    match decoder:
        case {"type": "Sequence", "decoders": parts}:
            return all(map(_is_local, parts))
        case {"type": "Replace", "pattern": {"String": pattern}}:
            return len(pattern) == 1
        case {"type": "Strip", "stop": stop}:
            return bool(stop == 0)
        case {"type": kind}:
            return kind in _LOCAL
    return False
