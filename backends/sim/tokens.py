"""The tokens of simulated texts, which depend only on their position.

A sequence's tokens are a section of one long cycle of random tokens. Its start is a hash of the end
of the prompt, the seed and the choice. Drafts, batch, preemption and worker have no influence, so
simulated text is as independent of every decision as real text. A token takes almost no time,
because simulations have millions of tokens.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
from functools import cache, partial
from hashlib import blake2b
from itertools import islice
from random import Random
from typing import Final, Protocol, TypeVar

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.tokenizer import Tokenizer

T = TypeVar("T")

CYCLE: Final = 1 << 16
"""Length of the cycle. Among a hundred sequences, about two start within 100 tokens of each other,
so their texts partly agree. This overlap is harmless, because caches compare whole prefixes."""

MOST_TOKENS: Final = 128
"""Maximum number of tokens per call, more than the longest draft."""

HASHED_TOKENS: Final = 1 << 14
"""Number of tokens at the end of the prompt that determine the text. Hashing them takes 0.4 ms for
prompts of any length (one core, Zen 4, 2026-11-21)."""


class TrueTokens(Protocol):
    """Knows the tokens of all texts, by position."""

    def tokens(self, sequence: Sequence, position: int, count: int = 1) -> tuple[int, ...]:
        """Return `count` tokens of a sequence from an absolute position on."""
        ...

    def draft(self, sequence: Sequence, position: int, right: int, count: int) -> tuple[int, ...]:
        """Return `count` tokens from a position on, of which only the first `right` are true."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of the sequence. The call is idempotent."""
        ...


class SimulatedTokens:
    """The token streams of all sequences, with one number of state per sequence."""

    def __init__(self, vocabulary: Iterable[int]) -> None:
        """Draw tokens from `vocabulary`, which has at least two token ids."""
        self._tokens, self._others, self._uniforms = _cycles(tuple(vocabulary))
        self._offsets: dict[int, int] = {}  # by sequence key

    def tokens(self, sequence: Sequence, position: int, count: int = 1) -> tuple[int, ...]:
        """Return the sequence's tokens from an absolute position on.

        Args:
            count: number of tokens, at most `MOST_TOKENS`.
        """
        at = self._at(sequence, position)
        return self._tokens[at : at + count]

    def draft(self, sequence: Sequence, position: int, right: int, count: int) -> tuple[int, ...]:
        """Return `count` tokens from a position on, of which only the first `right` are true."""
        at = self._at(sequence, position)
        return self._tokens[at : at + right] + self._others[at + right : at + count]

    def uniforms(self, sequence: Sequence, position: int, count: int) -> tuple[float, ...]:
        """Return uniform numbers in [0, 1) for positions, independent of their tokens."""
        at = self._at(sequence, position)
        return self._uniforms[at : at + count]

    def uniform(self, sequence: Sequence, position: int) -> float:
        """Return the uniform number of a position."""
        return self._uniforms[self._at(sequence, position)]

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of the sequence. The call is idempotent."""
        self._offsets.pop(sequence.key, None)

    def _at(self, sequence: Sequence, position: int) -> int:
        offset = self._offsets.get(sequence.key)
        if offset is None:
            offset = self._offsets[sequence.key] = _hash(sequence)
        return (offset + position) % CYCLE


@cache
def _cycles(
    vocabulary: tuple[int, ...],
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
    """Return the cycles of true tokens, of tokens that differ from them, and of uniforms."""
    random, size = Random(0), len(vocabulary)
    # `randrange` draws the same numbers, in three times as long.
    numbers = iter(partial(random.getrandbits, size.bit_length()), None)
    drawn = list(islice(filter(size.__gt__, numbers), CYCLE))
    tokens = tuple([vocabulary[index] for index in drawn])
    others = tuple([vocabulary[(index + 1) % size] for index in drawn])
    uniforms = tuple([random.random() for _ in range(CYCLE)])
    return _closed(tokens), _closed(others), _closed(uniforms)


def _closed(values: tuple[T, ...]) -> tuple[T, ...]:
    """Repeat the beginning after the end, so that slices may cross it."""
    return values + values[:MOST_TOKENS]


def _hash(sequence: Sequence) -> int:
    request = sequence.request
    prompt = array("q", request.prompt_ids[-HASHED_TOKENS:])
    seed = request.sampling.seed & 0xFFFF_FFFF_FFFF_FFFF
    data = prompt.tobytes() + struct.pack("<QI", seed, sequence.choice)
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


@cache
def shipped_tokenizer() -> Tokenizer:
    """Return the tokenizer of the shipped model, loaded once for all simulated workers.

    Loading it takes most of the time in which such a worker starts.
    """
    return Tokenizer(SHIPPED_MODEL)


def printable_vocabulary(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of tokens that are printable ASCII by themselves, without special tokens."""
    special = {"eos_token", "bos_token", "pad_token", "unk_token"}
    excluded = {tokenizer.special_id(name) for name in special}
    found = []
    for token in range(tokenizer.vocab_size):
        text = "" if token in excluded else tokenizer.decode([token])
        if text and text.isascii() and text.isprintable():
            found.append(token)
    return found
