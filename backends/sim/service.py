"""A device with a service time per request, for comparison with queueing theory."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

from draftgate.backends.core.steps import StepPlan
from draftgate.backends.types import GenerationRequest

ServiceTime = Callable[[GenerationRequest], float]
"""Seconds of a request."""


def constant_service(service_s: float) -> ServiceTime:
    """Return the service time of every request.

    Raises:
        ValueError: it is not positive.
    """
    if not service_s > 0.0:
        raise ValueError(f"sim_service_ms must be more than 0, not {service_s * 1e3}")
    return lambda _request: service_s


class ServiceDevice:
    """A token takes its share of its request's service time: one of `n * max_tokens`.

    Simulated text never ends early by itself, so the shares add up to exactly the service time;
    prefills and drafts take none. That a worker serves one sequence at a time is the scheduler's
    business (`max_num_seqs = 1`). A request which ends at a stop string, or is cancelled, has paid
    for the tokens it got.
    """

    def __init__(self, service_s: ServiceTime) -> None:
        self._service_s = service_s

    def draft(self, proposer: str, sequences: int, depth: int) -> None:
        """Take no time."""

    def step_s(self, plan: StepPlan, emitted: Many[tuple[int, ...]]) -> float:
        """Return the shares of the tokens emitted."""
        return sum(
            len(tokens) * self._token_s(work.sequence.request)
            for work, tokens in zip(plan.work, emitted, strict=True)
        )

    def drafting_s(self) -> float:
        """Return 0."""
        return 0.0

    def _token_s(self, request: GenerationRequest) -> float:
        return self._service_s(request) / (request.sampling.max_tokens * request.n)
