"""The tokens of simulated outputs with a grammar, which depend only on the text before them.

The mask of the grammar determines which tokens may follow. Among them, the number of the position
selects one. Tokens that end the output or a part of it are preferred, so that outputs are short.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

import numpy as np
import numpy.typing as npt

from draftgate.backends.core.drafts import ROOT
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.core.steps import SequenceWork
from draftgate.backends.tokenizer import Tokenizer

CLOSING: Final = frozenset('"]}')
"""Characters of tokens that end strings, lists and objects."""

CLOSING_SHARE: Final = 1 / 3
"""Probability of a token that ends a part, where the grammar allows other tokens too. Strings have
two tokens on average. Chosen for readable texts, not tuned (2026-11-23)."""

Walk = tuple[tuple[int, ...], tuple[int, ...]]
"""The path of accepted draft tokens (`StepResult.accepted`), and the emitted tokens."""

_Ids = npt.NDArray[np.intp]


class GrammarTokens:
    """Chooses the tokens of sequences with a grammar."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        printable: Collection[int],
        eos_ids: Collection[int],
        uniform: Callable[[Sequence, int], float],
    ) -> None:
        """Use the masks of a tokenizer's vocabulary.

        Args:
            printable: tokens for the inside of texts, which are used where the grammar allows them.
            eos_ids: tokens that end a sequence.
            uniform: returns a number in [0, 1) for a position of a sequence.
        """
        size = tokenizer.vocab_size
        self._printable = _flags(printable, size)
        self._eos = _flags(eos_ids, size)
        names = tokenizer.vocabulary.items()  # a token of ASCII punctuation is its own name
        self._closing = _flags([token for name, token in names if set(name) <= CLOSING], size)
        self._uniform = uniform

    def walk(self, work: SequenceWork) -> Walk:
        """Return the path of the accepted draft tokens, and these tokens with the next token."""
        sequence, draft = work.sequence, work.draft
        assert sequence.grammar is not None
        masks, path, emitted, at = sequence.grammar.masks(draft), list[int](), list[int](), ROOT
        while True:
            position = work.confirmed_end + len(emitted)
            emitted.append(self._choose(masks[at + 1], self._uniform(sequence, position)))
            following = (
                place
                for place, token in enumerate(draft.token_ids)
                if draft.parent(place) == at and token == emitted[-1]
            )
            at = next(following, ROOT)
            if at == ROOT:
                return tuple(path), tuple(emitted)
            path.append(at)

    def _choose(self, mask: bytes, uniform: float) -> int:
        """Return one of the tokens that a mask allows."""
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        allowed = np.zeros(len(self._eos), np.bool_)
        count = min(len(bits), len(allowed))
        allowed[:count] = bits[:count]
        if (ends := np.flatnonzero(allowed & self._eos)).size:
            return int(ends[0])
        closing = np.flatnonzero(allowed & self._closing)
        if closing.size and uniform < CLOSING_SHARE:
            return _at(closing, uniform / CLOSING_SHARE)
        inside = np.flatnonzero(allowed & self._printable)
        return _at(inside if inside.size else np.flatnonzero(allowed), uniform)


def _flags(tokens: Collection[int], size: int) -> npt.NDArray[np.bool_]:
    flags = np.zeros(size, np.bool_)
    flags[list(tokens)] = True
    return flags


def _at(tokens: _Ids, share: float) -> int:
    return int(tokens[int(share * len(tokens))])
