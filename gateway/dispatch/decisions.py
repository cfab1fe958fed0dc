"""Recorded decisions about requests, with their inputs.

The latest decisions are in memory. All decisions are also written to a file, if configured, as one
JSON object per line. Decisions contain the inputs and the result of the policy, but no text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

from draftgate.backends.types import SpeculationOutcome
from draftgate.gateway.json_lines import JsonLinesFile
from draftgate.policies.moves import MoveEnd
from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.routing.types import Route
from draftgate.policies.speculation.revision import RevisionCause
from draftgate.policies.types import RequestView, SpeculationPlan, WorkerLoad

KEPT: Final = 1000
"""Maximum decisions in memory, which cover a few minutes of a busy node in about a megabyte."""

KEPT_MOVES: Final = 50
"""Maximum moves in the list of the latest moves, which a page can show at once."""

KEPT_MOVES_OF_RUN: Final = 16
"""Maximum moves in a decision. A stream that finds no room tries to move about once a second."""


class RevisionRecord(msgspec.Struct, frozen=True):
    """A revision of a plan, after a number of output tokens of its choice."""

    drafting: bool
    cause: RevisionCause
    output_tokens: int
    reason: str


class PhaseDecision(msgspec.Struct, frozen=True):
    """The decision whether the output of a request is computed on another worker than its prompt.

    Attributes:
        policy: name of the phases policy.
        reason: the decision in words.
        decode_worker_id: the worker of the output, or empty if the request stays on one worker.
        gain_s, threshold_s: predicted seconds that all requests save, and those that are required,
            or 0 without a prediction.
    """

    policy: str
    reason: str
    decode_worker_id: str = ""
    gain_s: float = 0.0
    threshold_s: float = 0.0


class MoveRecord(msgspec.Struct, frozen=True):
    """An attempt to move the request from its worker to another worker, or a failover.

    Attributes:
        source, sink: ids of the workers. The destination is empty if none had room.
        reason: a `MoveReason`, or the cause of a failover (`policies.resilience.failover.Cause`).
        stages: number of copies while the request ran on the source.
        blocks, num_bytes: KV blocks that the destination stored in these stages.
        gap_s: time between the last token of the source and the first new token in seconds, or None
            if the request did not move or lost its worker.
        policy: name of the rescheduling policy, or empty if no policy chose the move.
        gain, threshold: predicted gain and its threshold, or None without a policy.
        explanation: the decision in words, or empty without a policy.
        ended_s: Unix time of the end, which `Decisions.add_move` sets.
    """

    source: str
    sink: str
    reason: str
    end: MoveEnd
    stages: int = 0
    blocks: int = 0
    num_bytes: int = 0
    gap_s: float | None = None
    policy: str = ""
    gain: float | None = None
    threshold: float | None = None
    explanation: str = ""
    ended_s: float = 0.0


class RecentMove(msgspec.Struct, frozen=True):
    """A move of one of the latest requests.

    Attributes:
        request_id: the id of the response.
        prompt: index of the prompt that moved.
    """

    request_id: str
    prompt: int
    tenant: str
    move: MoveRecord


class DecisionOutcome(msgspec.Struct, frozen=True):
    """The result of a plan, summed over all choices.

    Attributes:
        choices: number of choices that have finished.
        spec_steps: number of steps that verified at least one draft token.
        drafted_tokens, accepted_tokens: numbers of verified and accepted draft tokens.
        cost_usd: cost of the response of an upstream in USD, or None without a known cost.
    """

    choices: int = 0
    spec_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    revisions: tuple[RevisionRecord, ...] = ()
    cost_usd: float | None = None

    def plus(self, outcome: SpeculationOutcome, choices: int = 1) -> DecisionOutcome:
        """Return the sum with the outcome of another choice, or of an unfinished one with 0."""
        revised = tuple(
            [
                RevisionRecord(one.on, one.cause, one.output_tokens, one.reason)
                for one in outcome.revisions
            ]
        )
        return DecisionOutcome(
            self.choices + choices,
            self.spec_steps + outcome.num_spec_steps,
            self.drafted_tokens + outcome.num_drafted_tokens,
            self.accepted_tokens + outcome.num_accepted_tokens,
            self.revisions + revised,
            self.cost_usd,
        )


class Decision(msgspec.Struct):
    """One decision.

    Attributes:
        request_id: the id of the response. A request has one decision for each prompt, and one more
            for each resume.
        decided_s: Unix time.
        worker_id: the worker that gets the request.
        request, load: the inputs of the policy.
        plan: the result of the policy.
        route: the routing decision, or None without a choice. If the reservation chose another one
            of its offers, `worker_id` is that worker.
        load_age_s: age of the load in seconds.
        degraded: whether the state store did not respond, so that recent requests of other gateways
            were unknown.
        outcome: the result of the plan, or None before the first choice has ended.
        moves: the latest attempts to move the request to another worker, and the failover that
            ended its run on this worker. Decision files do not contain them.
        phases: the decision of the phases policy, or None without one.
        path: why the request follows the path to its client, or empty. Decision files do not
            contain it.
        fallback: why another model than the requested one gets the request, or empty.
    """

    request_id: str
    decided_s: float
    worker_id: str
    request: RequestView
    load: WorkerLoad
    plan: SpeculationPlan
    route: Route | None = None
    load_age_s: float = 0.0
    degraded: bool = False
    outcome: DecisionOutcome | None = None
    moves: tuple[MoveRecord, ...] = ()
    phases: PhaseDecision | None = None
    path: str = ""
    fallback: str = ""

    def under(self, policy: SpeculationPolicy) -> SpeculationPlan:
        """Return the plan that a policy makes from the same inputs."""
        return policy.decide(self.request, self.load)


class OutcomeLine(msgspec.Struct, frozen=True):
    """A line of a decision file, after the line of its decision: the outcome so far.

    Attributes:
        outcome_of: the id of the decision's request.
    """

    outcome_of: str
    decided_s: float
    worker_id: str
    outcome: DecisionOutcome


class Decisions:
    """The decisions of a node.

    Use the object only on the thread of the event loop.

    Attributes:
        moves: the latest moves, oldest first.
    """

    def __init__(self, file: JsonLinesFile | None, now_s: Callable[[], float]) -> None:
        """Keep the latest decisions.

        Args:
            file: the file for all decisions, or None.
            now_s: the clock, in Unix time.
        """
        self.moves: deque[RecentMove] = deque(maxlen=KEPT_MOVES)
        self._latest: deque[tuple[str, Decision]] = deque(maxlen=KEPT)  # with tenants
        self._changed: set[int] | None = None  # ids of objects, once a caller takes changes
        self._file = file
        self._now_s = now_s

    def record(  # noqa: PLR0913 - the inputs and the result of a decision
        self,
        request_id: str,
        worker_id: str,
        request: RequestView,
        load: WorkerLoad,
        plan: SpeculationPlan,
        route: Route | None = None,
        *,
        tenant: str = "",
        load_age_s: float = 0.0,
        degraded: bool = False,
        phases: PhaseDecision | None = None,
        fallback: str = "",
    ) -> Decision:
        """Record a decision, and return it for `add_outcome`."""
        now_s = self._now_s()
        decision = Decision(
            request_id,
            now_s,
            worker_id,
            request,
            load,
            plan,
            route,
            load_age_s,
            degraded,
            phases=phases,
            fallback=fallback,
        )
        self._latest.append((tenant, decision))
        if self._changed is not None:
            self._changed.add(id(decision))
        if self._file is not None:
            self._file.append(decision)
        return decision

    def add_outcome(
        self, decision: Decision, outcome: SpeculationOutcome, *, choices: int = 1
    ) -> None:
        """Record the outcome of some choices.

        Args:
            choices: 1 for a choice that has finished, or 0 for the drafts of unfinished choices.
        """
        self._set_outcome(decision, (decision.outcome or DecisionOutcome()).plus(outcome, choices))

    def add_cost(self, decision: Decision, cost_usd: float) -> None:
        """Record the cost of a response of an upstream in USD."""
        outcome = decision.outcome or DecisionOutcome()
        self._set_outcome(decision, msgspec.structs.replace(outcome, cost_usd=cost_usd))

    def _set_outcome(self, decision: Decision, outcome: DecisionOutcome) -> None:
        decision.outcome = outcome
        if self._changed is not None:
            self._changed.add(id(decision))
        if self._file is not None:
            line = OutcomeLine(decision.request_id, decision.decided_s, decision.worker_id, outcome)
            self._file.append(line)

    def add_move(
        self, request_id: str, prompt: int, tenant: str, decision: Decision, move: MoveRecord
    ) -> None:
        """Record the end of a move in the decision about its source, and among the latest moves."""
        move = msgspec.structs.replace(move, ended_s=self._now_s())
        self.moves.append(RecentMove(request_id, prompt, tenant, move))
        decision.moves = (*decision.moves, move)[-KEPT_MOVES_OF_RUN:]
        if self._changed is not None:
            self._changed.add(id(decision))

    def latest(self, most: int, tenant: str | None = None) -> list[Decision]:
        """Return the latest decisions, newest first.

        Args:
            tenant: the tenant of the decisions, or None for all tenants.
        """
        newest = reversed(self._latest)
        return list(islice((one for owner, one in newest if tenant in {None, owner}), most))

    def take_changed(self) -> list[tuple[str, Decision]]:
        """Return the decisions that are new, or have a new outcome or move, since the last call.

        The list is in the order of the decisions, and contains the tenant of each.
        """
        changed, self._changed = self._changed, set()
        if changed is None:
            return list(self._latest)
        return [(tenant, one) for tenant, one in self._latest if id(one) in changed]


def read_decisions(path: Path) -> Iterator[Decision]:
    """Return the decisions in a file, each with its last outcome, in the order of the file.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not a decision. The message names the line.
    """
    decisions, outcomes = msgspec.json.Decoder(Decision), msgspec.json.Decoder(OutcomeLine)
    found: list[Decision] = []
    latest: dict[tuple[str, float, str], Decision] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                if line.startswith(b'{"outcome_of"'):
                    ended = outcomes.decode(line)
                    decided = latest.get((ended.outcome_of, ended.decided_s, ended.worker_id))
                    if decided is not None:
                        decided.outcome = ended.outcome
                    continue
                one = decisions.decode(line)
            except msgspec.MsgspecError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            found.append(one)
            latest[one.request_id, one.decided_s, one.worker_id] = one
    return iter(found)
