"""Turns plans into results with a cost model instead of a device."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from backends.core.sequence import Sequence
from backends.core.steps import SequenceWork, StepPlan, StepResult
from backends.sim.profile import Profile
from backends.sim.truth import Truth
from backends.types import TokenLogprob


class CostModel(Protocol):
    """Seconds of a step."""

    def step_s(self, plan: StepPlan, emitted: Seq[tuple[int, ...]]) -> float:
        """Return the seconds of a step that emitted these tokens for the entries of its plan."""
        ...


class ProfileCost:
    """A device's profile: what matters is how much a step feeds and reads."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile

    def step_s(self, plan: StepPlan, emitted: Seq[tuple[int, ...]]) -> float:
        """Return what the profile predicts, prefill attention included."""
        del emitted
        step_s = self._profile.cost.seconds(plan.num_tokens, plan.kv_tokens, len(plan.work))
        pairs = sum(_prefill_pairs(work) for work in plan.work)
        return step_s + self._profile.prefill_attention_s * pairs


class ServiceCost:
    """A constant service time per request, for comparison with queueing theory.

    A token costs its share of the request's `n * max_tokens`, and prefills cost nothing: simulated
    text never ends early by itself, so the shares add up to exactly the service time. That the
    worker serves one sequence at a time is the scheduler's business (`max_num_seqs = 1`). A
    request which ends at a stop string, or is cancelled, has paid for the tokens it got.
    """

    def __init__(self, service_s: float) -> None:
        """Charge this much per request.

        Raises:
            ValueError: it is not positive.
        """
        if not service_s > 0.0:
            raise ValueError(f"sim_service_ms must be more than 0, not {service_s * 1e3}")
        self._service_s = service_s

    def step_s(self, plan: StepPlan, emitted: Seq[tuple[int, ...]]) -> float:
        """Return the shares of the tokens emitted."""
        shares = 0.0
        for work, tokens in zip(plan.work, emitted, strict=True):
            request = work.sequence.request
            shares += len(tokens) / (request.sampling.max_tokens * request.n)
        return self._service_s * shares


class SimExecutor:
    """An `Executor` whose steps take no real time: `step_s` says how long they would have."""

    def __init__(self, truth: Truth, cost: CostModel) -> None:
        self._truth = truth
        self._cost = cost

    def execute(self, plan: StepPlan) -> StepResult:
        """Return the true tokens: drafts as far as they agree, and the one behind them."""
        emitted = tuple(self._emit(work) for work in plan.work)
        logprobs = tuple(
            self._logprobs(work.sequence, tokens)
            for work, tokens in zip(plan.work, emitted, strict=True)
        )
        return StepResult(emitted, logprobs, self._cost.step_s(plan, emitted))

    def _emit(self, work: SequenceWork) -> tuple[int, ...]:
        if not work.samples:
            return ()
        rows = [
            self._truth.token(work.sequence, work.confirmed_end + depth)
            for depth in (0, *work.draft.depths)
        ]
        return (rows[0], *(rows[place + 1] for place in work.draft.accepted(rows)))

    def _logprobs(self, sequence: Sequence, tokens: tuple[int, ...]) -> tuple[TokenLogprob, ...]:
        """Return a certain distribution: the simulated model gives its token all the mass."""
        asked = sequence.request.sampling.logprobs
        if asked is None:
            return ()
        return tuple(TokenLogprob(t, 0.0, ((t, 0.0),) if asked else ()) for t in tokens)


def _prefill_pairs(work: SequenceWork) -> int:
    """Return how many (fed token, KV token) pairs a chunk of several confirmed tokens attends."""
    fed = len(work.token_ids)
    return fed * work.start + fed * (fed + 1) // 2 if fed > 1 else 0
