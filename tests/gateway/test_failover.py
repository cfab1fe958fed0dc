"""Tests of failover: a request that loses its worker continues elsewhere, invisibly to the
client."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.core.steps import StepPlan
from draftgate.backends.errors import BackendFailed
from draftgate.backends.sim.profile import load_profile
from draftgate.backends.token_ids import compact
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import FinishReason, SamplingParams, outcome_of
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.dispatch.job import Job
from draftgate.policies.moves import MoveEnd
from draftgate.policies.quotas import Quota, Totals
from draftgate.policies.resilience.failover import Cause, GivenUp
from draftgate.policies.types import SpeculationMode
from tests.examples import examples
from tests.gateway.troubles import (
    DEVICE_ERROR,
    Choice,
    DeviceFault,
    Dispatched,
    RecordingWatch,
    StepCondition,
    after_tokens,
    dispatching,
    in_step,
    read_rest,
    run_job,
    run_scenario,
    simulated,
    texts,
)

KV_BYTES = 200 * 16 * load_profile("cpu-demo").kv_token_bytes
"""KV memory of a simulated worker with 200 blocks, in bytes."""

CONFIG = WorkerConfig(kv_bytes=KV_BYTES, speculation="fixed:3")
PROMPTS = ("def area(r):\n    return", "import os\n")
MOST_TOKENS = 24


def make_job(prompts: int = 1, n: int = 1, **sampling: object) -> Job:
    """Return a job whose choices have `MOST_TOKENS` tokens each, or fewer with a stop text."""
    tokenizer = Tokenizer(SHIPPED_MODEL)
    ids = tuple(compact(tokenizer.encode(prompt)) for prompt in PROMPTS[:prompts])
    params = SamplingParams(1, **{"seed": 7, **sampling})
    return Job("r", ids, params, MOST_TOKENS, n)


@dataclass
class Outcome:
    """The results of a job for the client, the account and the observer."""

    choices: list[Choice]
    totals: Totals
    watch: RecordingWatch
    lost: list[str]


def run_with_faults(
    job: Job,
    *breaks: StepCondition,
    workers: int = 3,
    config: WorkerConfig = CONFIG,
    **settings: object,
) -> Outcome:
    """Run a job whose n-th worker fails at the n-th condition."""

    async def scenario() -> Outcome:
        faults = {index: DeviceFault(condition) for index, condition in enumerate(breaks)}
        factory = simulated(faults)
        async with dispatching(factory, workers, config=config, **settings) as dispatched:
            watch = RecordingWatch()
            choices = await run_job(dispatched.dispatcher, job, watch)
            assert await dispatched.is_idle()
            lost = [w.worker_id for w in dispatched.fleet.workers if w.backend.failure is not None]
            return Outcome(choices, await dispatched.totals(), watch, lost)

    return run_scenario(scenario())


def stopped_at(job: Job, at: int, length: int) -> Job:
    """Return the job with a stop text from the output of its first choice."""
    text = run_with_faults(job).choices[0].text
    stop = text[at % len(text) :][:length]
    return replace(job, sampling=replace(job.sampling, stop=(stop,)))


@settings(max_examples=examples(60))
@given(
    first=st.integers(0, MOST_TOKENS),
    second=st.integers(0, MOST_TOKENS),
    prompts=st.integers(1, 2),
    n=st.integers(1, 3),
    seed=st.integers(0, 2**64 - 1),
    speculation=st.sampled_from(["off", "fixed:3", "auto"]),
    logprobs=st.sampled_from([None, 0, 1]),
    stop=st.none() | st.tuples(st.integers(0, 200), st.integers(1, 9)),
    min_tokens=st.integers(0, MOST_TOKENS),
    included=st.booleans(),
    allowed=st.sampled_from([(), tuple(range(100, 180))]),
)
@example(0, 0, 1, 1, 7, "off", None, None, 0, False, ())
@example(0, MOST_TOKENS - 1, 2, 3, 7, "fixed:3", 1, (40, 6), 0, True, (200, 301))
def test_the_response_is_the_same_wherever_workers_fail(
    first: int,
    second: int,
    prompts: int,
    n: int,
    seed: int,
    speculation: str,
    logprobs: int | None,
    stop: tuple[int, int] | None,
    min_tokens: int,
    included: bool,
    allowed: tuple[int, ...],
) -> None:
    """The choices and charges of a job equal those of an undisturbed run, wherever workers fail."""
    job = make_job(
        *(prompts, n),
        seed=seed,
        logprobs=logprobs,
        min_tokens=min_tokens,
        include_stop_str_in_output=included,
        allowed_token_ids=allowed,
    )
    if stop is not None:
        job = stopped_at(job, *stop)
    config = structs.replace(CONFIG, speculation=speculation)
    plain = run_with_faults(job, config=config)
    broken = run_with_faults(
        job, after_tokens(first), after_tokens(second), workers=4, config=config
    )
    assert broken.choices == plain.choices
    assert broken.totals == plain.totals
    assert broken.totals.reserved == broken.totals.settled + broken.totals.released
    assert not plain.watch.resumes
    losses = [(resume.index, resume.source) for resume in broken.watch.resumes]
    assert len(set(losses)) == len(losses), "a prompt lost the same worker twice"
    assert {worker for _, worker in losses} == set(broken.lost)
    assert all(resume.same_numerics_class for resume in broken.watch.resumes)


@pytest.mark.parametrize("speculation", ["off", "fixed:3"])
def test_a_request_resumes_from_any_token(speculation: str) -> None:
    """A resume at any token keeps the output so far and continues with identical tokens."""
    config = structs.replace(CONFIG, speculation=speculation)
    plain = run_with_faults(make_job(), config=config)
    at_once = 1 if speculation == "off" else 4  # maximum tokens of a step
    for position in range(MOST_TOKENS + 1 - at_once):
        broken = run_with_faults(make_job(), after_tokens(position), workers=2, config=config)
        assert broken.choices == plain.choices
        (resume,) = broken.watch.resumes
        assert position <= resume.kept_tokens < position + at_once
        assert resume.cause is Cause.FAILED
        assert DEVICE_ERROR in resume.reason


def test_unread_output_of_a_lost_worker_is_kept() -> None:
    """A slow reader receives the unread output of the lost worker and then the remaining output."""

    async def scenario() -> None:
        async with dispatching(
            simulated({0: DeviceFault(after_tokens(12))}), 2, config=CONFIG
        ) as dispatched:
            watch = RecordingWatch()
            async with dispatched.dispatcher.run(make_job(), watch=watch) as run:
                first = await anext(run.deltas)
                await asyncio.sleep(1.0)  # the worker continues and then fails
                assert dispatched.fleet.workers[0].backend.failure is not None
                rest = Choice()
                await read_rest(run, [rest])
            whole = [*first.token_ids, *rest.token_ids]
            assert whole == outcome_tokens
            assert watch.resumes[0].kept_tokens >= 12

    outcome_tokens = run_with_faults(make_job()).choices[0].token_ids
    run_scenario(scenario())


def test_a_resumed_request_gets_a_new_plan() -> None:
    """A resumed request gets a plan for its new worker within the client's limits."""
    job = replace(make_job(), mode=SpeculationMode.NGRAM, max_draft_tokens=2)

    async def scenario() -> None:
        factory = simulated({0: DeviceFault(after_tokens(5))})
        async with dispatching(factory, 2, config=CONFIG) as dispatched:
            watch = RecordingWatch()
            await run_job(dispatched.dispatcher, job, watch)
            (resume,), (decision, _) = watch.resumes, dispatched.decisions.latest(9)
        view, plan = decision.request, decision.plan
        assert decision.worker_id == resume.sink
        assert view.prompt_tokens == len(job.prompts[0]) + resume.kept_tokens
        assert view.max_tokens == MOST_TOKENS - resume.kept_tokens
        assert (plan.proposer, plan.max_draft_tokens) == ("ngram", 2)

    run_scenario(scenario())


def test_a_resume_in_another_numerics_class_is_reported() -> None:
    """The observer learns that a request resumed on a worker of another numerics class."""

    async def scenario() -> None:
        factory = simulated({0: DeviceFault(after_tokens(5))}, {1: "h100-8b"})
        async with dispatching(factory, 2) as dispatched:
            watch = RecordingWatch()
            await run_job(dispatched.dispatcher, make_job(), watch)
            (resume,) = watch.resumes
            assert not resume.same_numerics_class
            classes = [worker.backend.card.numerics_class for worker in dispatched.fleet.workers]
            assert classes == ["sim:cpu-demo", "sim:h100-8b"]

    run_scenario(scenario())


def test_decision_records_the_failover_from_its_worker() -> None:
    """The decision about a failed worker names the next worker and the cause of the failover."""

    async def scenario() -> None:
        factory = simulated({0: DeviceFault(after_tokens(5))})
        async with dispatching(factory, 2) as dispatched:
            await run_job(dispatched.dispatcher, make_job())
            second, first = dispatched.decisions.latest(9)
            (move,) = first.moves
            assert (move.source, move.sink) == (first.worker_id, second.worker_id)
            assert (move.reason, move.end) == ("failed", MoveEnd.MOVED)
            assert move.ended_s >= second.decided_s
            assert [one.move for one in dispatched.decisions.moves] == [move]
            assert not second.moves

    run_scenario(scenario())


@pytest.mark.parametrize("speculation", ["fixed:3", "auto"])
def test_the_outcome_counts_the_drafts_of_lost_workers(speculation: str) -> None:
    """The outcome of a resumed choice includes what lost workers drafted for its tokens."""

    async def scenario() -> None:
        config = structs.replace(CONFIG, speculation=speculation)
        factory = simulated({0: DeviceFault(after_tokens(8)), 1: DeviceFault(after_tokens(16))})
        async with dispatching(factory, 3, config=config) as dispatched:
            async with dispatched.dispatcher.run(make_job(n=2)) as run:
                deltas = [delta async for delta in run.deltas]
            assert len(run.resumes) == 2
        by_choice = [[delta for delta in deltas if delta.choice == choice] for choice in range(2)]
        for of_choice in by_choice:
            drafts = [draft for delta in of_choice for draft in delta.drafts]
            outcome = of_choice[-1].outcome
            assert outcome is not None
            # The time that drafts of lost workers saved is unknown.
            assert replace(outcome, revisions=(), saved_s=0.0) == outcome_of(drafts)
            # Each step adds one token that is no draft.
            steps = [len(delta.token_ids) for delta in of_choice if delta.drafts]
            assert sum(steps) == outcome.num_spec_steps + outcome.num_accepted_tokens

    run_scenario(scenario())


def test_the_last_worker_ends_its_streams_with_its_own_error() -> None:
    """The stream of the last worker ends with the worker's error and leaves no resources or
    quota."""

    async def scenario() -> None:
        factory, watch = simulated({0: DeviceFault(after_tokens(5))}), RecordingWatch()
        async with dispatching(factory, 1, config=CONFIG) as dispatched:
            async with dispatched.dispatcher.run(make_job(), watch=watch) as run:
                choices = [Choice()]
                with pytest.raises(BackendFailed, match=DEVICE_ERROR):
                    await read_rest(run, choices)
            tokens = len(choices[0].token_ids)
            assert tokens >= 5
            assert await dispatched.is_idle()
            totals = await dispatched.totals()
            assert (totals.settled, totals.open) == (len(make_job().prompts[0]) + tokens, 0)
        assert watch.losses == [(Cause.FAILED, GivenUp.NO_WORKER)]

    run_scenario(scenario())


def poisonous_step(tokens: int) -> StepCondition:
    """Select the steps in which the request of the first prompt has at least this many tokens."""
    poison = make_job().prompts[0]

    def condition(plan: StepPlan) -> bool:
        return any(
            work.samples
            and work.sequence.request.prompt_ids == poison
            and work.sequence.output_tokens >= tokens
            for work in plan.work
        )

    return condition


async def send_poisonous_request(dispatched: Dispatched, watch: RecordingWatch) -> str:
    """Send the poisonous request and return its error."""
    with pytest.raises(BackendFailed) as caught:
        await run_job(dispatched.dispatcher, make_job(), watch)
    return str(caught.value)


@pytest.mark.parametrize(
    ("workers", "most_resumes", "taken", "why"),
    [
        (1, 2, 1, GivenUp.NO_WORKER),
        (2, 2, 2, GivenUp.NO_WORKER),
        (3, 2, 2, GivenUp.LAST_WORKER),
        (4, 2, 3, GivenUp.EXHAUSTED),
        (5, 2, 3, GivenUp.EXHAUSTED),
        (5, 0, 1, GivenUp.EXHAUSTED),
        (5, 9, 4, GivenUp.LAST_WORKER),
    ],
)
@pytest.mark.parametrize("tokens", [0, 9])
def test_a_poisonous_request_is_given_up_before_it_breaks_all_workers(
    tokens: int, workers: int, most_resumes: int, taken: int, why: GivenUp
) -> None:
    """The dispatcher gives up a request that breaks workers before it breaks the last of three."""

    async def scenario() -> None:
        watch = RecordingWatch()
        faults = {w: DeviceFault(poisonous_step(tokens)) for w in range(workers)}
        async with dispatching(
            simulated(faults), workers, config=CONFIG, most_resumes=most_resumes
        ) as dispatched:
            error = await send_poisonous_request(dispatched, watch)
            assert DEVICE_ERROR in error
            assert len(dispatched.fleet.serving) == workers - taken
            assert watch.losses == [(Cause.FAILED, why)]
            assert len(watch.resumes) == taken - 1
            assert await dispatched.is_idle()
            totals = await dispatched.totals()
            assert totals.open == 0
            assert totals.reserved == totals.settled + totals.released
            if dispatched.fleet.serving:
                other = replace(make_job(2), prompts=make_job(2).prompts[1:], request_id="other")
                assert all(texts(await run_job(dispatched.dispatcher, other)))

    run_scenario(scenario())


def test_other_requests_survive_a_poisonous_request() -> None:
    """Other requests lose workers to the poisonous request, but no tokens."""
    other = replace(make_job(2), prompts=make_job(2).prompts[1:])
    plain = run_with_faults(other).choices

    async def scenario() -> None:
        faults = {worker: DeviceFault(poisonous_step(9)) for worker in range(6)}
        async with dispatching(simulated(faults), 6, config=CONFIG) as dispatched:
            bystanders = [
                asyncio.create_task(
                    run_job(dispatched.dispatcher, replace(other, request_id=f"other-{index}"))
                )
                for index in range(12)
            ]
            await send_poisonous_request(dispatched, RecordingWatch())
            assert await asyncio.gather(*bystanders) == [plain] * 12
            assert len(dispatched.fleet.serving) == 3

    run_scenario(scenario())


def test_a_resumed_request_is_charged_once() -> None:
    """A quota for exactly one request covers a request that runs twice."""
    job = replace(make_job(), tenant="t")
    most = len(job.prompts[0]) + MOST_TOKENS

    async def scenario() -> None:
        quotas = {"t": Quota(requests_per_minute=1, tokens_per_minute=most)}
        factory = simulated({0: DeviceFault(after_tokens(9))})
        async with dispatching(factory, 2, config=CONFIG, quotas=quotas) as dispatched:
            (choice,) = await run_job(dispatched.dispatcher, job)
            assert choice.finish_reason is FinishReason.LENGTH
            assert await dispatched.totals("t") == Totals(most, most, 0, 0)

    run_scenario(scenario())


def test_requests_after_a_failure_use_the_other_workers() -> None:
    """The dispatcher sends requests after a failure directly to the other workers."""

    async def scenario() -> None:
        async with dispatching(
            simulated({0: DeviceFault(in_step(0))}), 2, config=CONFIG
        ) as dispatched:
            watches = [RecordingWatch() for _ in range(3)]
            for index, watch in enumerate(watches):
                job = replace(make_job(), request_id=f"r{index}")
                await run_job(dispatched.dispatcher, job, watch)
            assert [len(watch.resumes) for watch in watches] == [1, 0, 0]
            assert [watch.workers for watch in watches] == [["w-0"], ["w-1"], ["w-1"]]

    run_scenario(scenario())
