"""Failover: a request that loses its worker continues elsewhere, invisibly to the client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
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
from draftgate.backends.types import FinishReason, SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.dispatch.job import Job
from draftgate.policies.quotas import Quota, Totals
from draftgate.policies.resilience.failover import Cause, GivenUp
from draftgate.policies.types import SpeculationMode
from tests.gateway.troubles import (
    DEVICE_ERROR,
    Choice,
    Dispatched,
    Look,
    Told,
    Trouble,
    answer,
    behind,
    dispatching,
    in_step,
    play,
    quick_starts,
    read,
    simulated,
    texts,
)

KV_BYTES = 200 * 16 * load_profile("cpu-demo").kv_token_bytes
"""KV memory of 200 blocks of a simulated worker."""

CONFIG = WorkerConfig(kv_bytes=KV_BYTES, speculation="fixed:3")
PROMPTS = ("def area(r):\n    return", "import os\n")
MOST_TOKENS = 24


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    """Start workers quickly, because tests here start many."""
    with quick_starts():
        yield


def job(prompts: int = 1, n: int = 1, **sampling: object) -> Job:
    """A job whose choices have `MOST_TOKENS` tokens each, unless a stop text ends them."""
    tokenizer = Tokenizer(SHIPPED_MODEL)
    ids = tuple(compact(tokenizer.encode(prompt)) for prompt in PROMPTS[:prompts])
    params = SamplingParams(1, **{"seed": 7, **sampling})
    return Job("r", ids, params, MOST_TOKENS, n)


@dataclass
class Outcome:
    """The result of a job for its client, account and observer, and what is left of it."""

    choices: list[Choice]
    totals: Totals
    told: Told
    lost: list[str]


def outcome(
    one: Job, *breaks: Look, workers: int = 3, config: WorkerConfig = CONFIG, **settings: object
) -> Outcome:
    """Run a job; worker n fails where the n-th condition says so."""

    async def scenario() -> Outcome:
        troubles = {index: Trouble(look) for index, look in enumerate(breaks)}
        factory = simulated(troubles)
        async with dispatching(factory, workers, config=config, **settings) as there:
            told = Told()
            choices = await answer(there.dispatcher, one, told)
            assert await there.is_idle()
            lost = [w.worker_id for w in there.fleet.workers if w.backend.failure is not None]
            return Outcome(choices, there.dispatcher.admission.ledger.totals(""), told, lost)

    return play(scenario())


def stopped_at(one: Job, at: int, length: int) -> Job:
    """The job with a stop text that its first choice will generate."""
    text = outcome(one).choices[0].text
    stop = text[at % len(text) :][:length]
    return replace(one, sampling=replace(one.sampling, stop=(stop,)))


@settings(max_examples=60)
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
)
@example(0, 0, 1, 1, 7, "off", None, None, 0)
@example(0, MOST_TOKENS - 1, 2, 3, 7, "fixed:3", 1, (40, 6), 0)
def test_the_answer_is_the_same_wherever_workers_fail(
    first: int,
    second: int,
    prompts: int,
    n: int,
    seed: int,
    speculation: str,
    logprobs: int | None,
    stop: tuple[int, int] | None,
    min_tokens: int,
) -> None:
    """Tokens, texts, log probabilities, endings and charges equal those of an undisturbed run."""
    one = job(prompts, n, seed=seed, logprobs=logprobs, min_tokens=min_tokens)
    if stop is not None:
        one = stopped_at(one, *stop)
    config = structs.replace(CONFIG, speculation=speculation)
    plain = outcome(one, config=config)
    broken = outcome(one, behind(first), behind(second), workers=4, config=config)
    assert broken.choices == plain.choices
    assert broken.totals == plain.totals
    assert broken.totals.reserved == broken.totals.settled + broken.totals.released
    assert not plain.told.resumes
    losses = [(resume.index, resume.lost.worker.worker_id) for resume in broken.told.resumes]
    assert len(set(losses)) == len(losses), "a prompt lost the same worker twice"
    assert {worker for _, worker in losses} == set(broken.lost)
    assert all(resume.same_numerics_class for resume in broken.told.resumes)


@pytest.mark.parametrize("speculation", ["off", "fixed:3"])
def test_a_request_resumes_from_any_token(speculation: str) -> None:
    """A resume at any position of an output keeps the output and continues it identically."""
    config = structs.replace(CONFIG, speculation=speculation)
    plain = outcome(job(), config=config)
    at_once = 1 if speculation == "off" else 4  # maximum tokens of a step
    for position in range(MOST_TOKENS + 1 - at_once):
        broken = outcome(job(), behind(position), workers=2, config=config)
        assert broken.choices == plain.choices
        (resume,) = broken.told.resumes
        assert position <= resume.kept_tokens < position + at_once
        assert resume.cause is Cause.FAILED
        assert DEVICE_ERROR in resume.reason


def test_unread_output_of_a_lost_worker_is_kept() -> None:
    """A slow reader gets the unread output of the lost worker, and then the rest."""

    async def scenario() -> None:
        async with dispatching(simulated({0: Trouble(behind(12))}), 2, config=CONFIG) as there:
            told = Told()
            async with there.dispatcher.run(job(), watch=told) as run:
                first = await anext(run.deltas)
                await asyncio.sleep(1.0)  # in which the worker continues, and then fails
                assert there.fleet.workers[0].backend.failure is not None
                rest = Choice()
                await read(run, [rest])
            whole = [*first.token_ids, *rest.token_ids]
            assert whole == outcome_tokens
            assert told.resumes[0].kept_tokens >= 12

    outcome_tokens = outcome(job()).choices[0].token_ids
    play(scenario())


def test_a_resumed_request_gets_a_new_plan() -> None:
    """The new worker gets a plan for its own load, within the client's limits."""
    one = replace(job(), mode=SpeculationMode.NGRAM, max_draft_tokens=2)
    (resume,) = outcome(one, behind(5)).told.resumes
    view, plan = resume.placed.view, resume.placed.request.speculation
    assert view.prompt_tokens == len(one.prompts[0]) + resume.kept_tokens
    assert view.max_tokens == MOST_TOKENS - resume.kept_tokens
    assert (plan.proposer, plan.max_draft_tokens) == ("ngram", 2)


def test_a_resume_in_another_numerics_class_is_reported() -> None:
    """A resume on a worker of another numerics class is reported as such."""

    async def scenario() -> None:
        factory = simulated({0: Trouble(behind(5))}, {1: "h100-8b"})
        async with dispatching(factory, 2) as there:
            told = Told()
            await answer(there.dispatcher, job(), told)
            (resume,) = told.resumes
            assert not resume.same_numerics_class
            classes = [worker.backend.card.numerics_class for worker in there.fleet.workers]
            assert classes == ["sim:cpu-demo", "sim:h100-8b"]

    play(scenario())


def test_the_last_worker_ends_its_streams_with_its_own_error() -> None:
    """Without another worker, there is one error, and everything is settled and free."""

    async def scenario() -> None:
        factory, told = simulated({0: Trouble(behind(5))}), Told()
        async with dispatching(factory, 1, config=CONFIG) as there:
            async with there.dispatcher.run(job(), watch=told) as run:
                choices = [Choice()]
                with pytest.raises(BackendFailed, match=DEVICE_ERROR):
                    await read(run, choices)
            tokens = len(choices[0].token_ids)
            assert tokens >= 5
            assert await there.is_idle()
            totals = there.dispatcher.admission.ledger.totals("")
            assert (totals.settled, totals.open) == (len(job().prompts[0]) + tokens, 0)
        assert told.losses == [(Cause.FAILED, GivenUp.NO_WORKER)]

    play(scenario())


def poisonous(tokens: int) -> Look:
    """Any step in which the request of the first prompt has this many tokens."""
    poison = job().prompts[0]

    def look(plan: StepPlan) -> bool:
        return any(
            work.samples
            and work.sequence.request.prompt_ids == poison
            and work.sequence.output_tokens >= tokens
            for work in plan.work
        )

    return look


async def poisoned(there: Dispatched, told: Told) -> str:
    """Send the poisonous request, and return its error."""
    with pytest.raises(BackendFailed) as caught:
        await answer(there.dispatcher, job(), told)
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
    """It breaks a limited number of workers, never the last of three, and gets one error."""

    async def scenario() -> None:
        told, troubles = Told(), {w: Trouble(poisonous(tokens)) for w in range(workers)}
        async with dispatching(
            simulated(troubles), workers, config=CONFIG, most_resumes=most_resumes
        ) as there:
            error = await poisoned(there, told)
            assert DEVICE_ERROR in error
            assert len(there.fleet.serving) == workers - taken
            assert told.losses == [(Cause.FAILED, why)]
            assert len(told.resumes) == taken - 1
            assert await there.is_idle()
            totals = there.dispatcher.admission.ledger.totals("")
            assert totals.open == 0
            assert totals.reserved == totals.settled + totals.released
            if there.fleet.serving:
                other = replace(job(2), prompts=job(2).prompts[1:], request_id="other")
                assert all(texts(await answer(there.dispatcher, other)))

    play(scenario())


def test_requests_beside_a_poisonous_one_survive() -> None:
    """Other requests lose workers to it as well, but no tokens."""
    other = replace(job(2), prompts=job(2).prompts[1:])
    plain = outcome(other).choices

    async def scenario() -> None:
        troubles = {worker: Trouble(poisonous(9)) for worker in range(6)}
        async with dispatching(simulated(troubles), 6, config=CONFIG) as there:
            bystanders = [
                asyncio.create_task(
                    answer(there.dispatcher, replace(other, request_id=f"other-{index}"))
                )
                for index in range(12)
            ]
            await poisoned(there, Told())
            assert await asyncio.gather(*bystanders) == [plain] * 12
            assert len(there.fleet.serving) == 3

    play(scenario())


def test_a_resumed_request_is_charged_once() -> None:
    """A quota for exactly one request is enough for one that runs twice."""
    one = replace(job(), tenant="t")
    most = len(one.prompts[0]) + MOST_TOKENS

    async def scenario() -> None:
        quotas = {"t": Quota(requests_per_minute=1, tokens_per_minute=most)}
        factory = simulated({0: Trouble(behind(9))})
        async with dispatching(factory, 2, config=CONFIG, quotas=quotas) as there:
            (choice,) = await answer(there.dispatcher, one)
            assert choice.finish_reason is FinishReason.LENGTH
            assert there.dispatcher.admission.ledger.totals("t") == Totals(most, most, 0, 0)

    play(scenario())


def test_requests_after_a_failure_use_the_other_workers() -> None:
    """Requests after the failure go to the other workers at once."""

    async def scenario() -> None:
        async with dispatching(simulated({0: Trouble(in_step(0))}), 2, config=CONFIG) as there:
            told = [Told() for _ in range(3)]
            for index, watch in enumerate(told):
                one = replace(job(), request_id=f"r{index}")
                await answer(there.dispatcher, one, watch)
            assert [len(watch.resumes) for watch in told] == [1, 0, 0]
            assert [watch.workers for watch in told] == [["w-0"], ["w-1"], ["w-1"]]

    play(scenario())
