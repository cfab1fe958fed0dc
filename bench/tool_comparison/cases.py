"""The behaviours of the mock: a correct stream, and streams that mislead load tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

RATE: Final = 10.0
"""Requests per second at constant gaps, which every tool supports."""

TTFT_LIMIT_MS: Final = 100.0
TPOT_LIMIT_MS: Final = 20.0
"""TPOT limit of goodput, twice that of a correct stream."""


@dataclass(frozen=True, slots=True)
class Case:
    """The timing and content of each answer.

    Attributes:
        tells: description for the table.
        tokens, per_chunk: number of tokens, and tokens per chunk.
        ttft_s: time from the request's arrival to its first chunk with text.
        token_s: time per token; chunks are that far apart times their tokens.
        hollow: whether an empty delta without a role follows the role's delta at once.
        broken_after: tokens after which the stream breaks; None if it is intact.
        error: whether an error event breaks the stream; otherwise it just ends.
        stall_s: duration of the server's stall after the arrival of request `STALL_AT`.
        most_open: limit of concurrent requests that tools are given; None is no limit.
        requests: number of requests that each tool sends.
    """

    tells: str
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
"""Index of the request whose arrival starts the stall, from 0."""

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
"""`stall` limits concurrent requests, as many users do. A tool that delays sending then hides the
time that users would have waited (coordinated omission)."""
