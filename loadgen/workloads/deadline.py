"""Splits one deadline over the requests of a flow. Pure.

Work is counted in output tokens. A request with a prompt of `p` tokens and an answer of `n` has

    w = WAITING + p / PROMPT_TOKENS_PER_OUTPUT + n

A request that is sent `R` seconds before the deadline shares them with the later requests in
proportion to their work. A unit of its work may take `u = R / (w + later w)`, so it announces

    TTFT = u (WAITING + p / PROMPT_TOKENS_PER_OUTPUT + 1)        TPOT = u

and TTFT + (n - 1) TPOT = u w = R - R later w / (w + later w): the rest, minus what the later
requests are expected to need. Time that one request saves or wastes is shared by all later ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from draftgate.loadgen.types import Slo

PROMPT_TOKENS_PER_OUTPUT: Final = 20.0
"""Prompt tokens that take as long as one output token: 18 to 35 in six measurements (TTFT 0.7 to
1.0 s over 1,300 tokens, TPOT 14 to 19 ms; shipped model, one busy core of an AMD EPYC Zen 4,
2026-11-21). GPUs reach 100 and more. A smaller number gives more of the time to the first text."""

WAITING: Final = 64.0
"""Output tokens that every request may wait, short or long: the prompt of one other answer, 1,280
tokens. Without it embeddings announced 130 ms of a deadline of 10 s. A server that refuses requests
it cannot serve in time then refused them after any such prompt (four of sixteen; shipped model, a
busy AMD EPYC Zen 4 at 0.2 requests/s, 2026-11-21)."""

LEAST_S: Final = 1e-3
"""The time announced when none is left, since a header must be positive. The flow is late already,
and a server that sheds late requests may refuse it."""


@dataclass(frozen=True, slots=True)
class RequestWork:
    """The work of a request in tokens. Embeddings have one output token."""

    prompt_tokens: int
    output_tokens: int = 1

    @property
    def before_first(self) -> float:
        """The work before the first output token, in output tokens."""
        return WAITING + self.prompt_tokens / PROMPT_TOKENS_PER_OUTPUT

    @property
    def units(self) -> float:
        """All of the work in output tokens."""
        return self.before_first + self.output_tokens


def split_deadline(
    promise: Slo, elapsed_s: float, work: RequestWork, later: Iterable[RequestWork] = ()
) -> Slo:
    """Return the SLO that a request announces; without limits if the user has no deadline.

    The user reads the text of the last request, so that request also keeps the user's own TTFT and
    TPOT where they are tighter.

    Args:
        promise: the user's SLO, from the instant at which the user asked.
        elapsed_s: seconds since then.
        work: of this request.
        later: the expected work of the requests after it.
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
