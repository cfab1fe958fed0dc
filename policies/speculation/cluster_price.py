"""A worker's price once all has arrived there that gateways have leased since it reported.

A report is up to a heartbeat old. What was leased behind its watermark is on its way: a burst that
one gateway places is known to all others with their next reservation (`behind_tokens`), long before
the worker has batched it and published what slots cost beside it. So who decides how far a request
may draft looks at the price that it will meet. The worker forms its price as

    price = tokens of a second x seconds by which a slot lengthens the step     (`price`)

A slot takes what it takes, whoever joins; so the price rises with tokens a second. In a step of n

    tokens of a second = n / (step_s + (n - 1) x step_sequence_s)

by the speeds that the worker reports, and what a slot takes follows from the price that it reports,
or is what a token takes at least: the less of one in a full step and of one more sequence. On the
scales of H100 and H200 that is 3% below to 15% above the price which the worker comes to, from 8 to
256 sequences and at contexts up to 8,000 tokens, counts of sequences taken that fill a stair. From
an idle worker it is as near for short contexts and too high for long ones, of which nothing is
known (twice for 256 sequences of 1,500 tokens). On steps of coarse stairs, as a CPU's, the price
itself jumps by times two with each sequence, and so does the projection. (Shipped profiles,
2026-11-22; `tests/policies/test_cluster_price.py`.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from msgspec import structs

from draftgate.policies.capacity import CapacityNeed
from draftgate.policies.speculation.price import LEAST_S
from draftgate.policies.types import WorkerLoad, WorkerSpeed

FORGETTING: Final = 0.98
"""What a request leaves of all before it in what is usual: the last fifty decide, as with lengths
of output (`output_history`). (Chosen, not tuned; 2026-11-22.)"""


def projected(load: WorkerLoad, behind_tokens: int, usual: CapacityNeed) -> WorkerLoad:
    """Return the load that a worker will have once the leases behind its report have arrived.

    They take seats as far as there are some, and wait beyond. The price never falls, rises with the
    tokens, and is the reported one where nothing is behind, or no speed is known. What has ended
    since the report is not known, and still counts.

    Args:
        load: as reported.
        behind_tokens: of prompts and outputs, leased behind the report's watermark, the request
            that is decided about left out (`Reservation.behind_tokens`).
        usual: what one of the leased requests takes (`MeanNeed`); `tpot_s` is not looked at.
    """
    if behind_tokens <= 0:
        return load
    requests = behind_tokens / max(usual.most_tokens, 1)
    come = requests * usual.sequences
    joining = come if not load.max_sequences else min(come, _free_seats(load))
    prompt_tokens = round(requests * usual.prompt_tokens)
    blocks = -(-prompt_tokens // load.kv_block_tokens)
    return structs.replace(
        load,
        running=load.running + round(joining),
        waiting=load.waiting + round(come) - round(joining),
        kv_blocks_free=max(load.kv_blocks_free - blocks, 0),
        prompt_tokens=load.prompt_tokens + prompt_tokens,
        price=load.price + _rise(load, joining),
    )


@dataclass(slots=True)
class MeanNeed:
    """What requests usually take: running means over those that were placed.

    Attributes:
        need: of the mean request; of nothing at all before the first.
    """

    _requests: float = 0.0
    _sequences: float = 0.0
    _prompt_tokens: float = 0.0
    _most_tokens: float = 0.0

    def note(self, need: CapacityNeed) -> None:
        """Note that a request is placed."""
        self._requests = self._requests * FORGETTING + 1.0
        self._sequences += (need.sequences - self._sequences) / self._requests
        self._prompt_tokens += (need.prompt_tokens - self._prompt_tokens) / self._requests
        self._most_tokens += (need.most_tokens - self._most_tokens) / self._requests

    @property
    def need(self) -> CapacityNeed:
        """The mean request, in whole numbers, with a sequence and a token at least."""
        return CapacityNeed(
            max(round(self._sequences), 1),
            round(self._prompt_tokens),
            max(round(self._most_tokens), 1),
        )


def _free_seats(load: WorkerLoad) -> int:
    return max(load.max_sequences - load.running - load.waiting, 0)


def _rise(load: WorkerLoad, joining: float) -> float:
    """Return by how much the price rises with so many more sequences; 0 where no speed is known."""
    speed = load.speed
    if speed.step_s <= 0.0:
        return 0.0
    before, after = (_tokens_per_s(speed, n) for n in (load.running, load.running + joining))
    slot_s = min(speed.step_token_s, speed.step_sequence_s)
    if before > 0.0:
        slot_s = max(slot_s, load.price / before)
    return max(after - before, 0.0) * slot_s


def _tokens_per_s(speed: WorkerSpeed, sequences: float) -> float:
    """Return the tokens of a second in steps of so many sequences, without drafts.

    Never fewer for more of them: none lengthens a step by more than one takes alone.
    """
    alone_s = max(speed.step_s, LEAST_S)
    more_s = min(speed.step_sequence_s, alone_s)
    return sequences / (alone_s + max(sequences - 1.0, 0.0) * more_s)
