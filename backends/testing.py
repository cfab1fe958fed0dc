"""Conformance checks for the backends of this project and of third parties.

`check_backend` runs all checks on a fresh backend. Each check may also run alone on a started
backend. The checks compare a backend with the interface `Backend`, and need no particular model or
speed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Final

from draftgate.backends.base import Backend
from draftgate.backends.delta_reader import GeneratedDeltas, generate
from draftgate.backends.errors import BackendFailed, RequestRejected
from draftgate.backends.token_ids import compact
from draftgate.backends.types import (
    Capabilities,
    Delta,
    FinishReason,
    GenerationRequest,
    Pace,
    ResumedChoice,
    SamplingParams,
    Task,
)
from draftgate.policies.types import SpeculationMode, SpeculationPlan

_PATIENCE_S: Final = 60.0
"""Timeout of a check in seconds, which only failures reach."""

_DELTAS_AHEAD: Final = 16
"""Deltas of a stream by which a worker may be ahead of its reader, if the reader had no core."""

_NO_DRAFTS: Final = SpeculationPlan("off", SpeculationMode.OFF, None, 0, "a conformance check")
_ids = count()


@dataclass(frozen=True, slots=True)
class ChoiceOutput:
    """The output of one choice."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason


async def check_backend(backend: Backend) -> None:
    """Start a fresh backend, run every check on it, and stop it.

    Raises:
        AssertionError: the backend breaks its contract. The message contains the details.
    """
    await backend.start()
    try:
        check_card(backend)
        check_rejections(backend)
        await check_endings(backend)
        await check_replay(backend)
        await check_streams_are_not_crossed(backend)
        await check_speculation_changes_nothing(backend)
        if backend.card.capabilities.resume:
            await check_resume(backend)
        await check_traces(backend)
        await check_load(backend)
        await check_pace(backend)
        await check_prompt_logprobs(backend)
        await check_pooling(backend)
        await check_closing_frees(backend)
        await check_stop(backend)
    finally:
        await backend.stop()


def make_request(
    backend: Backend,
    prompt: str = "def f(",
    *,
    max_tokens: int = 12,
    seed: int = 1,
    n: int = 1,
    speculation: SpeculationPlan = _NO_DRAFTS,
) -> GenerationRequest:
    """Return a request that samples exactly `max_tokens` tokens."""
    sampling = SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True)
    prompt_ids = compact(backend.tokenizer.encode(prompt))
    return GenerationRequest(_id(), prompt_ids, sampling, speculation, n)


async def collect(backend: Backend, request: GenerationRequest) -> list[ChoiceOutput]:
    """Run a request to its end, check the form of the deltas, and return its choices.

    Raises:
        AssertionError: a choice ended twice or never, or continued after its end.
    """
    deltas: dict[int, list[Delta]] = {choice.choice: [] for choice in request.choices}
    async with aclosing(generate(backend, request)) as stream:
        await _read(stream, deltas)
    return [_outcome(of_choice) for of_choice in deltas.values()]


def check_rejections(backend: Backend) -> None:
    """Check that `check` rejects impossible requests and names the parameter."""
    longest = backend.card.max_model_len
    good = make_request(backend)
    backend.check(good)
    too_much_output = replace(good, sampling=replace(good.sampling, max_tokens=longest))
    too_long = replace(good, prompt_ids=good.prompt_ids[:1] * (longest + 1))
    unknown_token = replace(good, prompt_ids=compact([backend.tokenizer.vocab_size]))
    empty = replace(good, prompt_ids=compact([]))
    for bad, param in (
        (too_much_output, "max_tokens"),
        (too_long, "prompt"),
        (unknown_token, "prompt"),
        (empty, "prompt"),
    ):
        assert _rejected_param(backend, bad) == param, f"the rejection must name {param}"


async def check_endings(backend: Backend) -> None:
    """Check that every choice ends exactly once, with the requested number of tokens."""
    for n, max_tokens in ((1, 1), (1, 9), (3, 5)):
        choices = await collect(backend, make_request(backend, n=n, max_tokens=max_tokens))
        for choice in choices:
            assert len(choice.token_ids) == max_tokens, "the number of tokens must be max_tokens"
            assert choice.finish_reason is FinishReason.LENGTH, "only the length may end the choice"
            assert choice.text == backend.tokenizer.decode(choice.token_ids), (
                "the text must match the tokens"
            )


async def check_replay(backend: Backend) -> None:
    """Check that a seed determines the tokens."""
    first = await collect(backend, make_request(backend, n=2, max_tokens=24))
    again = await collect(backend, make_request(backend, n=2, max_tokens=24))
    assert first == again, "the same request must give the same output"
    other = await collect(backend, make_request(backend, n=2, max_tokens=24, seed=2))
    assert first != other, "another seed must give another output"
    assert first[0] != first[1], "choices must differ"


async def check_streams_are_not_crossed(backend: Backend) -> None:
    """Check that concurrent requests get the same output as single requests."""
    prompts = [f"def f{i}(x):\n    return x" for i in range(6)]
    requests = [make_request(backend, p, seed=i, n=1 + i % 2) for i, p in enumerate(prompts)]
    together = await asyncio.gather(*(collect(backend, request) for request in requests))
    for request, got in zip(requests, together, strict=True):
        fresh = replace(request, request_id=_id())
        alone = await collect(backend, fresh)
        assert [c.finish_reason for c in got] == [c.finish_reason for c in alone]
        assert got == alone, "a stream must not depend on concurrent ones"


async def check_speculation_changes_nothing(backend: Backend) -> None:
    """Check that drafts of every proposer change neither tokens nor text."""
    plain = await collect(backend, make_request(backend, max_tokens=24))
    for proposer in backend.load().proposers:
        plan = _drafting(proposer)
        drafted = await collect(backend, make_request(backend, max_tokens=24, speculation=plan))
        assert drafted == plain, f"drafts of {proposer} must not change the output"


async def check_resume(backend: Backend) -> None:
    """Check that resumed choices of another worker continue with the same output."""
    request = make_request(backend, n=2, max_tokens=16)
    first, second = await collect(backend, request)
    for done in (1, 8, 15):
        begun = (ResumedChoice(1, second.token_ids[:done]), ResumedChoice(0, first.token_ids[:1]))
        again = replace(request, request_id=_id(), resumed=begun)
        rest, other = await collect(backend, again)
        assert rest.token_ids == second.token_ids[done:], (
            "a resumed choice must continue the same output"
        )
        assert other.token_ids == first.token_ids[1:], "choices must keep their numbers"
        assert second.text.endswith(rest.text), "delivered text must not be repeated"
    done_already = replace(request, resumed=(ResumedChoice(0, first.token_ids),))
    assert _rejected_param(backend, done_already) == "max_tokens", (
        "a complete choice leaves nothing to generate"
    )


def check_card(backend: Backend) -> None:
    """Check that the capabilities on the card are consistent."""
    able = backend.card.capabilities
    assert isinstance(able, Capabilities), "the card must have capabilities"
    named = backend.card.numerics_class is not None
    assert named or not able.exact, "exactness needs a numerics class"
    assert able.speculation or not backend.load().proposers, (
        "proposers need the speculation capability"
    )


async def check_traces(backend: Backend) -> None:
    """Check the step traces of traced requests, and the phases of all requests."""
    plans = [_NO_DRAFTS, *(_drafting(name) for name in backend.load().proposers)]
    for plan in plans:
        plain = make_request(backend, n=2, max_tokens=16, speculation=plan)
        for request in (plain, replace(plain, request_id=_id(), traced=True)):
            deltas: dict[int, list[Delta]] = {0: [], 1: []}
            async with aclosing(generate(backend, request)) as stream:
                await _read(stream, deltas)
            for of_choice in deltas.values():
                _check_details(of_choice, traced=request.traced)


def _check_details(deltas: list[Delta], *, traced: bool) -> None:
    for delta in deltas:
        assert (delta.phases is not None) == (delta is deltas[0]), "only the first delta has phases"
        tokens = sum(step.tokens for step in delta.steps)
        assert tokens == (len(delta.token_ids) if traced else 0), "steps must cover all tokens"
        for step in delta.steps:
            drafted = len(step.draft_ids)
            assert step.accepted <= drafted <= step.offered, (
                "accepted tokens must be among the offered tokens"
            )
            assert step.accepted == step.tokens - 1, (
                "a step adds its accepted tokens and one token of the target"
            )
            assert len(step.survivals) == drafted, "each draft token has a survival"
            assert (step.proposer is not None) == (step.offered > 0), (
                "a proposer must be set exactly for drafts"
            )
    phases = deltas[0].phases
    assert phases is not None
    instants = (*(end_s for end_s, _ in phases.chunks), phases.first_token_s)
    whole = phases.queued_s, phases.scheduled_s, *instants
    assert list(whole) == sorted(whole), "phases must be in order"


async def check_load(backend: Backend) -> None:
    """Check that the load of an idle worker is plausible, and that steps are counted."""
    before = backend.load().steps
    await collect(backend, make_request(backend, max_tokens=8))
    await _until_idle(backend)
    load = backend.load()
    assert load.max_sequences >= 0
    assert load.step_tokens >= 0
    assert load.kv_block_tokens >= 1
    assert (load.prompt_tokens, load.paused) == (0, 0), (
        "an idle worker has no tokens left to compute"
    )
    assert min(load.speed.tpot_s, load.speed.prompt_token_s, load.speed.sequence_s) >= 0.0
    counted = before is None or (load.steps is not None and load.steps > before)
    assert counted, "steps must be counted, or be None"


async def check_pace(backend: Backend) -> None:
    """Check that a pace delays tokens without changing them, and that a pause stops them."""
    backend.set_pace("nobody", Pace.PAUSED)
    concurrent = min(backend.load().max_sequences, 8) or 1
    requests = [make_request(backend, seed=s, max_tokens=48) for s in range(concurrent)]
    alone = [await collect(backend, request) for request in requests]
    again = [replace(request, request_id=_id()) for request in requests]
    ids = [request.request_id for request in again]
    streams = [generate(backend, request) for request in again]
    found: list[dict[int, list[Delta]]] = [{0: []} for _ in again]
    for stream, deltas in zip(streams, found, strict=True):
        async with _patience():
            deltas[0].append(await anext(stream))
    for request_id in ids:
        backend.set_pace(request_id, Pace.PAUSED)
    # Steps that ran when the pace changed are over once another request has run to its end.
    await collect(backend, make_request(backend, max_tokens=8))
    waiting = [stream.unread.tokens for stream in streams]
    await collect(backend, make_request(backend, max_tokens=24))
    assert [stream.unread.tokens for stream in streams] == waiting, (
        "a paused request must not continue"
    )
    for place, request_id in enumerate(ids):
        backend.set_pace(request_id, Pace.SPARING if place % 2 else Pace.FULL)
    for stream, deltas in zip(streams, found, strict=True):
        async with aclosing(stream):
            await _read(stream, deltas)
    assert [[_outcome(deltas[0])] for deltas in found] == alone, "a pace must not change the output"
    for request_id in ids:
        backend.set_pace(request_id, Pace.PAUSED)  # allowed, although they have ended


async def check_prompt_logprobs(backend: Backend) -> None:
    """Check that choice 0 reports each token of the prompt but the first, also without output."""
    wanted = make_request(backend, "def add(a, b):\n    return a + b\n" * 3, max_tokens=4, n=2)
    scoring = replace(wanted.sampling, prompt_logprobs=1)
    found = []
    for sampling in (scoring, scoring, replace(scoring, max_tokens=0)):
        again = replace(wanted, request_id=_id(), sampling=sampling)
        async with _patience(), aclosing(generate(backend, again)) as stream:
            deltas = [delta async for delta in stream]
        tokens = sum(len(delta.token_ids) for delta in deltas)
        assert tokens == 2 * sampling.max_tokens, "the number of tokens must be max_tokens"
        scored = [(d.choice, d.prompt_logprobs) for d in deltas if d.prompt_logprobs is not None]
        assert [choice for choice, _ in scored] == [0], "one delta of choice 0 has the prompt"
        found += [one for _, one in scored]
    assert len([*found[0].scored_tokens()]) == len(wanted.prompt_ids) - 1
    if backend.card.capabilities.exact:
        assert found[1:] == found[:1] * 2, "a cached prompt must have the same log probabilities"


async def check_pooling(backend: Backend) -> None:
    """Check that an embedding or a score is a single reproducible delta, or is rejected."""
    for task in (Task.EMBED, Task.SCORE):
        await _check_pooled(backend, task)


async def _check_pooled(backend: Backend, task: Task) -> None:
    wanted = make_request(backend)
    wanted = replace(wanted, sampling=replace(wanted.sampling, max_tokens=0), task=task)
    if task not in backend.card.capabilities.tasks:
        assert _rejected_param(backend, wanted) == "model", "undeclared tasks must be rejected"
        return
    found = []
    for _ in range(2):
        again = replace(wanted, request_id=_id())
        async with _patience(), aclosing(generate(backend, again)) as stream:
            (delta,) = [delta async for delta in stream]
        assert delta.finish_reason is not None, "a pooled result has a finish reason"
        assert not delta.token_ids, "a pooled result has no tokens"
        assert delta.outcome is None, "a pooled result has no outcome"
        found.append(delta.pooled)
    size = backend.card.capabilities.embedding_size if task is Task.EMBED else 1
    assert len(found[0] or b"") == 4 * size, f"the result must have {size} float32 numbers"
    assert found[0] == found[1], "the same text must give the same result"


async def check_closing_frees(backend: Backend) -> None:
    """Check that closing a running or queued stream frees its KV while another stream runs."""
    await _until_idle(backend)
    free = backend.load().kv_blocks_free
    leaver = generate(backend, make_request(backend, "leave " * 40, max_tokens=200))
    never_read = generate(backend, make_request(backend, "queue " * 40, max_tokens=200))
    keeper = generate(backend, make_request(backend, max_tokens=200))
    async with _patience():
        await anext(leaver)
        await leaver.aclose()
        await never_read.aclose()
        # While deltas of the keeper wait here, its reader never waits, and then the event loop does
        # not send the end of the other streams to a worker in another process.
        for _ in range(_DELTAS_AHEAD):
            await anext(keeper)
            load = backend.load()
            if load.running + load.waiting == 1:
                break
        assert load.running + load.waiting == 1, "a closed stream must not run"
        await keeper.aclose()
    await _until_idle(backend)
    assert backend.load().kv_blocks_free == free, "a closed stream must free its KV blocks"


async def check_stop(backend: Backend) -> None:
    """Check that `stop` ends open streams with `BackendFailed` and is idempotent."""
    streams = [generate(backend, make_request(backend, max_tokens=500)) for _ in range(2)]
    await anext(streams[0])
    await backend.stop()
    await backend.stop()
    for stream in streams:
        assert await _fails(stream), "a stream of a stopped backend must fail"


def _id() -> str:
    return f"conformance-{next(_ids)}"


def _drafting(proposer: str) -> SpeculationPlan:
    return SpeculationPlan("check", SpeculationMode.AUTO, proposer, 4, "a conformance check")


async def _read(stream: GeneratedDeltas, deltas: dict[int, list[Delta]]) -> None:
    """Read a stream to its end into `deltas`, by choice, and check the form of each delta."""
    async with _patience():
        async for delta in stream:
            assert delta.choice in deltas, "every delta must be of a requested choice"
            mine = deltas[delta.choice]
            assert not mine or mine[-1].finish_reason is None, (
                "a choice must have no delta after its end"
            )
            ended = delta.finish_reason is not None
            assert ended == (delta.outcome is not None), "only the last delta has an outcome"
            mine.append(delta)


@asynccontextmanager
async def _patience() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(_PATIENCE_S):
            yield
    except TimeoutError:
        raise AssertionError(f"timeout after {_PATIENCE_S:.0f} s") from None


def _rejected_param(backend: Backend, request: GenerationRequest) -> str | None:
    try:
        backend.check(request)
    except RequestRejected as error:
        return error.param
    return None


async def _fails(stream: GeneratedDeltas) -> bool:
    try:
        async with _patience(), aclosing(stream):
            async for _ in stream:
                pass
    except BackendFailed:
        return True
    return False


async def _until_idle(backend: Backend) -> None:
    async with _patience():
        while backend.load().running + backend.load().waiting:  # noqa: ASYNC110 - no event for it
            await asyncio.sleep(1e-3)


def _outcome(deltas: list[Delta]) -> ChoiceOutput:
    assert deltas, "every choice must have deltas"
    reason = deltas[-1].finish_reason
    assert reason is not None, "every choice must have a finish reason"
    token_ids = tuple(token for delta in deltas for token in delta.token_ids)
    return ChoiceOutput(token_ids, "".join(delta.text for delta in deltas), reason)
