"""The load of an upstream: what is counted here, and what it tells of itself."""

from __future__ import annotations

from typing import Final

from draftgate.backends.openai.metrics.polling import POLL_S
from draftgate.backends.openai.metrics.reading import Reading
from draftgate.backends.openai.metrics.tally import DraftTally
from draftgate.backends.openai.speed import ObservedSpeed
from draftgate.policies.concurrency_estimate import next_estimate
from draftgate.policies.speculation.upstream_speculation import (
    DraftMeans,
    acceptance_chance,
    fixed_draft_price,
)
from draftgate.policies.types import WorkerLoad

STALE_S: Final = 5 * POLL_S
"""Older readings count for nothing: what others send there is over by then, or unknown."""

UPSTREAM_PROPOSER: Final = "upstream"
"""Name of whatever an upstream drafts with: nobody here can choose."""


class ToldLoad:
    """What one upstream told, with its age.

    Attributes:
        drafts: whether it speculates: as was declared, or as it tells.
    """

    def __init__(self, seats: int, drafts: bool | None) -> None:
        """Begin with nothing told.

        Args:
            seats: that it is declared to have; 0 leaves it to what it tells.
            drafts: whether it is declared to speculate; None leaves it to what it tells.
        """
        self.drafts = bool(drafts)
        self._declared_drafts = drafts
        self._declared_seats = seats
        self._told_seats = self._seen_seats = 0
        self._tally = DraftTally()
        self._reading: Reading | None = None
        self._read_s = 0.0
        self._others = 0

    def learn(self, reading: Reading, sent: int, now_s: float) -> None:
        """Take in a reading.

        Args:
            sent: this gateway's sequences there while it was made, which it counts, too.
        """
        self._reading, self._read_s = reading, now_s
        self._others = max(reading.running + reading.waiting - sent, 0)
        self._seen_seats = next_estimate(self._seen_seats, reading.running, reading.waiting)
        if reading.totals is not None:
            self._tally.learn(reading.totals)
        if self._declared_drafts is None:
            self.drafts = self.drafts or reading.drafts  # its counters may begin anew

    def learn_seats(self, seats: int | None) -> None:
        """Take in how many seats it says to have, beside its metrics; None is no news."""
        self._told_seats = seats or self._told_seats

    def load(self, sent: int, speed: ObservedSpeed, now_s: float) -> WorkerLoad:
        """Return the load with so many sequences of this gateway's there now."""
        reading, age_s = self._reading, now_s - self._read_s
        if reading is None or age_s > STALE_S:
            return self._loaded(sent, None, speed, None)
        return self._loaded(sent, reading, speed, age_s)

    def _loaded(
        self, sent: int, reading: Reading | None, speed: ObservedSpeed, age_s: float | None
    ) -> WorkerLoad:
        others = self._others if reading is not None else 0
        waiting = min(reading.waiting, sent + others) if reading is not None else 0
        running = sent + others - waiting
        blocks = reading.kv_blocks if reading is not None else 0
        usage = reading.kv_usage if reading is not None else None
        if usage is None:
            blocks = 0  # what is free nobody knows
        price, acceptance, drafted = self._drafting(reading, running, speed)
        return WorkerLoad(
            running,
            waiting,
            round(blocks * (1.0 - (usage or 0.0))),
            blocks,
            price,
            acceptance,
            (UPSTREAM_PROPOSER,) if self.drafts else (),
            max_sequences=self._seats(reading),
            kv_block_tokens=reading.kv_block_tokens if reading is not None else 16,
            speed=speed.speed(running, 1.0 + drafted),
            others=others,
            draft_tokens=drafted,
            age_s=age_s,
        )

    def _seats(self, reading: Reading | None) -> int:
        """Return the seats: declared, else told, else seen while that is fresh; 0: unknown."""
        if self._declared_seats or reading is None:
            return self._declared_seats or self._told_seats
        return reading.max_sequences or self._told_seats or self._seen_seats

    def _drafting(
        self, reading: Reading | None, running: int, speed: ObservedSpeed
    ) -> tuple[float, float, float]:
        """Return the price of a slot, the chance of a draft token, and the mean draft."""
        if not self.drafts:
            return 0.0, 0.0, 0.0
        means = self._means(reading)
        told = reading.acceptance if reading is not None else None
        acceptance = acceptance_chance(means) if told is None else told
        if reading is not None and reading.price is not None:
            return reading.price, acceptance, means.drafted
        share = speed.batch.share(running, 1.0 + means.drafted)
        return fixed_draft_price(share, means), acceptance, means.drafted

    def _means(self, reading: Reading | None) -> DraftMeans:
        if reading is not None and reading.means is not None:
            return reading.means
        return self._tally.means
