"""The expected gain of a request's drafts, predicted at the gateway before the request runs.

The acceptance is an estimate from earlier drafts. The estimate of the request's tenant is shrunk
toward that of all tenants of the model, and this in turn toward the worker's running rate. Greedy
and sampled texts are counted separately, because drafts of sampled texts are accepted less often
(0.68 against 0.54 on the recorded texts). If n-gram lookups may draft, the repetition of the prompt
shifts the acceptance, in logits.

A cap holds for the whole request, but each step knows the evidence of a draft and the current
price. So a cap excludes only slots that would not be worth their price even in a good draft.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from draftgate.policies.speculation.plan_reason import AcceptanceSource
from draftgate.policies.speculation.weights import weight
from draftgate.policies.types import (
    ANY_PROPOSER,
    DraftCounts,
    RequestView,
    SpeculationMode,
    WorkerLoad,
)

HISTORY_TOKENS: Final = 64.0
"""Weight of all tenants' record in the estimate of one tenant, in tested tokens. A request of 96
tokens has this many. (16 to 256 predict recorded requests from others of their task equally
well, within 0.002 nats per token, `bench/results/request-forecast.json`, 2026-11-21.)"""

REPETITION_SLOPE: Final = 1.7
USUAL_REPETITION: Final = 0.59
"""Logits between the acceptance after prompts with a repetition of 0 and of 1, and the neutral
repetition. (Fitted to n-gram drafts of held-out code: 1.7 greedy and 1.7 sampled. On texts cut
where they begin to loop: 2.8 and 1.2. Mean repetition of those prompts: 0.59,
`bench/results/request-forecast.json`, 2026-11-21.)"""

GOOD_DRAFT: Final = 2.0
"""Logits by which the tokens of a good draft are likelier than those of all drafts. Caps exclude a
share of the gain of recorded n-gram drafts. The shares are from mixed tasks and forecasts by
temperature and repetition only (`bench/results/request-forecast.json`, 2026-11-21).

    value    price 0.1    price 0.3    price 0.5
    0        19%          34%          41%
    1        5%           13%          20%
    2        0%           2%           4%
"""

_LEAST_CHANCE: Final = 1e-3
"""Minimum distance of a probability from 0 and 1."""


@dataclass(frozen=True, slots=True)
class DraftForecast:
    """The expected drafts of a request.

    Attributes:
        acceptance: probability of a token given all previous tokens.
        source: the requests from which the acceptance is known.
        repetition: repetition of the prompt, or None if it does not count.
        weight: highest weight that the request's tokens may reach (`weights`).
    """

    acceptance: float
    source: AcceptanceSource
    repetition: float | None
    weight: float

    @property
    def good_chance(self) -> float:
        """The probability of a token in a good draft."""
        shift = GOOD_DRAFT
        if self.repetition is not None:
            shift += REPETITION_SLOPE * (self.repetition - USUAL_REPETITION)
        chance = min(max(self.acceptance, _LEAST_CHANCE), 1.0 - _LEAST_CHANCE)
        return 1.0 / (1.0 + (1.0 - chance) / chance * math.exp(-shift))

    def survival(self, slot: int) -> float:
        """Return the survival of slot 1, 2, ... in a good draft."""
        return self.good_chance**slot

    def paying_slots(self, price: float, most: int) -> int:
        """Return how many slots of a good draft are worth more than the price, at most `most`."""
        chance, slots = self.good_chance, 0
        while slots < most and self.weight * chance ** (slots + 1) > price:
            slots += 1
        return slots


def forecast_drafts(request: RequestView, load: WorkerLoad, proposer: str) -> DraftForecast:
    """Return the forecast of a request's drafts on a worker.

    Args:
        proposer: name of the proposer, or `ANY_PROPOSER`.
    """
    acceptance, source = load.acceptance, AcceptanceSource.WORKER
    levels = (
        (request.model_drafts, AcceptanceSource.ALL_TENANTS),
        (request.tenant_drafts, AcceptanceSource.TENANT),
    )
    for counts, level in levels:
        acceptance = _shrink(counts, acceptance)
        if counts.accepted + counts.rejected >= HISTORY_TOKENS:
            source = level
    ngram = SpeculationMode.NGRAM.value
    looks_up = ngram in (load.proposers if proposer == ANY_PROPOSER else (proposer,))
    # Assume that a request with a TPOT target is late. A late request needs its slots, and it is
    # unknown here whether the request will be late.
    laxity_s = None if request.service.tpot_s is None else 0.0
    return DraftForecast(
        acceptance,
        source,
        request.repetition if looks_up else None,
        weight(laxity_s, request.service),
    )


def _shrink(counts: DraftCounts, toward: float) -> float:
    tested = counts.accepted + counts.rejected
    return (counts.accepted + toward * HISTORY_TOKENS) / (tested + HISTORY_TOKENS)
