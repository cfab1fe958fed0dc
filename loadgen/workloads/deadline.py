"""What each of several requests may take, so that together they meet one deadline. Pure.

Work is counted in output tokens: a prompt of `p` tokens and an answer of `n`, behind whoever has
the server's next steps, are

    w = WAITING + p / PROMPT_TOKENS_PER_OUTPUT + n

A request that is sent when `R` seconds are left of the deadline shares them with those after it in
proportion to their work. Its unit of work may take `u = R / (w + later w)`, so it announces

    TTFT = u (WAITING + p / PROMPT_TOKENS_PER_OUTPUT + 1)        TPOT = u

and TTFT + (n - 1) TPOT = u w = R - R later w / (w + later w): the rest less what those after it
are expected to need. What one request saves or wastes, all after it share.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from draftgate.loadgen.types import Slo

PROMPT_TOKENS_PER_OUTPUT: Final = 20.0
"""Prompt tokens that take as long as one output token: 18 to 35 in six questions (TTFT 0.7 to 1.0 s
over 1,300 tokens, TPOT 14 to 19 ms; shipped model, one busy core of an AMD EPYC Zen 4, 2026-11-21).
GPUs do 100 and more; by a smaller number the first text gets more of the time."""

WAITING: Final = 64.0
"""Output tokens that every request may wait, short or long: the prompt of one other answer, 1,280
tokens. Without it embeddings announced 130 ms of a deadline of 10 s, and a server that refuses what
cannot be in time refused them behind any such prompt (four of sixteen; shipped model, a busy AMD
EPYC Zen 4 at 0.2 questions/s, 2026-11-21)."""

LEAST_S: Final = 1e-3
"""What is announced when no time is left: a header is a positive number. The question is late
already, and a server that sheds what cannot be in time may refuse it."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a request asks of a server, in tokens; embeddings have one output."""

    prompt_tokens: int
    output_tokens: int = 1

    @property
    def before_first(self) -> float:
        """What comes before the first output, in output tokens."""
        return WAITING + self.prompt_tokens / PROMPT_TOKENS_PER_OUTPUT

    @property
    def units(self) -> float:
        """It all in output tokens."""
        return self.before_first + self.output_tokens


def announced(promise: Slo, elapsed_s: float, work: Work, later: Iterable[Work] = ()) -> Slo:
    """Return what a request is to announce; nothing where the user was promised nothing.

    The user reads the last request's text: that one keeps the user's own TTFT and TPOT as well,
    where they are tighter.

    Args:
        promise: to the user, from the instant of asking.
        elapsed_s: since then.
        work: of this request.
        later: of those after it, as far as it can be foreseen.
    """
    after = list(later)
    ttft_s = tpot_s = None
    if promise.latency_s is not None:
        units = work.units + sum(one.units for one in after)
        unit_s = max(promise.latency_s - elapsed_s, LEAST_S) / units
        ttft_s = unit_s * (work.before_first + 1)
        tpot_s = unit_s if work.output_tokens > 1 else None
    if not after:
        if promise.ttft_s is not None:
            ttft_s = _tighter(ttft_s, max(promise.ttft_s - elapsed_s, LEAST_S))
        tpot_s = _tighter(tpot_s, promise.tpot_s)
    return Slo(ttft_s, tpot_s)


def _tighter(one_s: float | None, other_s: float | None) -> float | None:
    return min((limit_s for limit_s in (one_s, other_s) if limit_s is not None), default=None)
