"""The report of a move of a prompt to another worker."""

from __future__ import annotations

from collections.abc import Callable

from draftgate.gateway.dispatch.decisions import MoveRecord
from draftgate.gateway.dispatch.hold import Hold
from draftgate.gateway.dispatch.kv_pulls import KvFetch
from draftgate.gateway.dispatch.placement import Placer
from draftgate.gateway.dispatch.prompt import Prompt
from draftgate.gateway.dispatch.run import Move
from draftgate.gateway.dispatch.span_attributes import describe_move
from draftgate.policies.moves import MoveEnd, MoveReason
from draftgate.policies.rescheduling.types import ChosenMove


class Migration:
    """A move, from its choice to the first new token of the destination.

    Attributes:
        stages: number of copies so far.
        verified_tokens: number of tokens that both workers have computed.
        sink: id of the destination, or empty while it is unknown.
        chosen: the choice of the policy, or None if the source is leaving.
        now_s: clock in seconds.
        handed_over: whether the prompt continues on the destination, and reports the end itself.
    """

    handed_over = False

    def __init__(
        self,
        prompt: Prompt,
        chosen: ChosenMove | None,
        placer: Placer,
        now_s: Callable[[], float],
    ) -> None:
        """Begin the span of a move.

        Args:
            placer: records the move.
        """
        self.stages = self.verified_tokens = 0
        self.sink = "" if chosen is None else chosen.sink
        self.chosen = chosen
        self.now_s = now_s
        self._prompt = prompt
        self._placer = placer
        self._source = prompt.hold
        self._blocks = self._bytes = 0
        self._last_s: float | None = None  # time of the last delta of the source
        self._span = prompt.run.span.child("migrate")

    @property
    def hands_over(self) -> bool:
        """Whether the source computes only the prompt."""
        return self.chosen is not None and self.chosen.reason is MoveReason.PHASES

    def add_stage(self, fetches: list[KvFetch]) -> None:
        """Add a stage, with the transfers of all choices."""
        self.stages += 1
        self._blocks += sum(fetch.blocks for fetch in fetches)
        self._bytes += sum(fetch.num_bytes for fetch in fetches)

    def note_delta(self) -> None:
        """Record the time of a delta of the source, which may be the last one."""
        self._last_s = self.now_s()

    def hand_over(self, successor: Hold) -> None:
        """Let the prompt continue with the hold on the destination."""
        self.handed_over = True
        self._prompt.hand_over(successor, self.end)

    def end(self, end: MoveEnd) -> None:
        """Report the move, and count a move of the prompt."""
        gap_s, prompt = None, self._prompt
        if end is MoveEnd.MOVED:
            prompt.moves += not self.hands_over
            prompt.moved_s = self.now_s()
        if end is MoveEnd.MOVED and self._last_s is not None:
            gap_s = self.now_s() - self._last_s
        reason = MoveReason.DRAIN if self.chosen is None else self.chosen.reason
        move = Move(
            prompt.index,
            reason,
            end,
            source=self._source.worker.worker_id,
            sink=self.sink,
            stages=self.stages,
            blocks=self._blocks,
            num_bytes=self._bytes,
            verified_tokens=self.verified_tokens,
            gap_s=gap_s,
            chosen=self.chosen,
        )
        run = prompt.run
        self._placer.record_move(run.job, move.index, self._source.decision, _record(move))
        describe_move(self._span, move)
        self._span.end()
        run.watch(move)


def _record(move: Move) -> MoveRecord:
    """Return the record of a move in the decision about its source."""
    chosen = move.chosen
    return MoveRecord(
        move.source,
        move.sink,
        move.reason.value,
        move.end,
        move.stages,
        move.blocks,
        move.num_bytes,
        move.gap_s,
        policy="" if chosen is None else chosen.policy,
        gain=None if chosen is None else chosen.gain,
        threshold=None if chosen is None else chosen.threshold,
        explanation="" if chosen is None else chosen.explanation,
    )
