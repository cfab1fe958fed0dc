"""A lower bound of the tokens of a text, from its bytes and the longest token.

The bound needs no tokenising. It holds for tokenizers that keep every byte of a text: byte-level
BPE, and BPE with a fallback to bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel

COMPOSED_BYTES: Final = 3
"""The factor by which NFC shortens a text at most, in UTF-8. Three Hangul jamos of 3 bytes each
become one syllable of 3 bytes."""

_LOSSLESS_SPLITS: Final = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"})
"""Pre-tokenizers that keep every character, unless their behaviour is `Removed`."""


@dataclass(frozen=True, slots=True)
class TokenBound:
    """The longest token of a tokenizer.

    Attributes:
        token_bytes: maximum bytes of the text of one token.
        composes: whether the tokenizer first composes characters (NFC).
    """

    token_bytes: int
    composes: bool

    @property
    def most_bytes(self) -> int:
        """Maximum bytes of a text for each of its tokens."""
        return self.token_bytes * (COMPOSED_BYTES if self.composes else 1)

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that a text has at least."""
        size = len(text.encode("utf-8", "surrogatepass"))
        return -(-size // (self.token_bytes if text.isascii() else self.most_bytes))


def token_bound(fast: Tokenizer, vocabulary: Mapping[str, int]) -> TokenBound | None:
    """Return the bound of a tokenizer, or None if its tokens may omit parts of a text."""
    added = fast.get_added_tokens_decoder().values()
    if fast.truncation is not None or any(token.lstrip or token.rstrip for token in added):
        return None
    splits = parts_of(fast.pre_tokenizer, "pretokenizers")
    normalizers = parts_of(fast.normalizer, "normalizers")
    if not all(map(_keeps_characters, splits)) or not all(map(_keeps_bytes, normalizers)):
        return None
    byte_level = any(split["type"] == "ByteLevel" for split in splits)
    if not isinstance(fast.model, models.BPE):
        return None
    if byte_level:
        bytes_of_all = set(ByteLevel.alphabet())
    elif fast.model.byte_fallback:
        bytes_of_all = {f"<0x{byte:02X}>" for byte in range(256)}
    else:
        return None
    if not bytes_of_all <= vocabulary.keys():
        return None
    whole = {token.content for token in added}
    longest = max(
        len(token) if byte_level and token not in whole else len(token.encode())
        for token in vocabulary
    )
    return TokenBound(longest, any(part["type"] == "NFC" for part in normalizers))


def parts_of(component: Any, key: str) -> list[dict[str, Any]]:
    """Return the settings of a component, or of each part of a sequence."""
    if component is None:
        return []
    settings: dict[str, Any] = json.loads(component.__getstate__())
    found: list[dict[str, Any]] = settings[key] if settings["type"] == "Sequence" else [settings]
    return found


def _keeps_characters(split: Mapping[str, Any]) -> bool:
    return split["type"] in _LOSSLESS_SPLITS and split.get("behavior") != "Removed"


def _keeps_bytes(normalizer: Mapping[str, Any]) -> bool:
    """Return whether a normalizer never shortens a text, except for NFC."""
    match normalizer:
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
            return len(content.encode()) >= len(pattern.encode())
        case {"type": "NFC" | "Prepend"}:
            return True
    return False
