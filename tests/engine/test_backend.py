"""The engine backend: its thread, its streams, and its memory after failures."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest
import pytest_asyncio

from bench.harness.prompts import held_out_prompts
from draftgate.backends.delta_reader import generate
from draftgate.backends.engine.backend import EngineBackend
from draftgate.backends.engine.loop import EngineLoop
from draftgate.backends.engine.runner import Runner
from draftgate.backends.errors import BackendFailed, CheckpointError, RequestRejected
from draftgate.backends.testing import check_backend
from draftgate.backends.types import FinishReason, GenerationRequest, Pace
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.registry import speculation_policy
from tests.engine.harness import request

SMALL = WorkerConfig(device="cpu", max_model_len=512, kv_bytes=4 << 20, threads=1)
"""A pool of 42 blocks of 16 tokens, in which a dozen long sequences preempt each other."""


# All tests use one event loop, so that they can share an engine.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@asynccontextmanager
async def started() -> AsyncIterator[EngineBackend]:
    """Start an engine on the shipped model."""
    engine = EngineBackend(SMALL)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend() -> AsyncIterator[EngineBackend]:
    """A shared engine for tests that leave it idle and usable."""
    async with started() as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module")
async def fresh_backend() -> AsyncIterator[EngineBackend]:
    """An engine for a test that breaks or stops it."""
    async with started() as engine:
        yield engine


async def collect(backend: EngineBackend, generation: GenerationRequest) -> dict[int, list[int]]:
    """Return the tokens of each choice and check that every choice ends exactly once."""
    tokens: dict[int, list[int]] = {choice: [] for choice in range(generation.n)}
    ended: list[int] = []
    async with aclosing(generate(backend, generation)) as deltas:
        async for delta in deltas:
            assert delta.choice not in ended
            tokens[delta.choice].extend(delta.token_ids)
            if delta.finish_reason is not None:
                ended.append(delta.choice)
    assert sorted(ended) == list(range(generation.n))
    return tokens


def requests(backend: EngineBackend, count: int, max_tokens: int) -> list[GenerationRequest]:
    auto, off = speculation_policy("auto"), speculation_policy("off")
    return [
        request(
            str(index),
            prompt,
            off if index % 4 == 0 else auto,
            seed=index,
            temperature=0.8 if index % 2 else 0.0,
            max_tokens=max_tokens,
        )
        for index, prompt in enumerate(held_out_prompts(backend.tokenizer, count, most=120))
    ]


async def until_free(backend: EngineBackend) -> None:
    """Wait until no request runs or waits."""
    async with asyncio.timeout(60):
        while backend.load().running or backend.load().waiting:  # noqa: ASYNC110 (another thread's)
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("streams", "disconnects"), [(16, 20), pytest.param(64, 100, marks=pytest.mark.long)]
)
async def test_streams_do_not_mix_and_disconnects_leak_nothing(
    backend: EngineBackend, streams: int, disconnects: int
) -> None:
    """Concurrent streams have the same tokens as single streams, and cancelled streams free all
    blocks."""
    free = backend.load().kv_blocks_free
    generation = requests(backend, streams, 24)
    streamed = await asyncio.gather(*(collect(backend, each) for each in generation))
    for each, tokens in zip(generation, streamed, strict=True):
        assert await collect(backend, each) == tokens
    rng = random.Random(0)
    leavers = requests(backend, 10, 40)
    for _ in range(disconnects // len(leavers)):
        await asyncio.gather(*(disconnect(backend, each, rng.randint(0, 6)) for each in leavers))
    await until_free(backend)
    assert backend.load().kv_blocks_free == free


async def disconnect(backend: EngineBackend, generation: GenerationRequest, after: int) -> None:
    """Read this number of deltas and disconnect."""
    async with aclosing(generate(backend, generation)) as deltas:
        for _ in range(after):
            if await anext(deltas, None) is None:
                return


async def test_request_longer_than_the_context_is_rejected(backend: EngineBackend) -> None:
    """The engine rejects the request with both lengths and does not queue it."""
    policy = speculation_policy("auto")
    with pytest.raises(RequestRejected, match=r"length is 512 tokens, but 601 were") as caught:
        backend.check(request("long", [1] * 600, policy, max_tokens=1))
    assert caught.value.param == "prompt"
    with pytest.raises(RequestRejected, match="token ids must be between 0 and 4095"):
        backend.check(request("foreign", [1, 4096], policy, max_tokens=1))


async def test_stream_ends_with_a_finish_reason(backend: EngineBackend) -> None:
    """The last delta has the finish reason and the outcome."""
    prompt = backend.tokenizer.encode("x = 1\n")
    policy = speculation_policy("auto")
    async with aclosing(generate(backend, request("r", prompt, policy, max_tokens=7))) as deltas:
        last = [delta async for delta in deltas][-1]
    assert last.finish_reason is FinishReason.LENGTH
    assert last.outcome is not None


async def test_error_in_a_step_ends_every_stream(
    fresh_backend: EngineBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failing step ends all open streams and rejects later requests with its error."""

    def broken(self: Runner, plan: object) -> None:
        raise RuntimeError("the device is on fire")

    monkeypatch.setattr(Runner, "execute", broken)
    for generation in requests(fresh_backend, 3, 8):
        with pytest.raises(BackendFailed, match="on fire"):
            await collect(fresh_backend, generation)
    assert "on fire" in str(fresh_backend.failure)


async def test_missing_checkpoint_fails_the_start(tmp_path) -> None:
    """`start` raises the error of the loader."""
    engine = EngineBackend(WorkerConfig(model=str(tmp_path / "nowhere")))
    with pytest.raises(CheckpointError, match="nowhere"):
        await engine.start()
    await engine.stop()


async def test_stopping_ends_open_streams_with_an_error(fresh_backend: EngineBackend) -> None:
    """A stream that is open when the backend stops ends with an error."""
    stream = generate(fresh_backend, requests(fresh_backend, 1, 400)[0])
    await anext(stream)
    await fresh_backend.stop()
    with pytest.raises(BackendFailed, match="stopped"):
        async for _ in stream:
            pass


async def test_extreme_sampling_values_are_honoured(backend: EngineBackend) -> None:
    """A tiny temperature gives greedy tokens, a huge top-k has no effect, and the largest seed
    works."""
    prompt, off = held_out_prompts(backend.tokenizer, 1, most=40)[0], speculation_policy("off")

    async def tokens(**sampling: object) -> dict[int, list[int]]:
        return await collect(backend, request("extreme", prompt, off, max_tokens=12, **sampling))

    greedy = await tokens(temperature=0.0)
    for temperature in (1e-300, 1e-40, 1e-38):
        assert await tokens(temperature=temperature) == greedy
    sampled = await tokens(temperature=1.0, seed=(1 << 64) - 1)
    assert await tokens(temperature=1.0, seed=(1 << 64) - 1, top_k=1 << 31) == sampled
    assert await tokens(temperature=1e308, seed=1) != greedy


@pytest.mark.long
async def test_engine_passes_the_backend_conformance_suite() -> None:
    """The engine passes the conformance suite for backends. Quick runs test an engine in a process
    of its own (`test_own_process.py`)."""
    await check_backend(EngineBackend(SMALL))


async def test_engine_is_exact_on_this_machine(backend: EngineBackend) -> None:
    """The startup probe finds exact rows, and the numerics class reports exactness."""
    assert str(backend.card.numerics_class).endswith("/exact")
    assert backend.card.capabilities.exact


async def test_engine_with_only_paused_requests_sleeps(
    backend: EngineBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine thread waits for a command if all requests are paused, and plans again after a
    resume."""
    (generation,) = requests(backend, 1, 40)
    alone = await collect(backend, generation)
    asleep, sleep = threading.Event(), EngineLoop._sleep

    def recorded(self: EngineLoop, timeout_s: float | None) -> None:
        asleep.set()
        sleep(self, timeout_s)

    stream = generate(backend, generation)
    first = await anext(stream)
    monkeypatch.setattr(EngineLoop, "_sleep", recorded)
    backend.set_pace(generation.request_id, Pace.PAUSED)
    assert await asyncio.to_thread(asleep.wait, 60)
    assert (backend.load().running, backend.load().paused) == (0, 1)
    backend.set_pace(generation.request_id, Pace.FULL)
    rest = [token async for delta in stream for token in delta.token_ids]
    assert [*first.token_ids, *rest] == alone[0]


async def test_hanging_step_does_not_block_stopping(
    fresh_backend: EngineBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend stops within a bounded time during a hanging step, and open streams end with an
    error."""
    monkeypatch.setattr("draftgate.backends.engine.backend.STOP_S", 0.05)
    release, hangs = threading.Event(), threading.Event()
    launch = Runner.launch

    def hang(self, *args):
        hangs.set()
        release.wait()
        return launch(self, *args)

    monkeypatch.setattr(Runner, "launch", hang)
    generation = request("r", [1, 2, 3], speculation_policy("off"), max_tokens=8)
    async with aclosing(generate(fresh_backend, generation)) as deltas:
        reading = asyncio.ensure_future(anext(deltas))
        await asyncio.to_thread(hangs.wait, 60)
        async with asyncio.timeout(60):
            await fresh_backend.stop()
            with pytest.raises(BackendFailed, match="stopped"):
                await reading
    release.set()
