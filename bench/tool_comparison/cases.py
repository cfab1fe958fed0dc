"""Behaviours of the mock: a correct stream, and streams that mislead load tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

RATE: Final = 10.0
"""Requests per second with constant gaps, which every tool supports."""

TTFT_LIMIT_MS: Final = 100.0
TPOT_LIMIT_MS: Final = 20.0
"""TPOT limit of goodput in seconds, twice the TPOT of a correct stream."""


@dataclass(frozen=True, slots=True)
class Case:
    """The timing and content of each response.

    Attributes:
        description: description for the table.
        tokens, per_chunk: number of tokens, and tokens per chunk.
        ttft_s: seconds from the request's arrival to its first chunk with text.
        token_s: seconds per token, so chunks are `token_s * per_chunk` apart.
        hollow: whether an empty delta without a role directly follows the delta of the role.
        broken_after: number of tokens before the stream breaks, or None if it is intact.
        error: whether the stream breaks with an error event instead of just ending.
        stall_s: seconds for which the server stalls after the arrival of request `STALL_AT`.
        most_open: limit of concurrent requests that is set in the tools, or None for no limit.
        requests: number of requests that each tool sends.
    """

    description: str
    tokens: int = 32
    per_chunk: int = 1
    ttft_s: float = 0.05
    token_s: float = 0.01
    hollow: bool = False
    broken_after: int | None = None
    error: bool = False
    stall_s: float = 0.0
    most_open: int | None = None
    requests: int = 40


STALL_AT: Final = 20
"""Index of the request whose arrival starts the stall, counted from 0."""

CASES: Final = {
    "plain": Case("one token per chunk"),
    "bundled": Case("four tokens per chunk", per_chunk=4),
    "cut": Case(
        "cut half-way: no finish_reason, usage or [DONE]",
        broken_after=16,
    ),
    "error": Case("an error event half-way", broken_after=16, error=True),
    "hollow": Case("empty deltas at once, text after 200 ms", ttft_s=0.2, hollow=True),
    "stall": Case("the server stalls for 2 s", stall_s=2.0, most_open=8, requests=60),
}
"""Cases by name. `stall` limits concurrent requests, as many users do. A tool that delays sending
then hides the time that users would have waited (coordinated omission)."""
