"""What a simulated model "says": tokens that depend on nothing but their place.

The tokens of a sequence are a stretch of one long cycle of random tokens; where it begins is a hash
of the prompt's latest tokens, seed and choice. Drafts, batch, preemption and worker have no part in
it, so simulated text is as independent of every decision as real text. Looking a token up costs
next to nothing, as millions are in a large simulation.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
from functools import cache
from hashlib import blake2b
from random import Random
from typing import Final, TypeVar

from draftgate.backends.core.sequence import Sequence
from draftgate.backends.tokenizer import Tokenizer

T = TypeVar("T")

CYCLE: Final = 1 << 16
"""Tokens of the cycle. Of a hundred sequences some two begin within 100 tokens of each other, so
parts of their texts are alike; nothing follows from that, as caches know tokens by all before."""

LONGEST_LOOK: Final = 128
"""Most tokens that are looked up at once: more than the longest draft."""


class Truth:
    """The token streams of all sequences. Keeps one number per sequence; pure otherwise."""

    def __init__(self, vocabulary: Iterable[int]) -> None:
        """Draw tokens from `vocabulary`, at least two token ids."""
        self._tokens, self._others, self._uniforms = _cycles(tuple(vocabulary))
        self._offsets: dict[int, int] = {}  # by sequence key

    def tokens(self, sequence: Sequence, position: int, count: int = 1) -> tuple[int, ...]:
        """Return the sequence's tokens from an absolute position behind its prompt on.

        Args:
            count: at most `LONGEST_LOOK`.
        """
        at = self._at(sequence, position)
        return self._tokens[at : at + count]

    def draft(self, sequence: Sequence, position: int, right: int, count: int) -> tuple[int, ...]:
        """Return so many tokens from a position on, of which the first `right` are the true ones.

        All the others are wrong.
        """
        at = self._at(sequence, position)
        return self._tokens[at : at + right] + self._others[at + right : at + count]

    def uniforms(self, sequence: Sequence, position: int, count: int) -> tuple[float, ...]:
        """Return numbers in [0, 1) for positions, independent of the tokens there."""
        at = self._at(sequence, position)
        return self._uniforms[at : at + count]

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept for the sequence. Idempotent."""
        self._offsets.pop(sequence.key, None)

    def _at(self, sequence: Sequence, position: int) -> int:
        try:
            offset = self._offsets[sequence.key]
        except KeyError:
            offset = self._offsets[sequence.key] = _hash(sequence)
        return (offset + position) % CYCLE


@cache
def _cycles(
    vocabulary: tuple[int, ...],
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
    """Return the cycles of true tokens, of others that differ from them, and of uniforms."""
    random = Random(0)
    drawn = [random.randrange(len(vocabulary)) for _ in range(CYCLE)]
    tokens = tuple(vocabulary[index] for index in drawn)
    others = tuple(vocabulary[(index + 1) % len(vocabulary)] for index in drawn)
    uniforms = tuple(random.random() for _ in range(CYCLE))
    return _closed(tokens), _closed(others), _closed(uniforms)


def _closed(values: tuple[T, ...]) -> tuple[T, ...]:
    """Return the values with their beginning repeated behind the end, for looks across it."""
    return values + values[:LONGEST_LOOK]


HASHED_TOKENS: Final = 1 << 14
"""Latest tokens of a prompt that tell its text from others': hashing them takes 0.4 ms (one core,
Zen 4, 2026-11-21), however long the prompt is."""


def _hash(sequence: Sequence) -> int:
    request = sequence.request
    prompt = array("q", request.prompt_ids[-HASHED_TOKENS:])
    seed = request.sampling.seed & 0xFFFF_FFFF_FFFF_FFFF
    data = prompt.tobytes() + struct.pack("<QI", seed, sequence.choice)
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


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
