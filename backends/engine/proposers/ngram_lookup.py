"""N-gram lookup: the drafts that continue earlier matches of the end of a text.

A match is an earlier place that ends with the same tokens as the text. A lookup compares the latest
matches of the last four tokens, then those of the last pair. If the pair is new, it compares those
of the last token. Different continuations become branches of a tree, and a longer match has more
weight.

`ngram_native` implements lookups in C for a whole batch. `ngram_python` replaces it on machines
without a compiler, and defines the drafts: both return equal drafts.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Final, Protocol, TypeVar

from draftgate.backends.core.drafts import Draft
from draftgate.backends.token_ids import TokenIds

MAX_MATCHES: Final = 8
"""Maximum number of matches to compare in a text.

With 1 / 4 / 8 / 16 matches and 8 slots, held-out code gets 1.80 / 1.92 / 1.93 / 1.92 tokens per
step (2026-11-21).
"""

ORDERS: Final = 3
"""Number of searched lengths: the last 1, 2 and 4 tokens, each twice the one before."""

MAX_WALK: Final = 16
"""Maximum number of matches of one searched length to visit. Those that a longer searched length
has found already do not count as matches again."""

MAX_CATCH_UP: Final = 4096
"""Maximum number of tokens of another text that a lookup adds to its index.

A corpus that outgrows its index needs a new one. Its tokens would otherwise delay a single step.
"""

MAX_EVIDENCE: Final = 32
"""Maximum counted length of a match. Longer matches are no better evidence."""

LENGTH_WEIGHT: Final = 2.0
"""Factor on the weight of a match per token of its length.

The following figures are tokens per step on 25 held-out files with 4 / 8 / 16 slots. A chain gets
1.77 / 1.88 / 1.92. Trees weighted by the match's length get 1.81 / 1.97 / 2.09. Trees with a factor
of two get 1.81 / 1.98 / 2.10, and with a factor of four 1.82 / 1.98 / 2.09. All trees wasted fewer
slots than the chain (2026-11-21).
"""

CHILD_CHANCE: Final = 0.75
"""Assumed chance of a token after a correct parent, to compare branches with deeper tokens."""

LONG_MATCH: Final = 4
"""Minimum length of a match that makes a search of further texts unnecessary."""

LEAST_TEXT_BYTES: Final = 2048
"""Bound on the memory of an empty text, with the objects of its index."""

MAX_TEXTS: Final = 3
"""Maximum number of texts in one lookup: a sequence, and two generations of a corpus."""


class IndexedText(Protocol):
    """A text with the index of a lookup.

    Attributes:
        tokens: the text, which belongs to the caller and may grow between lookups.
    """

    @property
    def tokens(self) -> TokenIds: ...


TextT = TypeVar("TextT", bound=IndexedText)


class NgramLookup(Protocol[TextT]):
    """Finds drafts in texts with indexes of one kind."""

    def index(self, tokens: TokenIds) -> TextT:
        """Return the index of a text. Lookups extend the index when the text has grown."""
        ...

    def text_bytes(self, tokens: int) -> int:
        """Return the maximum memory of a text of this length with its index."""
        ...

    def drafts(self, texts: Many[tuple[TextT, ...]], max_tokens: Many[int]) -> list[Draft]:
        """Return a draft for each tuple of texts.

        Args:
            texts: for each draft, the text to continue, then up to `MAX_TEXTS` - 1 other texts. A
                lookup searches them in order until it has a match of `LONG_MATCH` tokens.
                They contain most tokens, so their matches have at least two.
            max_tokens: length of each draft. The draft is empty if no match exists, or if the
                length is below 1.
        """
        ...
