"""The load of an upstream, from this gateway's counts and the upstream's reports."""

from __future__ import annotations

import math
from typing import Final

from draftgate.backends.openai.metrics import DraftCounters, EngineMetrics
from draftgate.backends.openai.monitor import POLL_S
from draftgate.policies.concurrency_estimate import next_estimate
from draftgate.policies.speculation.survival import PRIOR_ACCEPTANCE
from draftgate.policies.speculation.upstream_speculation import (
    BatchShare,
    DraftMeans,
    expected_accepted,
    fixed_draft_price,
    upstream_acceptance,
)
from draftgate.policies.types import WorkerLoad, WorkerSpeed

STALE_S: Final = 5 * POLL_S
"""Age in seconds from which metrics are ignored, because the counted requests of other clients have
ended by then."""

KNOWN_S: Final = 0.1
"""Seconds for which a load is used again, because only its age has changed."""

UPSTREAM_PROPOSER: Final = "upstream"
"""Proposer name of an upstream, which a gateway cannot choose."""

HALF_LIFE_DRAFTS: Final = 2000.0
"""Number of drafts after which older drafts weigh half: a second or two of a busy engine, minutes
of a quiet engine. (Chosen, not tuned, 2026-11-22.)"""

PRIOR_DRAFTS: Final = 8.0
"""Weight of the prior, in drafts."""

PRIOR_DRAFT_TOKENS: Final = 4.0
"""Prior draft length: the middle of usual settings (vLLM's examples have 3 to 5)."""

PRIOR: Final = DraftMeans(
    PRIOR_DRAFT_TOKENS, expected_accepted(PRIOR_ACCEPTANCE, PRIOR_DRAFT_TOKENS)
)

SPEED_WEIGHT: Final = 0.2
"""Weight of the newest response in the running means, which cover about the last ten."""


class UpstreamDrafts:
    """Means of an engine's latest drafts, from counters that restart with the engine."""

    def __init__(self) -> None:
        self._drafts = PRIOR_DRAFTS
        self._drafted = PRIOR_DRAFTS * PRIOR.drafted
        self._accepted = PRIOR_DRAFTS * PRIOR.accepted
        self._last = DraftCounters(0.0, 0.0, 0.0)

    @property
    def means(self) -> DraftMeans:
        """The means of the latest drafts."""
        drafted = self._drafted / self._drafts
        return DraftMeans(drafted, min(self._accepted / self._drafts, drafted))

    def add_counters(self, counters: DraftCounters) -> None:
        """Add the counts since the last call, limited to `HALF_LIFE_DRAFTS` drafts."""
        last, self._last = self._last, counters
        if any(now < before for now, before in zip(counters, last, strict=True)):
            last = DraftCounters(0.0, 0.0, 0.0)  # the engine was restarted
        drafts, drafted, accepted = (now - old for now, old in zip(counters, last, strict=True))
        if drafts <= 0.0:
            return
        kept = 0.5 ** (drafts / HALF_LIFE_DRAFTS)
        weight = min(1.0, HALF_LIFE_DRAFTS / drafts)
        self._drafts = self._drafts * kept + drafts * weight
        self._drafted = self._drafted * kept + drafted * weight
        self._accepted = self._accepted * kept + accepted * weight


class ObservedSpeed:
    """Running means over the streams that ended completely.

    Attributes:
        batch: growth of the times per token with the sequences in the batch.
    """

    def __init__(self) -> None:
        self.batch = BatchShare()
        self._tpot_s = self._running = 0.0
        self._prompt_token_s = 0.0

    def add_first_byte(self, seconds: float, prompt_tokens: float) -> None:
        """Add the time from a request to its first byte, which includes the upstream's queue."""
        self._prompt_token_s = _mean(self._prompt_token_s, seconds / max(1.0, prompt_tokens))

    def add_stream(self, seconds: float, tokens: int, choices: int, running: float) -> None:
        """Add a stream.

        Args:
            seconds: seconds from its first to its last byte.
            tokens: number of tokens in all its choices.
            running: mean number of concurrent sequences on the upstream.
        """
        gaps = tokens - choices
        if gaps <= 0 or seconds <= 0.0:
            return
        tpot_s, running = seconds * choices / gaps, max(running, 1.0)
        self._tpot_s, self._running = _mean(self._tpot_s, tpot_s), _mean(self._running, running)
        self.batch.add_stream(tpot_s, running)

    def speed(self, running: int = 1, step_tokens: float = 1.0) -> WorkerSpeed:
        """Return the speed with this many sequences, so that a busy time does not count as slow.

        Args:
            running: present number of sequences, where 0 counts as 1.
            step_tokens: tokens of each sequence per step, including drafts.
        """
        if not self._tpot_s:
            return WorkerSpeed(0.0, self._prompt_token_s)
        slope_s, sequences = self.batch.slope_s(step_tokens), max(running, 1)
        tpot_s = max(self._tpot_s + slope_s * (sequences - self._running), slope_s * sequences)
        return WorkerSpeed(tpot_s, self._prompt_token_s, slope_s)


class UpstreamLoad:
    """The known part of an upstream's load.

    Attributes:
        drafts: whether the upstream speculates, as declared or reported.
    """

    def __init__(self, max_sequences: int, drafts: bool | None) -> None:
        """Start without metrics.

        Args:
            max_sequences: declared maximum number of concurrent sequences, or 0 to use reports.
            drafts: whether the upstream is declared to speculate, or None to use reports.
        """
        self.drafts = bool(drafts)
        self._cached_blocks = 0
        self.speed = ObservedSpeed()
        self._declared_drafts = drafts
        self._declared_sequences = max_sequences
        self._slots = self._estimated_sequences = 0
        self._recent_drafts = UpstreamDrafts()
        self._metrics = EngineMetrics()
        self._updated_s = -math.inf
        self._others = 0
        self._known: dict[int, WorkerLoad] = {}  # until `_known_until_s`, by sequences
        self._known_until_s = -math.inf

    def update(self, metrics: EngineMetrics, sent: int, now_s: float) -> None:
        """Apply new metrics.

        Args:
            sent: number of sequences of this gateway at that time, which the metrics include.
        """
        self._known = {}
        running, waiting = metrics.running, metrics.waiting
        self._metrics, self._updated_s = metrics, now_s
        self._others = max(running + waiting - sent, 0)
        self._estimated_sequences = next_estimate(self._estimated_sequences, running, waiting)
        if metrics.counters is not None:
            self._recent_drafts.add_counters(metrics.counters)
        if self._declared_drafts is None:
            # The counters of the engine may restart at 0.
            self.drafts = self.drafts or metrics.drafts

    def set_slots(self, slots: int) -> None:
        """Set the number of slots that the upstream reports outside its metrics."""
        self._slots = slots
        self._known = {}

    def set_cached_blocks(self, blocks: int) -> None:
        """Set the number of blocks in its cache, by its events."""
        if blocks != self._cached_blocks:
            self._cached_blocks = blocks
            self._known = {}

    def learning(self) -> ObservedSpeed:
        """Return the speed, which the caller changes."""
        self._known = {}
        return self.speed

    def running(self, sent: int, now_s: float) -> int:
        """Return the number of running sequences, as `load` does."""
        if now_s - self._updated_s > STALE_S:
            return sent
        return max(sent + self._others - self._metrics.waiting, 0)

    def load(self, sent: int, now_s: float) -> WorkerLoad:
        """Return the load, whose age may be `KNOWN_S` more than it says.

        Args:
            sent: present number of sequences of this gateway on the upstream.
        """
        if now_s > self._known_until_s:
            self._known = {}
        known = self._known.get(sent)
        if known is None:
            if not self._known:
                stale_s = self._updated_s + STALE_S
                fresh = now_s <= stale_s
                self._known_until_s = min(now_s + KNOWN_S, stale_s) if fresh else math.inf
            known = self._known[sent] = self._load(sent, now_s)
        return known

    def _load(self, sent: int, now_s: float) -> WorkerLoad:
        metrics, others, age_s = self._metrics, self._others, now_s - self._updated_s
        fresh = age_s <= STALE_S
        if not fresh:
            metrics, others = EngineMetrics(), 0
        running = self.running(sent, now_s)
        waiting = sent + others - running
        usage = metrics.kv_usage
        blocks = 0 if usage is None else metrics.kv_blocks
        max_sequences = self._declared_sequences or metrics.max_sequences or self._slots
        price, acceptance, drafted = self._drafting(metrics, running)
        return WorkerLoad(
            running,
            waiting,
            round(blocks * (1.0 - (usage or 0.0))),
            blocks,
            price,
            acceptance,
            (UPSTREAM_PROPOSER,) if self.drafts else (),
            max_sequences=max_sequences or (self._estimated_sequences if fresh else 0),
            kv_block_tokens=metrics.kv_block_tokens,
            speed=self.speed.speed(running, 1.0 + drafted),
            others=others,
            draft_tokens=drafted,
            age_s=age_s if fresh else None,
            cached_blocks=self._cached_blocks,
        )

    def _drafting(self, metrics: EngineMetrics, running: int) -> tuple[float, float, float]:
        """Return the price of a slot, the acceptance of a draft token and the mean draft length."""
        if not self.drafts:
            return 0.0, 0.0, 0.0
        means = metrics.means or self._recent_drafts.means
        acceptance = metrics.acceptance
        if acceptance is None:
            acceptance = upstream_acceptance(means)
        if metrics.price is not None:
            return metrics.price, acceptance, means.drafted
        share = self.speed.batch.share(running, 1.0 + means.drafted)
        return fixed_draft_price(share, means), acceptance, means.drafted


def _mean(mean: float, newest: float) -> float:
    return newest if mean == 0.0 else mean + SPEED_WEIGHT * (newest - mean)
