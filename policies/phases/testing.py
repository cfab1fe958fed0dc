"""Conformance checks for phases policies."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from draftgate.policies.capacity import WorkerUsage
from draftgate.policies.phases.types import Apart, PhaseChoice, PhasePool, PhaseWorker, Together
from draftgate.policies.protocols import PhasesPolicy
from draftgate.policies.routing.types import Candidate, RouteView
from draftgate.policies.types import RequestView, Role, WorkerLoad, WorkerSpeed
from draftgate.policies.values import replace

_SPEED = WorkerSpeed(0.02, 1e-4, 1e-4, 0.01, 1e-4, 2e-5)
_ROLES = tuple(Role)


def check_phases(policy: PhasesPolicy) -> None:
    """Check a phases policy on many pools.

    Raises:
        AssertionError: the policy breaks the contract of `PhasesPolicy`.
    """
    for pool, request in product(_pools(), _requests()):
        check_choice(policy, request, pool)


def check_choice(policy: PhasesPolicy, request: RouteView, pool: PhasePool) -> PhaseChoice:
    """Check the choice of a policy for a request, and return it.

    Raises:
        AssertionError: the policy breaks the contract of `PhasesPolicy.choose`.
    """
    choice = policy.choose(request, pool)
    assert choice == policy.choose(request, pool), "the same pool must give the same choice"
    workers = {one.worker_id: one for one in pool.workers}
    if choice is None:
        assert policy.separates, "a policy that never separates must not let requests wait"
        assert len(pool.usable) < len(workers), "a request waits for a worker without capacity"
        return None
    assert choice.reason, "a choice needs a reason for the operator"
    if isinstance(choice, Together):
        named = choice.worker_ids
    else:
        _check_apart(policy, choice, request, workers)
        named = tuple(one.worker_id for one in (*choice.prefill, *choice.decode))
    assert named, "a request needs a worker"
    assert all(workers[one].has_capacity for one in named), "the workers must have capacity"
    return choice


def _check_apart(
    policy: PhasesPolicy, choice: Apart, request: RouteView, workers: dict[str, PhaseWorker]
) -> None:
    assert policy.separates, "a policy that never separates must not separate"
    assert request.request.max_tokens > 1, "a request without further tokens stays together"
    assert choice.gain_s >= choice.threshold_s, "the gain must reach the threshold"
    source, sink = workers[choice.prefill[0].worker_id], workers[choice.decode[0].worker_id]
    assert source.can_supply(sink), "the output needs the blocks of the prompt"
    for offers in (choice.prefill, choice.decode):
        assert len({one.worker_id for one in offers}) == len(offers), "an offer is made once"


def _requests() -> Iterator[RouteView]:
    for prompt, output in product((20, 800, 8000), (1, 2, 400)):
        yield RouteView(RequestView(prompt, output, 0.8), prompt + output, output / 2)


def _pools() -> Iterator[PhasePool]:
    """Yield pools with idle, busy and full workers of all roles, speeds and formats."""
    states = ((0, 0, 1000), (8, 0, 400), (30, 600, 100), (2, 4000, 900))
    for speed, formats, full, size, shift in product(
        (_SPEED, WorkerSpeed()), ("a", "ab", ""), (None, 0, 3), (1, 2, 6), range(3)
    ):
        workers = []
        for number in range(size):
            running, prompts, free = states[number % len(states)]
            load = WorkerLoad(running, 0, free, 1000, 0.01 * running, 0.6, ("ngram",))
            usage = WorkerUsage(_with(load, prompts, speed), running, running)
            role = _ROLES[(number + shift) % 3] if size > 2 else Role.ANY
            form = formats[number % len(formats)] if formats else None
            usable = number != full or size == 1
            one = Candidate(f"w-{number}", usage, numerics_class=form)
            workers.append(PhaseWorker(one, role, form, 131_072, usable))
        yield PhasePool(tuple(workers), lambda _source, _sink: 5e9, rivals=size % 2)


def _with(load: WorkerLoad, prompt_tokens: int, speed: WorkerSpeed) -> WorkerLoad:
    return replace(
        load, prompt_tokens=prompt_tokens, speed=speed, max_sequences=64, step_tokens=2048
    )
