"""What drafts of a request may gain, predicted at the gateway before the request runs.

The acceptance is taken from earlier drafts: those of the request's tenant, shrunk to those of all
tenants of the model, shrunk to the worker's running rate. Greedy and sampled texts are counted
apart, because drafts of sampled ones are accepted less (0.68 against 0.54 on the recorded texts).
If n-gram lookups may draft, the repetition of the prompt shifts the acceptance, in logits.

A cap holds for the whole request, but steps know more: the evidence of a draft, and the price at
the time. So a cap excludes only slots that would not pay if a draft went well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from draftgate.policies.speculation.weights import weight
from draftgate.policies.types import (
    ANY_PROPOSER,
    DraftCounts,
    RequestView,
    SpeculationMode,
    WorkerLoad,
)

HISTORY_TOKENS: Final = 64.0
"""Weight of the record of all tenants in that of one, in tested tokens: a request of 96 tokens has
as many. (16 to 256 predict recorded requests from others of their task equally well, within 0.002
nats per token; `bench/results/request-forecast.json`, 2026-11-21.)"""

REPETITION_SLOPE: Final = 1.7
USUAL_REPETITION: Final = 0.59
"""Logits between the acceptance after a prompt without repetition and after one of nothing else,
and the repetition that changes nothing. (Fitted to n-gram drafts of held-out code: 1.7 greedy and
1.7 sampled; on texts cut where they begin to loop 2.8 and 1.2. Mean of those prompts: 0.59. Same
results.)"""

GOOD_DRAFT: Final = 2.0
"""Logits by which the tokens of a good draft are likelier than those of all drafts. Share of the
gain of recorded n-gram drafts that caps exclude, at prices of 0.1 / 0.3 / 0.5: with 0 19 / 34 /
41%, with 1 5 / 13 / 20%, with 2 0 / 2 / 4%. (Same results; tasks mixed, forecasts by temperature
and repetition only.)"""

_LEAST_CHANCE: Final = 1e-3
"""No probability is taken to be closer to 0 or 1."""


@dataclass(frozen=True, slots=True)
class DraftForecast:
    """What is expected of a request's drafts.

    Attributes:
        acceptance: the probability of a token, given all before it.
        whose: whose drafts that comes from, in words.
        repetition: of the prompt, if it counts; else None.
        weight: what the request's tokens may come to be worth (`weights`).
    """

    acceptance: float
    whose: str
    repetition: float | None
    weight: float

    @property
    def good_chance(self) -> float:
        """The probability of a token of a good draft."""
        shift = GOOD_DRAFT
        if self.repetition is not None:
            shift += REPETITION_SLOPE * (self.repetition - USUAL_REPETITION)
        chance = min(max(self.acceptance, _LEAST_CHANCE), 1.0 - _LEAST_CHANCE)
        return 1.0 / (1.0 + (1.0 - chance) / chance * math.exp(-shift))

    def survival(self, slot: int) -> float:
        """Return the survival of slot 1, 2, ... of a good draft."""
        return self.good_chance**slot

    def paying_slots(self, price: float, most: int) -> int:
        """Return how many slots of a good draft are worth more than the price, at most `most`."""
        chance, slots = self.good_chance, 0
        while slots < most and self.weight * chance ** (slots + 1) > price:
            slots += 1
        return slots


def forecast_drafts(request: RequestView, load: WorkerLoad, proposer: str) -> DraftForecast:
    """Return what is expected of a request's drafts on a worker.

    Args:
        proposer: what may draft, by name or `ANY_PROPOSER`.
    """
    acceptance, whose = load.acceptance, "of this worker"
    levels = (request.model_drafts, "of all tenants"), (request.tenant_drafts, "of this tenant")
    for counts, words in levels:
        acceptance = _shrink(counts, acceptance)
        if counts.accepted + counts.rejected >= HISTORY_TOKENS:
            whose = words
    ngram = SpeculationMode.NGRAM.value
    looks_up = ngram in (load.proposers if proposer == ANY_PROPOSER else (proposer,))
    # A request with a TPOT target is taken to be late: that is when it needs its slots, and it is
    # not known yet whether it will be.
    laxity_s = None if request.service.tpot_s is None else 0.0
    return DraftForecast(
        acceptance,
        whose,
        request.repetition if looks_up else None,
        weight(laxity_s, request.service),
    )


def _shrink(counts: DraftCounts, toward: float) -> float:
    tested = counts.accepted + counts.rejected
    return (counts.accepted + toward * HISTORY_TOKENS) / (tested + HISTORY_TOKENS)
