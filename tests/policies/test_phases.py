"""The contract of phases policies, and the decisions of each policy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.policies.capacity import WorkerUsage
from draftgate.policies.costs.speed import SpeedMeter
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.kv_transfer import visible_s
from draftgate.policies.phases.apart import UpstreamRoles
from draftgate.policies.phases.auto import Cheaper
from draftgate.policies.phases.testing import check_choice, check_phases
from draftgate.policies.phases.types import Apart, PhasePool, PhaseWorker, Together
from draftgate.policies.registry import phases_policy
from draftgate.policies.routing.types import Candidate, RouteView
from draftgate.policies.types import RequestView, Role, WorkerSpeed
from draftgate.policies.values import replace
from tests.policies.routing_workers import load

SPECS = ("together", "apart", "splitwise", "auto")
LINK = 25e9
CHAT = RouteView(RequestView(200, 400, 0.8), 600, 300.0)
LONG = RouteView(RequestView(8000, 400, 0.8), 8400, 300.0)
P, D, ANY = Role.PREFILL, Role.DECODE, Role.ANY


def worker(
    number: int,
    role: Role = ANY,
    running: int = 0,
    prompts: int = 0,
    share: float = 0.0,
    **fields: object,
) -> PhaseWorker:
    """Return a worker that decodes sequences and has prompt tokens ahead."""
    kv_format, usable = fields.pop("kv_format", "a"), fields.pop("has_capacity", True)
    speed = WorkerSpeed(0.02, 1e-4, 1e-4, 0.01, 1e-4, 2e-5, prompt_share=share)
    report = load(running=running, prompt_tokens=prompts, speed=speed, step_tokens=2048, **fields)
    usage = WorkerUsage(report, running, running, prompts)
    candidate = Candidate(f"w-{number}", usage, numerics_class="c")
    return PhaseWorker(candidate, role, kv_format, 131_072, usable)


def pool(*workers: PhaseWorker, bytes_per_s: float = LINK) -> PhasePool:
    return PhasePool(workers, lambda _source, _sink: bytes_per_s)


def chosen(spec: str, request: RouteView, *workers: PhaseWorker) -> object:
    """Return a choice: the first workers of both phases in words, a tuple of workers, or None."""
    choice = check_choice(phases_policy(spec), request, pool(*workers))
    if isinstance(choice, Apart):
        return f"{choice.prefill[0].worker_id} then {choice.decode[0].worker_id}"
    return choice.worker_ids if isinstance(choice, Together) else None


@pytest.mark.parametrize("spec", SPECS)
def test_contract(spec: str) -> None:
    """Every policy keeps the contract in pools of all kinds."""
    check_phases(phases_policy(spec))


WORKERS = st.builds(
    worker,
    st.just(0),
    st.sampled_from(Role),
    st.integers(0, 40),
    st.integers(0, 5000),
    st.floats(0.0, 1.0),
    kv_blocks_free=st.integers(0, 1000),
    kv_format=st.sampled_from(("a", "b", None)),
    has_capacity=st.booleans(),
)


@pytest.mark.parametrize("spec", SPECS)
@given(st.lists(WORKERS, min_size=1, max_size=6), st.integers(1, 9000), st.integers(1, 500))
def test_contract_in_any_pool(
    spec: str, workers: list[PhaseWorker], prompt: int, output: int
) -> None:
    """Every policy keeps the contract for any workers and requests."""
    named = [
        PhaseWorker(
            Candidate(f"w-{number}", one.candidate.usage),
            *(one.role, one.kv_format, one.token_bytes),
            one.has_capacity or number == 0,
        )
        for number, one in enumerate(workers)
    ]
    request = RouteView(RequestView(prompt, output, 0.0), prompt + output, output / 2)
    check_choice(phases_policy(spec), request, pool(*named))


@pytest.mark.parametrize("spec", ["apart", "splitwise"])
def test_prompt_and_output_go_to_the_best_worker_of_their_pool(spec: str) -> None:
    """The prompt goes to the prefill worker with the fewest tokens ahead, and the output to the
    decode worker with the most free memory."""
    workers = (
        *(worker(0, P, prompts=900), worker(1, P, prompts=300)),
        *(worker(2, D, 3, kv_blocks_free=100), worker(3, D, 9, kv_blocks_free=700)),
    )
    assert chosen(spec, CHAT, *workers) == "w-1 then w-3"


def test_request_waits_for_its_own_pool_with_apart() -> None:
    """A request waits while one of the two pools has no capacity."""
    full_prefill = worker(0, P, has_capacity=False), worker(1, D)
    full_decode = worker(0, P), worker(1, D, has_capacity=False)
    assert chosen("apart", CHAT, *full_prefill) is None
    assert chosen("apart", CHAT, *full_decode) is None


def test_full_pool_borrows_with_splitwise() -> None:
    """A full pool borrows a worker of the other pool, first one that already has borrowed work. The
    worker is back in its pool when that work has ended."""
    full = worker(0, P, prompts=4000, has_capacity=False)
    idle, mixed = worker(1, D), worker(2, D, prompts=500)
    assert chosen("splitwise", CHAT, full, idle, mixed) == "w-2 then w-1"
    assert chosen("splitwise", CHAT, worker(0, P), idle, mixed) == "w-0 then w-1"
    home = worker(2, D)
    used = worker(1, D, 9, kv_blocks_free=1)
    assert chosen("splitwise", CHAT, worker(0, P), used, home) == "w-0 then w-2"
    assert chosen("splitwise", CHAT, worker(0, P), worker(1, D, has_capacity=False)) == ("w-0",)


@pytest.mark.parametrize("spec", ["apart", "splitwise", "auto"])
def test_workers_of_different_formats_stay_together(spec: str) -> None:
    """No request is separated if no two workers exchange KV blocks."""
    found = chosen(spec, LONG, worker(0, P, kv_format=None), worker(1, D, kv_format=None))
    assert found in {("w-0", "w-1"), ("w-0",)}


def test_auto_separates_long_outputs_from_prompts() -> None:
    """If prompts take most of the time of shared workers, the output goes to a decode worker."""
    busy = worker(0, P, 8, share=0.6), worker(1, D, 8, share=0.6)
    assert chosen("auto", LONG, *busy) == "w-0 then w-1"


def test_auto_stays_together_without_interference() -> None:
    """A request stays together on idle workers, or if its blocks would take too long."""
    assert chosen("auto", LONG, worker(0, P), worker(1, D)) == ("w-0", "w-1")
    slow = pool(worker(0, P, 8, share=0.6), worker(1, D, 8, share=0.6), bytes_per_s=1e7)
    choice = check_choice(Cheaper(), LONG, slow)
    assert isinstance(choice, Together)
    assert "would save" in choice.reason


def test_auto_stays_together_in_a_pool_without_roles() -> None:
    """Without roles, prompts delay outputs on every worker, so separation gains nothing."""
    equal = [worker(number, running=8, share=0.5) for number in range(4)]
    assert chosen("auto", LONG, *equal) == ("w-0", "w-1", "w-2", "w-3")


@given(st.floats(0.001, 10.0), st.floats(0.001, 10.0), st.integers(1, 64))
def test_visible_part_of_a_transfer(transfer_s: float, compute_s: float, chunks: int) -> None:
    """The visible part is that of a pipeline: at least the last chunk, and at most the whole."""
    visible, send_s, step_s = visible_s(transfer_s, compute_s, chunks), 0.0, compute_s / chunks
    for number in range(chunks):
        send_s = max(send_s, (number + 1) * step_s) + transfer_s / chunks
    assert visible == pytest.approx(send_s - compute_s, rel=1e-6, abs=1e-9)
    assert transfer_s / chunks <= visible * (1 + 1e-9)
    assert visible <= transfer_s * (1 + 1e-9)


def test_share_of_prompts_follows_the_last_seconds() -> None:
    """The share of prompts is that of the time, including idle time, of about ten seconds."""
    cost = StepCost((1, 512), (0.01, 0.01))
    meter, now_s = SpeedMeter(cost, 512), 0.0
    for step in range(10_000):  # 100 s, a quarter of the time with prompts
        meter.begin_step(now_s)
        prompts = step % 4 == 0
        meter.record_step(0 if prompts else 4, 0 if prompts else 4, 512 if prompts else 0)
        now_s += 0.01
    assert meter.speed(cost, 4, 100).prompt_share == pytest.approx(0.25, abs=0.01)
    meter.record_idle()
    meter.begin_step(now_s + 100.0)
    assert meter.speed(cost, 4, 100).prompt_share < 1e-3


# --- Upstreams with roles -------------------------------------------------------------------------

FULL = {"has_capacity": False}


def cached(one: PhaseWorker, tokens: int) -> PhaseWorker:
    """Return a worker that has cached the beginning of the prompt."""
    return replace(one, candidate=replace(one.candidate, cached_tokens=tokens))


def of_upstreams(request: RouteView, *workers: PhaseWorker) -> object:
    """Return the choice between upstreams with roles, in the form of `chosen`."""
    choice = UpstreamRoles(256).choose(request, pool(*workers))
    if isinstance(choice, Apart):
        offered = [one.worker_id for one in (*choice.prefill, *choice.decode)]
        assert len(offered) == len(set(offered)), "no upstream is offered for both phases"
        return f"{choice.prefill[0].worker_id} then {choice.decode[0].worker_id}"
    return choice.worker_ids if isinstance(choice, Together) else None


WHOLE = replace(LONG, may_separate=False)
SEVERAL = replace(LONG, sequences=2)
ONE_TOKEN = replace(LONG, request=replace(LONG.request, max_tokens=1))
NO_OUTPUT = replace(LONG, request=replace(LONG.request, max_tokens=0))


@pytest.mark.parametrize(
    ("request_", "workers", "choice"),
    [
        (LONG, [worker(0, P), worker(1, D)], "w-0 then w-1"),
        (LONG, [worker(0, P, prompts=9000), worker(1, P), worker(2, D)], "w-1 then w-2"),
        (LONG, [worker(0, P), worker(1, D, kv_blocks_free=2), worker(2, D)], "w-0 then w-2"),
        (CHAT, [worker(0, P), worker(1, D), worker(2, D)], ("w-1", "w-2")),
        (LONG, [worker(0, P), cached(worker(1, D), 7900), worker(2, D)], ("w-1",)),
        (LONG, [worker(0, P), cached(worker(1, D), 7000), worker(2, D)], "w-0 then w-1"),
        (LONG, [worker(0, P, **FULL), worker(1, D)], None),
        (LONG, [worker(0, P), worker(1, D, **FULL)], None),
        (CHAT, [worker(0, P, **FULL), worker(1, D)], ("w-1",)),
        (CHAT, [worker(0, P), worker(1, D, **FULL)], None),
        (LONG, [worker(0, D), worker(1, D)], ("w-0", "w-1")),
        (LONG, [worker(0, P), worker(1, P)], ("w-0", "w-1")),
        (LONG, [worker(0), worker(1)], ("w-0", "w-1")),
        (LONG, [worker(0, P), worker(1)], "w-0 then w-1"),
        (LONG, [worker(0, kv_blocks_free=2), worker(1, D)], "w-0 then w-1"),
        (LONG, [worker(0), worker(1, D, kv_blocks_free=2)], ("w-0", "w-1")),
        (WHOLE, [worker(0, P), worker(1, D)], ("w-1",)),
        (SEVERAL, [worker(0, P), worker(1, D)], ("w-1",)),
        (ONE_TOKEN, [worker(0, P), worker(1, D)], ("w-0",)),
        (ONE_TOKEN, [worker(0, P, **FULL), worker(1, D)], None),
        (NO_OUTPUT, [worker(0, P), worker(1, D)], ("w-0", "w-1")),
    ],
)
def test_upstreams_with_roles(
    request_: RouteView, workers: list[PhaseWorker], choice: object
) -> None:
    """A request is divided if the upstream of the output would compute many prompt tokens, and
    waits while the upstreams for one of its phases are full."""
    assert of_upstreams(request_, *workers) == choice


@given(
    st.lists(
        st.tuples(st.sampled_from(Role), st.booleans(), st.integers(0, 9000)),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([CHAT, LONG, WHOLE, SEVERAL, ONE_TOKEN, NO_OUTPUT]),
)
def test_upstreams_with_roles_always_get_a_request_that_they_can_run(
    states: list[tuple[Role, bool, int]], request_: RouteView
) -> None:
    """A choice names only upstreams with capacity, and a request waits only for full ones."""
    workers = [
        worker(number, role, prompts=prompts, has_capacity=usable)
        for number, (role, usable, prompts) in enumerate(states)
    ]
    usable = {one.worker_id for one in workers if one.has_capacity}
    if not usable:
        return  # the queue asks for no choice
    choice = of_upstreams(request_, *workers)
    if choice is None:
        assert len(usable) < len(workers)
    else:
        named = choice.split(" then ") if isinstance(choice, str) else choice
        assert named
        assert set(named) <= usable
