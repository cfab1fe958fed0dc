"""What a simulated model "says": tokens that depend on nothing but their place.

The token at a position is a hash of prompt, seed, choice and position. Drafts, batch, preemption
and worker have no part in it, so simulated text is as independent of every decision as real text.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from hashlib import blake2b
from typing import Final

from backends.core.sequence import Sequence
from backends.tokenizer import Tokenizer

TOKEN, AGREEMENT = b"token", b"agree"
_UNIT: Final = 2.0**-64


class Truth:
    """The token streams of all sequences. Keeps one hash state per sequence; pure otherwise."""

    def __init__(self, vocabulary: Iterable[int]) -> None:
        """Draw tokens from `vocabulary`, at least two token ids."""
        self._vocabulary = tuple(vocabulary)
        self._prefixes: dict[int, bytes] = {}  # by sequence key

    def token(self, sequence: Sequence, position: int) -> int:
        """Return the sequence's token at an absolute position behind its prompt."""
        return self._vocabulary[self._index(sequence, position)]

    def another_token(self, sequence: Sequence, position: int) -> int:
        """Return a token that is not the one at the position."""
        return self._vocabulary[(self._index(sequence, position) + 1) % len(self._vocabulary)]

    def uniform(self, sequence: Sequence, position: int) -> float:
        """Return a number in [0, 1) for the position, independent of the token there."""
        return self._hash(sequence, position, AGREEMENT) * _UNIT

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept for the sequence. Idempotent."""
        self._prefixes.pop(sequence.key, None)

    def _index(self, sequence: Sequence, position: int) -> int:
        return self._hash(sequence, position, TOKEN) % len(self._vocabulary)

    def _hash(self, sequence: Sequence, position: int, purpose: bytes) -> int:
        data = self._prefix(sequence) + struct.pack("<q", position)
        digest = blake2b(data, digest_size=8, person=purpose).digest()
        return int.from_bytes(digest, "little")

    def _prefix(self, sequence: Sequence) -> bytes:
        prefix = self._prefixes.get(sequence.key)
        if prefix is None:
            request = sequence.request
            prompt = struct.pack(f"<{len(request.prompt_ids)}q", *request.prompt_ids)
            seed = request.sampling.seed & 0xFFFF_FFFF_FFFF_FFFF
            prefix = blake2b(prompt, digest_size=16).digest()
            prefix += struct.pack("<QI", seed, sequence.choice)
            self._prefixes[sequence.key] = prefix
        return prefix


def printable_vocabulary(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of tokens that are plain text by themselves, specials excluded."""
    special = {"eos_token", "bos_token", "pad_token", "unk_token"}
    excluded = {tokenizer.special_id(name) for name in special}
    return [
        token
        for token in range(tokenizer.vocab_size)
        if token not in excluded and _is_text(tokenizer.decode([token]))
    ]


def _is_text(text: str) -> bool:
    return bool(text) and text.isascii() and text.isprintable()
