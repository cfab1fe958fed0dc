"""Log probabilities of a prompt's tokens, as columns that fit into messages between processes."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple


class ScoredToken(NamedTuple):
    """A token of a prompt, given the tokens before it.

    Attributes:
        logprob: its log probability.
        rank: number of tokens that are at least as likely, where 1 is the likeliest.
        top: ids and log probabilities of the likeliest tokens, descending.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class PromptLogprobs(NamedTuple):
    """Log probabilities of consecutive tokens of a prompt.

    The columns are in little-endian order. Python objects would take 2 kB for a token with 20
    alternatives, instead of 168 bytes.

    Attributes:
        alternatives: number of alternatives of each token.
        logprobs: float32 [tokens].
        ranks: int32 [tokens]; see `ScoredToken`.
        top_ids, top_logprobs: int32 and float32 [tokens, alternatives].
    """

    alternatives: int
    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes

    def scored_tokens(self) -> Iterator[ScoredToken]:
        """Yield the tokens in order."""
        columns = zip(
            struct.iter_unpack("<f", self.logprobs),
            struct.iter_unpack("<i", self.ranks),
            _rows(self.alternatives, "i", self.top_ids),
            _rows(self.alternatives, "f", self.top_logprobs),
            strict=False,  # rows without alternatives never end
        )
        for (logprob,), (rank,), top_ids, top in columns:
            yield ScoredToken(logprob, rank, tuple(zip(top_ids, top, strict=True)))


def joined(parts: Sequence[PromptLogprobs]) -> PromptLogprobs | None:
    """Return the log probabilities of consecutive parts of a prompt, or None without parts."""
    if not parts:
        return None
    return PromptLogprobs(
        parts[0].alternatives,
        b"".join(part.logprobs for part in parts),
        b"".join(part.ranks for part in parts),
        b"".join(part.top_ids for part in parts),
        b"".join(part.top_logprobs for part in parts),
    )


def _rows(length: int, code: str, column: bytes) -> Iterator[tuple[Any, ...]]:
    return struct.iter_unpack(f"<{length}{code}", column) if length else repeat(())
