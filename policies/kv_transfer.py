"""Whether a worker pulls a prefix from another worker or computes it.

    pull    = latency + (queued bytes + bytes) / bandwidth
    compute = tokens x step_token_s + steps x running x step_sequence_s + pairs x pair_s
    pairs   = tokens x (known tokens + tokens / 2),    steps = tokens / step tokens

A pull pays if it takes less time than computing the same tokens at the destination's load. The
tokens of running sequences share the steps of a prompt. The number of pairs grows with the square
of the tokens, so a long prefix pays at a low bandwidth: 40 MB/s for 1,000 tokens of the shipped
model, and 10 MB/s for 8,000 (one core, AVX-512 machine, 2026-11-23).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from draftgate.policies.types import WorkerLoad

PRIOR_BYTES_PER_S: Final = 1e9
"""Bandwidth of a link without a recent measurement. The value is high, because a transfer that is
too slow ends when computing would have ended, and its blocks remain useful. A transfer that is not
tried measures nothing. (Chosen, not tuned, 2026-11-23.)"""

PRIOR_LATENCY_S: Final = 2e-3
"""Seconds until the first block of a transfer arrives: two turns of busy threads in one process.
(Chosen, not tuned, 2026-11-23.)"""

MEASURED_S: Final = 60.0
"""Seconds for which a measured bandwidth counts. Afterwards the link is tried again, because its
load may have changed. (Chosen, not tuned, 2026-11-23.)"""

NEWEST_WEIGHT: Final = 0.3
"""Weight of the newest transfer in the mean bandwidth of a link, as in TCP's round-trip estimate of
a few recent samples. (Chosen, not tuned, 2026-11-23.)"""


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """The measured bandwidth of a link between two workers.

    Attributes:
        bytes_per_s: mean bandwidth of recent transfers, more than 0.
        measured_s: time of the last measurement.
    """

    bytes_per_s: float = PRIOR_BYTES_PER_S
    measured_s: float = -MEASURED_S

    def is_known(self, now_s: float) -> bool:
        """Return whether a measurement is recent enough to count."""
        return now_s - self.measured_s < MEASURED_S

    def at(self, now_s: float) -> float:
        """Return the expected bandwidth in bytes per second at a time."""
        return self.bytes_per_s if self.is_known(now_s) else PRIOR_BYTES_PER_S

    def measured(self, num_bytes: int, seconds: float, now_s: float) -> LinkSpeed:
        """Return the speed after a transfer of at least one byte in more than 0 seconds."""
        latest = num_bytes / seconds
        if not self.is_known(now_s):
            return LinkSpeed(latest, now_s)
        return LinkSpeed(self.bytes_per_s + NEWEST_WEIGHT * (latest - self.bytes_per_s), now_s)


class PullReason(StrEnum):
    """The reason for a decision between a pull and computation."""

    FASTER = "faster"
    """The pull takes less time."""
    SLOWER = "slower"
    """Computing takes less time, or as long."""
    NOTHING = "nothing"
    """No other worker of the class holds more of the prefix."""
    UNKNOWN_SPEED = "unknown_speed"
    """The destination has not reported its step costs."""
    MOVE = "move"
    """The request still runs on the source, so the pull delays nothing."""


@dataclass(frozen=True, slots=True)
class PullView:
    """A prefix that a worker could pull.

    Attributes:
        tokens: tokens that the source holds and the destination lacks.
        known_tokens: tokens before them, which the destination holds.
        num_bytes: KV bytes of `tokens`.
        queued_bytes: bytes of transfers to the destination that are under way.
        bytes_per_s: expected bandwidth.
        load: load of the destination.
    """

    tokens: int
    known_tokens: int
    num_bytes: int
    queued_bytes: int
    bytes_per_s: float
    load: WorkerLoad


@dataclass(frozen=True, slots=True)
class PullDecision:
    """A decision with the compared figures.

    Attributes:
        pull_s, compute_s: predicted seconds, or 0 if they were not compared.
    """

    reason: PullReason
    pull_s: float = 0.0
    compute_s: float = 0.0

    @property
    def pulls(self) -> bool:
        """Whether to pull the prefix."""
        return self.reason in {PullReason.FASTER, PullReason.MOVE}


def decide_pull(view: PullView) -> PullDecision:
    """Return whether the destination pulls a prefix."""
    if view.tokens <= 0:
        return PullDecision(PullReason.NOTHING)
    if view.load.speed.step_token_s <= 0.0:
        return PullDecision(PullReason.UNKNOWN_SPEED)
    pull_s = PRIOR_LATENCY_S + (view.queued_bytes + view.num_bytes) / view.bytes_per_s
    compute_s = _compute_s(view)
    reason = PullReason.FASTER if pull_s < compute_s else PullReason.SLOWER
    return PullDecision(reason, pull_s, compute_s)


def visible_s(transfer_s: float, compute_s: float, chunks: int) -> float:
    """Return the seconds of a transfer that remain when the source has computed the prompt.

    Each chunk is sent while later chunks are computed. With L chunks that take x to send and c to
    compute, the result is max(x, L x - (L - 1) c).

    Args:
        transfer_s: seconds to send all chunks, L x.
        compute_s: seconds to compute all chunks, L c.
        chunks: number of chunks, at least 1.
    """
    hidden_s = compute_s * (chunks - 1) / chunks
    return max(transfer_s / chunks, transfer_s - hidden_s)


def _compute_s(view: PullView) -> float:
    """Return the seconds in which the destination computes the tokens at its load."""
    tokens, load = view.tokens, view.load
    pairs = tokens * (view.known_tokens + tokens / 2)
    steps = tokens / load.step_tokens if load.step_tokens else 1.0
    decodes_s = steps * load.running * load.speed.step_sequence_s
    return tokens * load.speed.step_token_s + decodes_s + pairs * load.speed.pair_s
