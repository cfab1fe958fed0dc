"""What drafts of a request may bring, predicted before it runs: for the gateway's decision.

The chance of a drafted token is taken from earlier drafts, the nearest ones first: those of the
request's tenant, shrunk to those of all tenants of the model, these to the worker's running rate.
Greedy and drawn texts are counted apart, for drafts of drawn ones fare worse (0.68 against 0.54 on
the recorded texts). Where a look-up may draft, the repetition of the prompt shifts it, in logits.

A cap is kept for the whole request, and steps know better: what a draft's evidence is, and what the
price is by then. So a cap leaves out what would not pay if a draft went well, not on average.
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
"""Tested tokens that what is known of all weighs in what is said of one tenant: those of a request
of 96 tokens. (16 to 256 forecast recorded requests from others of their task equally well, within
0.002 nats a token: `python -m bench.engine.request_forecast`, 2026-11-21.)"""

REPETITION_SLOPE: Final = 1.7
USUAL_REPETITION: Final = 0.59
"""Logits by which a chance rises from a prompt without repetition to one of nothing else, and the
repetition that tells nothing. (Fitted to n-gram drafts of held-out code: 1.7 greedy and 1.7 drawn;
on texts cut where they begin to loop 2.8 and 1.2. Mean of those prompts: 0.59. Same command.)"""

GOOD_DRAFT: Final = 2.0
"""Logits by which the tokens of a draft that goes well are likelier than those of all. What caps
leave out, as a share of what slots of recorded n-gram drafts bring over the price, at prices of
0.1 / 0.3 / 0.5: with 0 19 / 34 / 41 %, with 1 5 / 13 / 20 %, with 2 0 / 2 / 4 %. (Same command;
tasks mixed, forecasts by temperature and repetition only.)"""

_LEAST_CHANCE: Final = 1e-3
"""No chance is taken to be nearer to 0 or 1."""


@dataclass(frozen=True, slots=True)
class RequestForecast:
    """What is expected of a request's drafts.

    Attributes:
        acceptance: the chance of a token, all before it being right.
        whose: of whose drafts that is known, in words.
        repetition: of the prompt, where it counts; else None.
        weight: what its tokens may come to be worth (`weights`).
    """

    acceptance: float
    whose: str
    repetition: float | None
    weight: float

    @property
    def good_chance(self) -> float:
        """The chance of a token of a draft that goes well."""
        shift = GOOD_DRAFT
        if self.repetition is not None:
            shift += REPETITION_SLOPE * (self.repetition - USUAL_REPETITION)
        chance = min(max(self.acceptance, _LEAST_CHANCE), 1.0 - _LEAST_CHANCE)
        return 1.0 / (1.0 + (1.0 - chance) / chance * math.exp(-shift))

    def survival(self, slot: int) -> float:
        """Return the chance of slot 1, 2, ... of a draft that goes well."""
        return self.good_chance**slot

    def paying_slots(self, price: float, most: int) -> int:
        """Return how many slots are worth more than the price, at most so many."""
        chance, slots = self.good_chance, 0
        while slots < most and self.weight * chance ** (slots + 1) > price:
            slots += 1
        return slots


def forecast(request: RequestView, load: WorkerLoad, proposer: str) -> RequestForecast:
    """Return what is expected of a request's drafts on a worker.

    A request with a target for the time of a token is taken to be late: it is then that it needs
    its slots, and no one knows yet whether it will be.

    Args:
        proposer: what may draft, by name or `ANY_PROPOSER`.
    """
    acceptance, whose = load.acceptance, "of this worker"
    levels = (request.model_drafts, "of all tenants"), (request.tenant_drafts, "of this tenant")
    for counts, words in levels:
        acceptance = _shrunk(counts, acceptance)
        if counts.agreed + counts.rejected >= HISTORY_TOKENS:
            whose = words
    looked_up = SpeculationMode.NGRAM.value
    looks_up = looked_up in (load.proposers if proposer == ANY_PROPOSER else (proposer,))
    late_s = None if request.service.tpot_s is None else 0.0
    return RequestForecast(
        acceptance,
        whose,
        request.repetition if looks_up else None,
        weight(late_s, request.service),
    )


def _shrunk(counts: DraftCounts, towards: float) -> float:
    tested = counts.agreed + counts.rejected
    return (counts.agreed + towards * HISTORY_TOKENS) / (tested + HISTORY_TOKENS)
