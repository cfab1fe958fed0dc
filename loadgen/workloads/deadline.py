"""Splits one deadline over the requests of a flow. Performs no I/O.

Work is counted in output tokens. A request with a prompt of `p` tokens and a response of `n` has

    w = WAITING + p / PROMPT_TOKENS_PER_OUTPUT + n

A request that is sent `R` seconds before the deadline shares this time with the later requests in
proportion to their work. The time per unit of work is `u = R / (w + later w)`. The request
announces the limits

    TTFT = u (WAITING + p / PROMPT_TOKENS_PER_OUTPUT + 1)        TPOT = u

The whole request then takes TTFT + (n - 1) TPOT = u w = R - R later w / (w + later w). This is the
remaining time minus the expected time of the later requests. All later requests share the time that
a request saves or wastes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from draftgate.loadgen.types import Slo

PROMPT_TOKENS_PER_OUTPUT: Final = 20.0
"""Prompt tokens that take as long as one output token. Six measurements gave 18 to 35 (TTFT 0.7 to
1.0 s over 1,300 tokens, TPOT 14 to 19 ms, shipped model, one busy core of an AMD EPYC Zen 4,
2026-11-21). GPUs reach 100 and more. A smaller number assigns more of the time to the first
text."""

WAITING: Final = 64.0
"""Output tokens of waiting time for every request, equal to the prompt of one other response of
1,280 tokens. Embeddings announced 130 ms of a deadline of 10 s without this term. The server then
refused embeddings after any such prompt, because it could not serve them in time. It refused four
of sixteen (shipped model, a busy AMD EPYC Zen 4 at 0.2 requests/s, 2026-11-21)."""

LEAST_S: Final = 1e-3
"""The announced time after the deadline, because a header must be positive. The flow is then late
already, and a server that sheds late requests may refuse it."""


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
        """The total work in output tokens."""
        return self.before_first + self.output_tokens


def split_deadline(
    promise: Slo, elapsed_s: float, work: RequestWork, later: Iterable[RequestWork] = ()
) -> Slo:
    """Return the SLO that a request announces, without limits if the user has no deadline.

    The user reads the text of the last request, so that request also keeps the user's own TTFT and
    TPOT where they are tighter.

    Args:
        promise: the user's SLO, counted from the time of the user's question.
        elapsed_s: seconds since that time.
        work: the work of this request.
        later: the expected work of the later requests.
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
