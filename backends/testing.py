"""Conformance checks for backends: for our own tests, and for those of third parties.

`check_backend` runs them all on a backend it starts and stops; each check may also run alone on a
started one. They need no particular model or speed: what they compare are promises of `Backend`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Final

from draftgate.backends.base import Backend
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

PATIENCE_S: Final = 60.0
"""How long a check waits for what must happen; generous, since only failures wait that long."""

_NO_DRAFTS: Final = SpeculationPlan("off", SpeculationMode.OFF, None, 0, "a conformance check")
_ids = count()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a stream gave for one choice."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason


async def check_backend(backend: Backend) -> None:
    """Start a fresh backend, run every check on it, and stop it.

    Raises:
        AssertionError: the backend breaks its contract. The message names the promise.
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
        await check_unread_tokens(backend)
        await check_pace(backend)
        await check_embeddings(backend)
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
    """Return a request that samples for exactly `max_tokens` tokens."""
    sampling = SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True)
    prompt_ids = compact(backend.tokenizer.encode(prompt))
    return GenerationRequest(_id(), prompt_ids, sampling, speculation, n)


async def collect(backend: Backend, request: GenerationRequest) -> list[Outcome]:
    """Run a request to its end and return its `choices`, checking the form of the deltas.

    Raises:
        AssertionError: a choice ended twice or never, or went on after its end.
    """
    deltas: dict[int, list[Delta]] = {choice.choice: [] for choice in request.choices}
    async with aclosing(backend.generate(request)) as stream:
        await _read(stream, deltas)
    return [_outcome(of_choice) for of_choice in deltas.values()]


def check_rejections(backend: Backend) -> None:
    """Check that what can never run is refused by `check`, with the parameter's name."""
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
        assert _rejected_param(backend, bad) == param, f"{param} is at fault, and must be named"


async def check_endings(backend: Backend) -> None:
    """Check that every choice ends exactly once and has what was asked for."""
    for n, max_tokens in ((1, 1), (1, 9), (3, 5)):
        choices = await collect(backend, make_request(backend, n=n, max_tokens=max_tokens))
        for choice in choices:
            assert len(choice.token_ids) == max_tokens, "as many tokens as asked for"
            assert choice.finish_reason is FinishReason.LENGTH, "nothing but the length ended it"
            assert choice.text == backend.tokenizer.decode(choice.token_ids), "text is its tokens'"


async def check_replay(backend: Backend) -> None:
    """Check that a seed gives the same tokens again, and another seed others."""
    first = await collect(backend, make_request(backend, n=2, max_tokens=24))
    again = await collect(backend, make_request(backend, n=2, max_tokens=24))
    assert first == again, "the same request must give the same output"
    other = await collect(backend, make_request(backend, n=2, max_tokens=24, seed=2))
    assert first != other, "another seed must give another output"
    assert first[0] != first[1], "choices must differ"


async def check_streams_are_not_crossed(backend: Backend) -> None:
    """Check that requests running together get what each gets alone."""
    prompts = [f"def f{i}(x):\n    return x" for i in range(6)]
    requests = [make_request(backend, p, seed=i, n=1 + i % 2) for i, p in enumerate(prompts)]
    together = await asyncio.gather(*(collect(backend, request) for request in requests))
    for request, got in zip(requests, together, strict=True):
        fresh = replace(request, request_id=_id())
        alone = await collect(backend, fresh)
        assert [c.finish_reason for c in got] == [c.finish_reason for c in alone]
        assert got == alone, "a stream depends on what runs beside it"


async def check_speculation_changes_nothing(backend: Backend) -> None:
    """Check that drafts change neither tokens nor text, with every proposer there is."""
    plain = await collect(backend, make_request(backend, max_tokens=24))
    for proposer in backend.load().proposers:
        plan = _drafting(proposer)
        drafted = await collect(backend, make_request(backend, max_tokens=24, speculation=plan))
        assert drafted == plain, f"drafts of {proposer} change the output"


async def check_resume(backend: Backend) -> None:
    """Check that choices which another worker began go on as they would have there."""
    request = make_request(backend, n=2, max_tokens=16)
    first, second = await collect(backend, request)
    for done in (1, 8, 15):
        begun = (ResumedChoice(1, second.token_ids[:done]), ResumedChoice(0, first.token_ids[:1]))
        again = replace(request, request_id=_id(), resumed=begun)
        rest, other = await collect(backend, again)
        assert rest.token_ids == second.token_ids[done:], "a resumed choice says something else"
        assert other.token_ids == first.token_ids[1:], "choices keep their numbers"
        assert second.text.endswith(rest.text), "text that was sent comes again"
    done_already = replace(request, resumed=(ResumedChoice(0, first.token_ids),))
    assert _rejected_param(backend, done_already) == "max_tokens", "nothing is left to generate"


def check_card(backend: Backend) -> None:
    """Check that the card says what can be done, and promises no bits that have no class."""
    able = backend.card.capabilities
    assert isinstance(able, Capabilities), "the card has capabilities"
    named = backend.card.numerics_class is not None
    assert named or not able.exact, "equal bits are promised within a numerics class"
    assert able.speculation or not backend.load().proposers, "proposers, but no speculation"


async def check_traces(backend: Backend) -> None:
    """Check that traced requests are told what steps did, and how each choice began."""
    plans = [_NO_DRAFTS, *(_drafting(name) for name in backend.load().proposers)]
    for plan in plans:
        plain = make_request(backend, n=2, max_tokens=16, speculation=plan)
        for request in (plain, replace(plain, request_id=_id(), traced=True)):
            deltas: dict[int, list[Delta]] = {0: [], 1: []}
            async with aclosing(backend.generate(request)) as stream:
                await _read(stream, deltas)
            for of_choice in deltas.values():
                _check_details(of_choice, traced=request.traced)


def _check_details(deltas: list[Delta], *, traced: bool) -> None:
    for delta in deltas:
        assert (delta.phases is not None) == (delta is deltas[0]), "the first delta has phases"
        told = sum(step.tokens for step in delta.steps)
        assert told == (len(delta.token_ids) if traced else 0), "steps tell of all tokens, or none"
        for step in delta.steps:
            drafted = len(step.draft_ids)
            assert step.accepted <= drafted <= step.offered, "accepted are some of those offered"
            assert step.tokens - 1 <= step.accepted <= step.tokens, "a step draws one token itself"
            assert len(step.survivals) == drafted, "each draft token has its chance"
            assert (step.proposer is not None) == (step.offered > 0), "drafts have a proposer"
    phases = deltas[0].phases
    assert phases is not None
    instants = (*(end_s for end_s, _ in phases.chunks), phases.first_token_s)
    whole = phases.queued_s, phases.scheduled_s, *instants
    assert list(whole) == sorted(whole), "a choice is queued, scheduled, fed, and speaks"


async def check_load(backend: Backend) -> None:
    """Check that the load says how much room and how fast a worker is, or that nobody knows."""
    before = backend.load().steps
    await collect(backend, make_request(backend, max_tokens=8))
    await _until_idle(backend)
    load = backend.load()
    assert load.max_sequences >= 0
    assert load.step_tokens >= 0
    assert load.kv_block_tokens >= 1
    assert (load.prompt_tokens, load.paused) == (0, 0), "an idle worker owes nobody anything"
    assert min(load.speed.tpot_s, load.speed.prompt_token_s, load.speed.sequence_s) >= 0.0
    counted = before is None or (load.steps is not None and load.steps > before)
    assert counted, "steps that ran are counted, or none ever is"


async def check_unread_tokens(backend: Backend) -> None:
    """Check that what waits for a reader is counted, and what is read no more."""
    request = make_request(backend, max_tokens=400)
    assert backend.unread_tokens(request.request_id) == 0, "nobody asked for anything yet"
    async with aclosing(backend.generate(request)) as stream, _patience():
        while backend.unread_tokens(request.request_id) < 3:  # noqa: ASYNC110 - no event for it
            await asyncio.sleep(1e-3)
        waiting = backend.unread_tokens(request.request_id)
        first = await anext(stream)
        assert len(first.token_ids) >= waiting, "what waited comes at once"
        assert backend.unread_tokens(request.request_id) < waiting, "what was read waits no more"
    assert backend.unread_tokens(request.request_id) == 0, "nobody reads any more"


async def check_pace(backend: Backend) -> None:
    """Check that a pace delays tokens and changes none, and that what is paused delays nobody."""
    backend.set_pace("nobody", Pace.PAUSED)
    seats = min(backend.load().max_sequences, 8) or 1
    requests = [make_request(backend, seed=s, max_tokens=48) for s in range(seats)]
    alone = [await collect(backend, request) for request in requests]
    again = [replace(request, request_id=_id()) for request in requests]
    ids = [request.request_id for request in again]
    streams = [backend.generate(request) for request in again]
    told: list[dict[int, list[Delta]]] = [{0: []} for _ in again]
    for stream, deltas in zip(streams, told, strict=True):
        async with _patience():
            deltas[0].append(await anext(stream))
    for request_id in ids:
        backend.set_pace(request_id, Pace.PAUSED)
    # Steps under way when the pace changed are over when another request has run to its end.
    await collect(backend, make_request(backend, max_tokens=8))
    waiting = [backend.unread_tokens(request_id) for request_id in ids]
    await collect(backend, make_request(backend, max_tokens=24))
    assert [backend.unread_tokens(i) for i in ids] == waiting, "a paused request goes on"
    for place, request_id in enumerate(ids):
        backend.set_pace(request_id, Pace.SPARING if place % 2 else Pace.FULL)
    for stream, deltas in zip(streams, told, strict=True):
        async with aclosing(stream):
            await _read(stream, deltas)
    assert [[_outcome(deltas[0])] for deltas in told] == alone, "a pace changes what is generated"
    for request_id in ids:
        backend.set_pace(request_id, Pace.PAUSED)  # they have ended: no matter


async def check_embeddings(backend: Backend) -> None:
    """Check that a prompt is embedded in one delta and the same again, or refused, as declared."""
    wanted = make_request(backend)
    sampling = replace(wanted.sampling, max_tokens=0)
    wanted = replace(wanted, sampling=sampling, task=Task.EMBED)
    if not backend.card.capabilities.embeddings:
        assert _rejected_param(backend, wanted) == "model", "no embeddings are declared"
        return
    found = []
    for _ in range(2):
        again = replace(wanted, request_id=_id())
        async with _patience(), aclosing(backend.generate(again)) as stream:
            (delta,) = [delta async for delta in stream]
        assert delta.finish_reason is not None, "an embedding comes with its end"
        assert not delta.token_ids, "nothing is generated"
        assert delta.outcome is None, "nothing was drafted"
        found.append(delta.embedding)
    size = backend.card.capabilities.embedding_size
    assert len(found[0] or b"") == 4 * size, "float32, as many as declared"
    assert found[0] == found[1], "the same text must give the same vector"


async def check_closing_frees(backend: Backend) -> None:
    """Check that closing a stream, running or queued, frees its KV within one step."""
    await _until_idle(backend)
    free = backend.load().kv_blocks_free
    leaver = backend.generate(make_request(backend, "leave " * 40, max_tokens=200))
    never_read = backend.generate(make_request(backend, "queue " * 40, max_tokens=200))
    keeper = backend.generate(make_request(backend, max_tokens=200))
    async with _patience():
        await anext(leaver)
        await leaver.aclose()
        await never_read.aclose()
        # A worker in a thread may be ahead of its readers: what waits to be read, what is on its
        # way here, the step that was running, and the one in which the closed ones must be gone.
        for _ in range(4):
            await anext(keeper)
        load = backend.load()
        assert load.running + load.waiting == 1, "a closed stream still runs"
        await keeper.aclose()
    await _until_idle(backend)
    assert backend.load().kv_blocks_free == free, "a closed stream keeps KV blocks"


async def check_stop(backend: Backend) -> None:
    """Check that `stop` ends open streams with `BackendFailed`, and may be called again."""
    streams = [backend.generate(make_request(backend, max_tokens=500)) for _ in range(2)]
    await anext(streams[0])
    await backend.stop()
    await backend.stop()
    for stream in streams:
        assert await _fails(stream), "a stream of a stopped backend must fail"


def _id() -> str:
    return f"conformance-{next(_ids)}"


def _drafting(proposer: str) -> SpeculationPlan:
    return SpeculationPlan("check", SpeculationMode.AUTO, proposer, 4, "a conformance check")


async def _read(stream: AsyncGenerator[Delta, None], deltas: dict[int, list[Delta]]) -> None:
    """Read a stream to its end into the deltas of each choice, checking their form."""
    async with _patience():
        async for delta in stream:
            assert delta.choice in deltas, "a delta of a choice nobody asked for"
            mine = deltas[delta.choice]
            assert not mine or mine[-1].finish_reason is None, "a delta after the choice's end"
            ended = delta.finish_reason is not None
            assert ended == (delta.outcome is not None), "the outcome comes with the end"
            mine.append(delta)


@asynccontextmanager
async def _patience() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield
    except TimeoutError:
        raise AssertionError(f"what must happen did not within {PATIENCE_S:.0f} s") from None


def _rejected_param(backend: Backend, request: GenerationRequest) -> str | None:
    try:
        backend.check(request)
    except RequestRejected as error:
        return error.param
    return None


async def _fails(stream: AsyncGenerator[Delta, None]) -> bool:
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


def _outcome(deltas: list[Delta]) -> Outcome:
    assert deltas, "a choice without deltas"
    reason = deltas[-1].finish_reason
    assert reason is not None, "the stream ended before its choice did"
    token_ids = tuple(token for delta in deltas for token in delta.token_ids)
    return Outcome(token_ids, "".join(delta.text for delta in deltas), reason)
