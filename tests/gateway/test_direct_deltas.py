"""Tests of deltas that are passed directly, without a switch to the task of their reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.streams import MOST_DIRECT, DeltaStreams, pass_directly
from draftgate.backends.token_ids import compact
from draftgate.backends.types import (
    Delta,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    SpeculationOutcome,
    TokenLogprob,
)
from draftgate.gateway.app import Listening
from draftgate.policies.types import SpeculationMode, SpeculationPlan
from tests.gateway.harness import ScriptedBackend, client, events, running, until

PLAN = SpeculationPlan("off", SpeculationMode.AUTO, None, 0, "test")
LAST = Delta(0, (9,), "", (), FinishReason.STOP)


def text(number: int) -> Delta:
    """Return a delta of one token with its text."""
    return Delta(0, (number,), f"<{number}>")


class Scene:
    """A stream with a reader, and a function that takes deltas as long as `open` is true."""

    def __init__(self) -> None:
        self.abandoned: list[str] = []
        self.streams = DeltaStreams(self.abandoned.append)
        request = GenerationRequest("r", compact((1,)), SamplingParams(8, 0), PLAN)
        self.deltas: AsyncGenerator[Delta, None] = self.streams.open(request)
        self.open = True
        self.taken: list[Delta] = []
        self.read: list[Delta] = []
        self.all: list[int] = []  # tokens in the order in which the client gets them
        pass_directly(self.deltas, self.take)

    def take(self, delta: Delta) -> bool:
        """Take a delta if open."""
        if self.open:
            self.taken.append(delta)
            self.all += delta.token_ids
        return self.open

    def start(self) -> asyncio.Task[None]:
        """Start the reader."""
        return asyncio.create_task(self._read())

    def deliver(self, *deltas: Delta) -> None:
        """Deliver the deltas of a step."""
        self.streams.deliver([("r", delta) for delta in deltas])

    async def _read(self) -> None:
        async for delta in self.deltas:
            self.read.append(delta)
            self.all += delta.token_ids


async def turns(count: int = 3) -> None:
    """Let other tasks run."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_text_does_not_wake_its_reader() -> None:
    """A waiting reader gets only the last delta, and the others are taken when delivered."""
    scene = Scene()
    reader = scene.start()
    await turns()
    scene.deliver(text(1))
    scene.deliver(text(2), text(3))
    assert scene.taken == [text(1), text(2), text(3)]
    scene.deliver(LAST)
    await reader
    assert scene.read == [LAST]


async def test_other_deltas_reach_the_reader() -> None:
    """Log probabilities and outcomes need the reader."""
    scene = Scene()
    reader = scene.start()
    await turns()
    detailed = text(1)._replace(logprobs=(TokenLogprob(1, -1.0),))
    scene.deliver(detailed)
    await turns()
    assert (scene.read, scene.taken) == ([detailed], [])
    scene.deliver(LAST)
    await reader


@given(
    st.lists(st.sampled_from(["deliver", "two", "turn", "open", "close", "logprobs"]), max_size=30)
)
def test_every_delta_arrives_once_and_in_order(actions: list[str]) -> None:
    """The order holds when deltas are taken, refused, merged and read in any sequence."""

    async def check() -> None:
        scene, sent = Scene(), 0
        reader = scene.start()
        for action in actions:
            if action == "turn":
                await turns()
            elif action in {"open", "close"}:
                scene.open = action == "open"
            else:
                for _ in range(2 if action == "two" else 1):
                    entry = (TokenLogprob(1, -1.0),) if action == "logprobs" else ()
                    scene.deliver(text(sent)._replace(logprobs=entry))
                    sent += 1
        scene.deliver(Delta(0, (sent,), "", (), FinishReason.STOP))
        await reader
        assert scene.all == list(range(sent + 1))

    asyncio.run(check())


async def test_cancelled_reader_gets_nothing_more() -> None:
    """No delta is taken after its reader was cancelled, even before the reader notices it."""
    scene = Scene()
    reader = scene.start()
    await turns()
    reader.cancel()
    scene.deliver(text(1))
    await asyncio.wait({reader})
    assert scene.all == []
    assert scene.abandoned == ["r"]


async def test_error_ends_the_stream_and_its_request() -> None:
    """The reader raises an error of the taking function, and the worker drops the request."""
    scene = Scene()

    def fail(_: Delta) -> bool:
        raise OverflowError("test")

    pass_directly(scene.deltas, fail)
    reader = scene.start()
    await turns()
    scene.deliver(text(1), text(2), LAST)
    with pytest.raises(OverflowError):
        await reader
    assert scene.abandoned == ["r"]
    assert scene.all == []


async def test_large_batches_yield_to_the_event_loop() -> None:
    """Deltas of a step beyond the limit wait for their readers."""
    scene = Scene()
    reader = scene.start()
    await turns()
    scene.deliver(*map(text, range(MOST_DIRECT + 1)))
    assert len(scene.taken) == MOST_DIRECT
    scene.deliver(LAST)
    await reader
    assert scene.all == [*range(MOST_DIRECT + 1), 9]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
async def test_streamed_text_is_the_whole_text(path: str) -> None:
    """A stream has all text with correct usage, whatever reaches its reader and what does not."""
    backend = ScriptedBackend()
    prompts = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "/v1/completions": {"prompt": "x"},
        "/v1/responses": {"input": "x"},
    }
    async with running(backends=[backend]) as gateway, client(gateway) as http:
        body = {**prompts[path], "stream": True}
        if "responses" not in path:
            body["stream_options"] = {"include_usage": True}
        sending = asyncio.create_task(http.post(path, json=body))
        request = await backend.submitted.get()
        for part in ("One", ' "two', '\n\\ three"', " é😀"):
            backend.emit(request, part)
            await turns(10)
        backend.streams.deliver([(request.request_id, _end())])
        answer = await sending
        assert _text_of(answer.text) == 'One "two\n\\ three" é😀'
        assert '"total_tokens":' in answer.text
        metrics = await http.get("/metrics")
        assert 'draftgate_generation_tokens_total{model_name="scripted"} 5.0' in metrics.text


async def test_whole_response_collects_direct_deltas(sim: Listening) -> None:
    """A response that is not streamed has the same text as a stream."""
    body = {"prompt": "def f(", "max_tokens": 24, "seed": 3, "ignore_eos": True}
    async with client(sim) as http:
        whole = (await http.post("/v1/completions", json=body)).json()
        streamed = await http.post("/v1/completions", json={**body, "stream": True})
    assert whole["usage"]["completion_tokens"] == 24
    assert whole["choices"][0]["text"] == _text_of(streamed.text)


async def test_disconnected_client_frees_its_request() -> None:
    """A worker drops a request whose client left while its deltas were passed directly."""
    backend = ScriptedBackend()
    async with running(backends=[backend]) as gateway, client(gateway) as http:
        body = {"prompt": "x", "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            request = await backend.submitted.get()
            backend.emit(request, "a")
            await turns(10)
            backend.emit(request, "b")
            assert answer.status_code == 200
        await until(lambda: not backend.abandoned.empty())
        backend.emit(request, "c")


def _end() -> Delta:
    return Delta(0, (), "", (), FinishReason.STOP, SpeculationOutcome())


def _text_of(stream: str) -> str:
    """Return the text in all chunks of a stream."""
    found = ""
    for one in events(stream):
        if not isinstance(one, dict):
            continue
        if one.get("type") == "response.output_text.delta":
            found += one["delta"]
        for choice in one.get("choices", ()):
            found += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return found
