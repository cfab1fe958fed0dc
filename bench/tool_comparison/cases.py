"""What the server of known truth does: an honest stream, and the ways in which streams mislead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

RATE: Final = 10.0
"""Requests per second, at constant gaps: every tool can do that."""

TTFT_LIMIT_MS: Final = 100.0
TPOT_LIMIT_MS: Final = 20.0
"""What the tools are told to call good: twice what an honest stream does."""


@dataclass(frozen=True, slots=True)
class Case:
    """What each answer brings, and when.

    Attributes:
        tells: in words, for the table.
        tokens, per_chunk: how many come, and how many in each chunk.
        ttft_s: from the request's arrival to its first chunk with text.
        token_s: between two tokens; chunks are as many times that apart as they have tokens.
        hollow: whether an empty delta, without a role, comes at once behind the role's.
        broken_after: tokens after which the stream breaks; None if it is intact.
        error: whether an error event is what breaks it, else it just ends.
        stall_s: how long the server stands still, once request `STALL_AT` has come.
        most_open: the most requests that tools are told to have open; None does not limit them.
        requests: how many each tool sends.
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
"""The request with whose arrival the server stands still, counted from 0."""

CASES: Final = {
    "plain": Case("one token per chunk"),
    "bundled": Case("four tokens per chunk", per_chunk=4),
    "cut": Case(
        "cut half-way: no finish_reason, usage or [DONE]",
        broken_after=16,
    ),
    "error": Case("an error event half-way", broken_after=16, error=True),
    "hollow": Case("empty deltas at once, text after 200 ms", ttft_s=0.2, hollow=True),
    "stall": Case("the server stands still for 2 s", stall_s=2.0, most_open=8, requests=60),
}
"""`stall` limits open requests, as many users do: a tool that then waits to send hides the time
that users would have waited (coordinated omission)."""
