"""Models of a simulated device, which determine the true times of its steps and drafts."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Protocol

from draftgate.backends.core.steps import StepPlan
from draftgate.backends.sim.profile import Profile
from draftgate.backends.types import GenerationRequest
from draftgate.policies.costs.step_cost import StepCost


class DeviceModel(Protocol):
    """Knows the true durations. The host works before the step to which its work belongs.

    Attributes:
        launches_ahead: whether a step may be launched while the previous step runs.
    """

    launches_ahead: bool

    def draft(self, proposer: str, sequences: int, depth: int) -> float:
        """Charge one draft of `depth` tokens for each sequence; return the seconds of a depth."""
        ...

    def step_s(self, plan: StepPlan, emitted: Many[tuple[int, ...]]) -> float:
        """Return the seconds of a step that emitted these tokens, without drafting."""
        ...

    def pop_host_s(self, sequences: int) -> float:
        """Return the seconds of the host for a step: drafts since the last call, and planning.

        Args:
            sequences: number of sequences of the step.
        """
        ...


class ProfileDevice:
    """A device with exactly the times of a profile."""

    def __init__(self, profile: Profile) -> None:
        self._cost = profile.cost
        self._draft = profile.draft
        self._host = profile.host
        self.launches_ahead = profile.host.launches_ahead
        self._drafting_s = 0.0

    def usual_cost(self, most_tokens: int) -> StepCost:
        """Return the seconds of steps without noise, for tables of up to `most_tokens`."""
        del most_tokens
        return self._cost

    def draft(self, proposer: str, sequences: int, depth: int) -> float:
        """See `DeviceModel`."""
        cost = self._draft.get(proposer)
        if cost is None:
            return 0.0
        depth_s = cost.depth_s(sequences)
        self._drafting_s += cost.call_s + sequences * cost.sequence_s + depth * depth_s
        return depth_s

    def step_s(self, plan: StepPlan, emitted: Many[tuple[int, ...]]) -> float:
        """See `DeviceModel`."""
        return self._cost.size_s(plan.size)

    def pop_host_s(self, sequences: int) -> float:
        """See `DeviceModel`."""
        drafting_s, self._drafting_s = self._drafting_s, 0.0
        return drafting_s + self._host.step_s + self._host.sequence_s * sequences


class ServiceTimeDevice:
    """A device with a service time for each request, for comparison with queueing theory.

    Each of a request's `n * max_tokens` tokens takes an equal share. Simulated text never ends by
    itself, so the shares add up to exactly the service time. Prefills and drafts take no time. A
    request that is cancelled, or ends at a stop string, has used the shares of its tokens. The
    scheduler serves one sequence at a time (`max_num_seqs = 1`).
    """

    launches_ahead = False

    def __init__(self, service_s: Callable[[GenerationRequest], float]) -> None:
        self._service_s = service_s

    def draft(self, proposer: str, sequences: int, depth: int) -> float:
        """Charge nothing, and return 0."""
        return 0.0

    def step_s(self, plan: StepPlan, emitted: Many[tuple[int, ...]]) -> float:
        """Return the shares of the emitted tokens."""
        requests = [work.sequence.request for work in plan.work]
        return sum(
            len(tokens) * (self._service_s(one) / (one.sampling.max_tokens * one.n))
            for one, tokens in zip(requests, emitted, strict=True)
            if tokens
        )

    def pop_host_s(self, sequences: int) -> float:
        """Return 0."""
        return 0.0
