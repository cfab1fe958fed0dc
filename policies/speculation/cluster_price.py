"""A worker's price after the arrival of all requests leased since its last report.

A report is up to a heartbeat old, and requests leased after its watermark have not arrived yet. A
gateway learns of a burst at another gateway with its next reservation (`behind_tokens`). That is
long before the worker has batched the burst and published its new price. The cap on a request's
drafts therefore uses the price that the request will meet. The worker computes its price as

    price = tokens per second x seconds by which a slot lengthens the step     (`price`)

The time of a slot does not depend on the batch, so the price rises with tokens per second. In a
step of n sequences

    tokens per second = n / (step_s + (n - 1) x step_sequence_s)

by the reported speeds. The time of a slot follows from the reported price, with a lower bound. The
bound is the time of a token in a full step or the time of another sequence, whichever is less.

On the scales of H100 and H200, the result is 3% below to 15% above the price that the worker
reaches. That holds from 8 to 256 sequences that fill a stair, at contexts up to 8,000 tokens. From
an idle worker, the result is as close for short contexts. It is too high for long contexts, whose
length is unknown: double for 256 sequences of 1,500 tokens. On coarse stairs such as a CPU's,
single sequences double the price itself, and so the projection too. (Shipped profiles, 2026-11-22,
`tests/policies/test_cluster_price.py`.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from msgspec import structs

from draftgate.policies.capacity import CapacityNeed
from draftgate.policies.speculation.price import LEAST_S
from draftgate.policies.types import WorkerLoad

_FORGETTING: Final = 0.98
"""Decay of the mean need per request, which averages about the last fifty, as for output lengths
(`output_history`). (Chosen, not tuned, 2026-11-22.)"""


def project_load(load: WorkerLoad, behind_tokens: int, usual: CapacityNeed) -> WorkerLoad:
    """Return a worker's load after the arrival of the requests leased since its report.

    Leased requests run as far as the worker can run more sequences, and the rest wait. The price
    never falls, and it rises with the leased tokens. Without leases or a known speed, the price is
    the reported one. Requests that have ended since the report still count.

    Args:
        load: reported load.
        behind_tokens: prompt and output tokens leased after the report's watermark, without the
            request to decide about (`Reservation.behind_tokens`).
        usual: mean need of a leased request (`MeanNeed`), without `tpot_s`.
    """
    if behind_tokens <= 0:
        return load
    requests = behind_tokens / max(usual.most_tokens, 1)
    arriving = requests * usual.sequences
    free = max(load.max_sequences - load.running - load.waiting, 0)
    joining = min(arriving, free) if load.max_sequences else arriving
    prompt_tokens = round(requests * usual.prompt_tokens)
    blocks = -(-prompt_tokens // load.kv_block_tokens)
    return structs.replace(
        load,
        running=load.running + round(joining),
        waiting=load.waiting + round(arriving) - round(joining),
        kv_blocks_free=max(load.kv_blocks_free - blocks, 0),
        prompt_tokens=load.prompt_tokens + prompt_tokens,
        price=load.price + price_rise(load, joining),
    )


@dataclass(slots=True)
class MeanNeed:
    """Running means of the needs of placed requests."""

    _requests: float = 0.0
    _sequences: float = 0.0
    _prompt_tokens: float = 0.0
    _most_tokens: float = 0.0

    def add_request(self, need: CapacityNeed) -> None:
        """Learn from a placed request."""
        self._requests = self._requests * _FORGETTING + 1.0
        self._sequences += (need.sequences - self._sequences) / self._requests
        self._prompt_tokens += (need.prompt_tokens - self._prompt_tokens) / self._requests
        self._most_tokens += (need.most_tokens - self._most_tokens) / self._requests

    @property
    def need(self) -> CapacityNeed:
        """The mean request in whole numbers, with at least one sequence and one token."""
        return CapacityNeed(
            max(round(self._sequences), 1),
            round(self._prompt_tokens),
            max(round(self._most_tokens), 1),
        )


def price_rise(load: WorkerLoad, joining: float) -> float:
    """Return by how much the price rises as sequences join, or 0 if no speed is known."""
    speed = load.speed
    if speed.step_s <= 0.0:
        return 0.0
    alone_s = max(speed.step_s, LEAST_S)
    # Each sequence lengthens a step by at most its time alone, so the rate never falls.
    more_s = min(speed.step_sequence_s, alone_s)
    running, after = load.running, load.running + joining
    before_s, after_s = (alone_s + max(n - 1.0, 0.0) * more_s for n in (running, after))
    slot_s = min(speed.step_token_s, speed.step_sequence_s)
    if not running:
        return after / after_s * slot_s
    slot_s = max(slot_s, load.price * before_s / running)
    # after / after_s - running / before_s, in a form whose rounding errors do not make it fall
    return joining * (alone_s - more_s) / (before_s * after_s) * slot_s
