"""Moves of running streams to other workers: which stream moves next, and when its source stops.

A move copies the KV blocks of a stream in *stages* while the stream runs on its source. Each stage
copies the blocks that were filled during the stage before. Then the destination computes the last
tokens and continues, and the source stops (Llumnix, arXiv 2406.03243). The *gap* is the extra pause
of the client.

    copy      = sum of the stages
    stage     = latency + bytes of the missing tokens / bandwidth
    missing   = tokens that the source adds during the stage before
    gap       = step_s + (tokens of missing blocks + block tokens / 2) x step_token_s
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from draftgate.policies.kv_transfer import PRIOR_LATENCY_S
from draftgate.policies.types import WorkerSpeed

MOST_MOVES: Final = 4
"""Moves from leaving workers that copy blocks at the same time. A single move leaves most of the
link unused, because a worker copies only between two steps. Further moves verify tokens meanwhile.
(Chosen, not tuned, 2026-11-23.)"""

MOST_STAGES: Final = 3
"""Stages of a copy before the source stops or the move is given up, as in Llumnix."""

MOST_COMPUTED_BLOCKS: Final = 3
"""Full blocks of a choice that may be missing when the source stops after the last stage. The
destination computes them in its first step, with the tokens of the last block. These are at most 64
tokens, which take less time than a further transfer. (Chosen, not tuned, 2026-11-23.)"""

WAIT_S: Final = 0.25
"""Time in seconds for which a move waits until the source has filled a block, so that the
destination computes few tokens. (Chosen, not tuned, 2026-11-23.)"""

VERIFIED_TOKENS: Final = 8
"""Tokens of the source that the destination must compute too before the switch. It verifies them as
drafts, in its first step. (Chosen, not tuned, 2026-11-23.)"""

MOVE_S: Final = 10.0
"""Time in seconds after which a move is given up, as in Llumnix. The destination holds imported
blocks for as long."""

ROOM_S: Final = 1.0
"""Time in seconds for which a move waits for room on a destination, before another stream has its
turn. (Chosen, not tuned, 2026-11-23.)"""

RETRY_S: Final = 1.0
"""Time in seconds until a stream whose move did not succeed may move again. (Chosen, not tuned,
2026-11-23.)"""

MOST_FAILURES: Final = 3
"""Failed moves of a stream after which it stays on its worker. (Chosen, not tuned, 2026-11-23.)"""


STALL_S: Final = 0.5
"""Time in seconds without a token after which the source of a move has probably preempted the
stream. Steps of large prompt chunks take a few tenths of a second. (Chosen, not tuned,
2026-11-23.)"""


class MoveReason(StrEnum):
    """The reason for a move."""

    DRAIN = "drain"
    """The source is leaving."""
    BALANCE = "balance"
    """The source has much less free memory per sequence than the destination."""
    FASTER = "faster"
    """The streams of both workers end sooner."""
    MAKE_ROOM = "make_room"
    """The next request in the queue needs the memory of the source."""
    PHASES = "phases"
    """The source has computed the prompt, and the destination computes the output."""


class MoveEnd(StrEnum):
    """How a move ended."""

    MOVED = "moved"
    """The stream continues on the destination."""
    ENDED = "ended"
    """The stream ended, lost its source or lost its client before the source could stop."""
    TAKEN = "taken"
    """Another move to or from one of the workers was under way, or the store did not respond."""
    NO_ROOM = "no_room"
    """No destination had room for the stream, or for its blocks."""
    BEHIND = "behind"
    """The source filled blocks faster than they were copied."""
    REJECTED = "rejected"
    """The destination computed another token than the source, although their class is exact."""
    LATE = "late"
    """The move took longer than `MOVE_S`."""
    FAILED = "failed"
    """The destination failed, or a block was damaged."""


@dataclass(frozen=True, slots=True)
class MoveView:
    """A running stream that could move.

    Attributes:
        tokens: tokens of prompt and output whose blocks the destination lacks, of all choices.
        left_tokens: most tokens that a choice may still generate.
        choices: number of choices that run.
        token_bytes: KV bytes of a token.
        block_tokens: tokens of a block.
        bytes_per_s: expected bandwidth to a destination.
        speed: speed of the source, which the destination is expected to have too.
        failures: number of its failed moves.
    """

    tokens: int
    left_tokens: int
    choices: int
    token_bytes: int
    block_tokens: int
    bytes_per_s: float
    speed: WorkerSpeed
    failures: int = 0


@dataclass(frozen=True, slots=True)
class MoveForecast:
    """The prediction for a move, in seconds.

    Attributes:
        copy_s: time of all stages.
        gap_s: extra pause of the client.
    """

    copy_s: float
    gap_s: float


def predict_move(view: MoveView) -> MoveForecast:
    """Return the predicted times of a move."""
    speed, copy_s = view.speed, 0.0
    missing = float(view.tokens)
    for _ in range(MOST_STAGES):
        stage_s = _stage_s(view, missing)
        copy_s += stage_s
        missing = view.choices * stage_s / speed.tpot_s if speed.tpot_s > 0.0 else 0.0
        if missing < view.block_tokens:
            missing = 0.0
            break
    computed = missing + view.choices * view.block_tokens / 2
    return MoveForecast(copy_s, speed.step_s + computed * speed.step_token_s)


def _stage_s(view: MoveView, missing: float) -> float:
    return PRIOR_LATENCY_S + missing * view.token_bytes / view.bytes_per_s


def next_move(views: Sequence[MoveView]) -> int | None:
    """Return the index of the stream that moves next, or None if every stream stays for now.

    The stream with the shortest predicted gap is first, and among equals the one with the shortest
    copy. The worker therefore soon has few streams left. A stream that would end before it could
    move stays.
    """
    worth = [
        (forecast.gap_s, forecast.copy_s, index)
        for index, view in enumerate(views)
        if view.failures < MOST_FAILURES
        for forecast in (predict_move(view),)
        if view.left_tokens * view.speed.tpot_s > forecast.copy_s or not view.speed.tpot_s
    ]
    return min(worth)[2] if worth else None


class MoveStep(StrEnum):
    """The next step of a move."""

    COPY = "copy"
    """Copy the blocks that were filled meanwhile."""
    WAIT = "wait"
    """Wait for the next token of the source."""
    STOP = "stop"
    """Stop the source, and continue on the destination."""
    GIVE_UP = "give_up"
    """Leave the stream on its source."""


@dataclass(frozen=True, slots=True)
class Missing:
    """The part of a choice that the destination lacks after a stage.

    Attributes:
        tokens: tokens that are in none of its blocks, at least 1.
        context_tokens: all tokens of the choice.
        block_tokens: tokens of a block.
        speed: speed of the source, which the destination is expected to have too.
    """

    tokens: int
    context_tokens: int
    block_tokens: int
    speed: WorkerSpeed

    @property
    def blocks(self) -> int:
        """Number of full blocks. The last token of a context is always computed."""
        return (self.tokens - 1) // self.block_tokens

    @property
    def lead_s(self) -> float:
        """Extra seconds that the destination needs for these tokens instead of one token."""
        return self.tokens * (self.speed.step_token_s + self.context_tokens * self.speed.pair_s)


def next_step(stages: int, missing: Missing | None, *, preempted: bool = False) -> MoveStep:
    """Return how a move continues.

    The source gets ahead while the destination computes the missing tokens, and the client waits
    for the destination to catch up. A move therefore waits for a full block if this matters.

    Args:
        stages: number of stages so far.
        missing: what the destination lacks, at most, or None before the first stage.
        preempted: whether the source has preempted the stream and lost its blocks. The destination
            then computes them, as the source would have to do once it has memory again.
    """
    if missing is None:
        return MoveStep.COPY
    if preempted:
        return MoveStep.STOP
    if stages < MOST_STAGES:
        if missing.blocks:
            return MoveStep.COPY
        return MoveStep.WAIT if _is_worth_waiting(missing) else MoveStep.STOP
    return MoveStep.STOP if missing.blocks <= MOST_COMPUTED_BLOCKS else MoveStep.GIVE_UP


def _is_worth_waiting(missing: Missing) -> bool:
    tpot_s = missing.speed.tpot_s
    wait_s = (missing.block_tokens - missing.tokens + 1) * tpot_s
    return wait_s <= WAIT_S and missing.lead_s > tpot_s / 2


def may_switch(verified_tokens: int, least: int, *, ended: bool) -> bool:
    """Return whether the stream may switch to the destination once it has caught up.

    Args:
        verified_tokens: tokens that both workers have computed.
        least: least number of them, such as `VERIFIED_TOKENS`.
        ended: whether the destination has ended a choice.
    """
    return verified_tokens >= least or ended
