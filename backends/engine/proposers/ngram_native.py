"""N-gram lookup in C (`ngram.c`): one call for a whole batch, without a copy of any text.

Python owns the memory of indexes, so the memory is freed with its `NativeText`. An index that
becomes too small is replaced by an empty one of twice the size, and the next lookup fills it. The
index takes 36 to 72 bytes for each token of a text.
"""

from __future__ import annotations

import ctypes
import secrets
from array import array
from collections.abc import Sequence as Many
from pathlib import Path
from struct import Struct
from typing import Final

from draftgate.backends.core.drafts import NO_DRAFT, PER_MILLE, Draft
from draftgate.backends.engine.operators.compiler import compiled
from draftgate.backends.engine.proposers.ngram_lookup import (
    CHILD_CHANCE,
    LEAST_TEXT_BYTES,
    LENGTH_WEIGHT,
    LONG_MATCH,
    MAX_CATCH_UP,
    MAX_EVIDENCE,
    MAX_MATCHES,
    MAX_TEXTS,
    MAX_WALK,
    ORDERS,
)
from draftgate.backends.token_ids import TokenIds

SOURCE: Final = str(Path(__file__).with_name("ngram.c"))

LEAST_CAPACITY: Final = 64
"""Capacity of the smallest index in tokens, a power of two."""

UNLOCKED_TOKENS: Final = 32_768
UNLOCKED_TEXTS: Final = 64
"""Numbers of new tokens and of sequences from which a call releases the interpreter lock. Shorter
calls take up to 0.4 ms: 12 ns for each new token, and 3 to 7 us for each sequence (one core, Zen 4,
2026-11-23)."""

_HEADER: Final = 2
_NUMBERS_PER_TOKEN: Final = 3 * ORDERS

_SUMMARY_NUMBERS: Final = 4
_SUMMARY: Final = Struct(f"={_SUMMARY_NUMBERS}q")
"""The struct `Summary` of `ngram.c`: tokens, evidence, agreement, and whether it has branches."""

_NO_TEXT: Final = (0, 0, 0)

_Pointer = ctypes.c_void_p
_Int = ctypes.c_int64


class _Rules(ctypes.Structure):
    """The struct `Rules` of `ngram.c`."""

    _fields_ = (
        ("weights", _Pointer), ("child_chance", ctypes.c_double), ("trees", _Int),
        ("hash_keys", ctypes.c_uint64 * (1 << (ORDERS - 1))),
    )  # fmt: skip


class _Results(ctypes.Structure):
    """The struct `Results` of `ngram.c`."""

    _fields_ = (
        ("summaries", _Pointer), ("capacity", _Int), ("tokens", _Pointer), ("parents", _Pointer),
        ("shares", _Pointer),
    )  # fmt: skip


class NativeText:
    """A text with an index in the format of `ngram.c`.

    Attributes:
        tokens: the text.
        memory: the index.
        address: address of `memory`, or 0 without memory.
        capacity: tokens for which `memory` has space.
    """

    __slots__ = ("address", "capacity", "memory", "tokens")

    def __init__(self, tokens: TokenIds) -> None:
        self.tokens = tokens
        self.memory = array("i")
        self.address = self.capacity = 0

    def grow(self) -> None:
        """Replace the index by an empty one that has space for the text."""
        self.address, self.memory = 0, array("i")  # frees the old index first
        self.capacity = _capacity(len(self.tokens))
        self.memory = array("i", (0,)) * (_HEADER + _NUMBERS_PER_TOKEN * self.capacity)
        self.memory[1] = self.capacity
        self.address = self.memory.buffer_info()[0]


def _capacity(tokens: int) -> int:
    """Return the capacity of the index of a text."""
    return max(LEAST_CAPACITY, 1 << (tokens - 1).bit_length())


def native_lookup(*, trees: bool) -> NativeLookup | None:
    """Return lookups in C, or None if C cannot be compiled on this machine."""
    library = compiled(
        SOURCE,
        MAX_MATCHES=MAX_MATCHES,
        MAX_WALK=MAX_WALK,
        MAX_CATCH_UP=MAX_CATCH_UP,
        ORDERS=ORDERS,
        MAX_EVIDENCE=MAX_EVIDENCE,
        MAX_TEXTS=MAX_TEXTS,
        LONG_MATCH=LONG_MATCH,
        PER_MILLE=PER_MILLE,
    )
    return None if library is None else NativeLookup(library, trees=trees)


class NativeLookup:
    """Implements `NgramLookup`.

    Short calls keep the interpreter lock. A worker that releases the lock for microseconds may wait
    until the event loop, which takes the lock meanwhile, has sent the tokens of the last step. This
    wait would count as time of the lookup, and useful lookups would seem too expensive.

    The texts belong to the thread of the worker. No other thread may change them during a call.
    """

    def __init__(self, library: ctypes.CDLL, *, trees: bool) -> None:
        locked = ctypes.PyDLL(library._name)  # noqa: SLF001 - the file of the library
        self._drafts, self._short_drafts = library.ngram_drafts, locked.ngram_drafts
        for function in (self._drafts, self._short_drafts):
            function.argtypes = (_Pointer, _Pointer, _Int, _Pointer, _Int, _Pointer)
            function.restype = _Int
        self._weights = array("d", [LENGTH_WEIGHT**-n for n in range(MAX_EVIDENCE + 1)])
        self._rules = _Rules(
            weights=self._weights.buffer_info()[0],
            child_chance=CHILD_CHANCE,
            trees=int(trees),
            # Random keys prevent a client from choosing tokens whose hashes all collide. They do
            # not change any draft.
            hash_keys=tuple(secrets.randbits(64) | 1 for _ in range(1 << (ORDERS - 1))),
        )
        self._results = _Results()
        self._rules_address = ctypes.addressof(self._rules)
        self._results_address = ctypes.addressof(self._results)
        self._reserve_summaries(1)
        self._tokens, self._parents, self._shares = array("q"), array("q"), array("d")

    def index(self, tokens: TokenIds) -> NativeText:
        """Return the index of a text."""
        return NativeText(tokens)

    def text_bytes(self, tokens: int) -> int:
        """Return the maximum memory of a text of this length with its index."""
        numbers = _HEADER + _NUMBERS_PER_TOKEN * _capacity(tokens)
        # An array that grows reserves a sixteenth more than it needs.
        return LEAST_TEXT_BYTES + 4 * numbers + 8 * (tokens + tokens // 16)

    def drafts(self, texts: Many[tuple[NativeText, ...]], max_tokens: Many[int]) -> list[Draft]:
        """Return a draft for each tuple of texts."""
        num_texts = max(map(len, texts), default=1)
        rows: list[int] = []
        unread = 0
        for group in texts:
            for text in group:
                tokens, length = text.tokens.buffer_info()
                if length > text.capacity:
                    text.grow()
                    unread += length
                rows += (text.address, tokens, length)
            if len(group) < num_texts:
                rows += _NO_TEXT * (num_texts - len(group))
        table, lengths = array("q", rows), array("q", max_tokens)
        if _SUMMARY_NUMBERS * len(texts) > len(self._summaries):
            self._reserve_summaries(len(texts))
        arguments = (
            self._rules_address,
            table.buffer_info()[0],
            num_texts,
            lengths.buffer_info()[0],
            len(texts),
            self._results_address,
        )
        is_short = unread < UNLOCKED_TOKENS and len(texts) < UNLOCKED_TEXTS
        look_up = self._short_drafts if is_short else self._drafts
        needed = look_up(*arguments)
        if needed > len(self._tokens):
            self._reserve_rows(needed)
            look_up(*arguments)
        return self._read(len(texts), needed)

    def _reserve_summaries(self, count: int) -> None:
        """Enlarge the memory for the summaries of drafts."""
        self._summaries = array("q", (0,)) * (_SUMMARY_NUMBERS * count)
        self._results.summaries = self._summaries.buffer_info()[0]

    def _reserve_rows(self, rows: int) -> None:
        """Enlarge the memory for draft tokens."""
        self._tokens, self._parents = array("q", (0,)) * rows, array("q", (0,)) * rows
        self._shares = array("d", (0.0,)) * rows
        results = self._results
        results.tokens, results.parents, results.shares = (
            numbers.buffer_info()[0] for numbers in (self._tokens, self._parents, self._shares)
        )
        results.capacity = rows

    def _read(self, count: int, rows: int) -> list[Draft]:
        """Return the drafts that the results contain."""
        tokens, parents = tuple(self._tokens[:rows]), tuple(self._parents[:rows])
        shares = tuple(self._shares[:rows])
        summaries = self._summaries[: _SUMMARY_NUMBERS * count]
        drafts: list[Draft] = []
        begin = 0
        for size, evidence, agreement, branched in _SUMMARY.iter_unpack(summaries):
            if not size:
                drafts.append(NO_DRAFT)
                continue
            end = begin + size
            tree = (parents[begin:end], shares[begin:end]) if branched else ((), ())
            drafts.append(Draft(tokens[begin:end], *tree, evidence, agreement))
            begin = end
        return drafts
