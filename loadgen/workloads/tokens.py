"""How long a text is, without a tokenizer: an estimate that says it is one.

A server's `/tokenize` on a few of the run's own texts makes the estimate a measured one
(`fit_counter`); what a request really held is read from its usage afterwards.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final, Protocol

CHARACTERS_PER_TOKEN: Final = 3.5
"""Where the server cannot tell. English in large vocabularies has about 4 (the rule of thumb of
OpenAI's documentation); the shipped model's 4,096 tokens have 3.1 on the standard library's sources
and 3.4 on its docstrings (240 and 142 passages of 2,000 characters, 2026-11-21)."""


class TokenCounter(Protocol):
    """Counts tokens."""

    def count(self, text: str) -> int:
        """Return the tokens of a text; 0 for the empty one, never fewer for a longer text."""
        ...


@dataclass(frozen=True, slots=True)
class ApproximateCounter:
    """Counts ceil(characters / characters per token).

    Attributes:
        source: in words, where the ratio comes from; reports print it beside prompt lengths.
    """

    characters_per_token: float = CHARACTERS_PER_TOKEN
    source: str = "estimated, not measured"

    def __post_init__(self) -> None:
        if not self.characters_per_token > 0:
            raise ValueError(f"characters per token must be positive: {self.characters_per_token}")

    def count(self, text: str) -> int:
        return ceil(len(text) / self.characters_per_token)


def fit_counter(samples: Sequence[tuple[str, int]]) -> ApproximateCounter:
    """Return the counter with the ratio of all characters to all tokens of (text, tokens) pairs.

    The ratio of sums, not the mean of ratios: it is right for the total of a load.

    Raises:
        ValueError: the samples hold no characters or no tokens.
    """
    characters = sum(len(text) for text, _ in samples)
    tokens = sum(count for _, count in samples)
    if characters <= 0 or tokens <= 0:
        raise ValueError("the samples hold nothing to measure characters per token by")
    return ApproximateCounter(characters / tokens, f"measured on {len(samples)} texts")


def cut(text: str, tokens: int, counter: TokenCounter) -> str:
    """Return the longest beginning of a text of at most that many tokens, by bisection."""
    lengths = range(len(text) + 1)
    fitting = bisect_right(lengths, tokens, key=lambda length: counter.count(text[:length]))
    return text[: max(fitting - 1, 0)]
