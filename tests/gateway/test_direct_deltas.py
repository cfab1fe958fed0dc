"""Tests of deltas whose events are sent in the call that delivers them."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.types import (
    Delta,
    FinishReason,
    SpeculationOutcome,
    TokenLogprob,
)
from draftgate.gateway.app import Listening
from draftgate.gateway.http.stream import INLINE_LOGPROBS, StreamedDeltas
from tests.gateway.harness import ScriptedBackend, client, events, running, until


def text(number: int) -> Delta:
    """Return a delta of one token with its text."""
    return Delta(0, (number,), f"<{number}>")


class Scene:
    """The deltas of a streamed response, whose client can be written to as long as `open` is true.

    Attributes:
        direct: the tokens that were sent in the call that delivered them.
        all: all tokens, in the order in which the client gets them.
    """

    def __init__(self) -> None:
        self.open = True
        self.direct: list[int] = []
        self.all: list[int] = []
        self.complete = False
        self.run = self
        self.waking = asyncio.Event()
        self.deltas = StreamedDeltas(self, self)

    # These are the parts of `EventStream`, `Answer` and `Run`.

    @property
    def writes_directly(self) -> bool:
        return self.open

    def write_directly(self, events: bytes) -> None:
        self.direct += events
        self.all += events

    async def write(self, events: bytes) -> None:
        await asyncio.sleep(0)
        self.all += events

    async def coalesced(self) -> None:
        await asyncio.sleep(0)

    def observe(self, delta: Delta) -> None:
        pass

    def events(self, delta: Delta) -> bytes:
        return bytes(delta.token_ids)

    chunk = events

    def wake(self) -> None:
        self.waking.set()

    async def send(self) -> None:
        """Send what waits, as the task of the request does."""
        while True:
            await self.waking.wait()
            self.waking.clear()
            await self.deltas.send_unread()


async def turns(count: int = 3) -> None:
    """Let other tasks run."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_text_does_not_wake_its_task() -> None:
    """While the client reads in time, deltas are sent in the call that delivers them."""
    scene = Scene()
    for number in range(3):
        scene.deltas.put(text(number))
    scene.deltas.put(text(3)._replace(logprobs=(TokenLogprob(1, -1.0),)))
    assert scene.direct == [0, 1, 2, 3]
    assert not scene.waking.is_set()


async def test_many_log_probabilities_are_rendered_in_the_task() -> None:
    """Long rendering happens in a thread, and later deltas wait for it."""
    scene = Scene()
    sending = asyncio.create_task(scene.send())
    many = (TokenLogprob(1, -1.0),) * (INLINE_LOGPROBS + 1)
    scene.deltas.put(text(0)._replace(logprobs=many))
    await turns(1)
    scene.deltas.put(text(1))
    assert scene.all == []
    await until(lambda: scene.all == [0, 1])
    sending.cancel()


@given(
    st.lists(st.sampled_from(["deliver", "two", "turn", "open", "close", "logprobs"]), max_size=30)
)
def test_every_delta_arrives_once_and_in_order(actions: list[str]) -> None:
    """The order holds when deltas are sent, kept, merged and rendered in any sequence."""

    async def check() -> None:
        scene, sent = Scene(), 0
        sending = asyncio.create_task(scene.send())
        for action in actions:
            if action == "turn":
                await turns()
            elif action in {"open", "close"}:
                scene.open = action == "open"
            else:
                for _ in range(2 if action == "two" else 1):
                    entries = INLINE_LOGPROBS + 1 if action == "logprobs" else 0
                    entry = (TokenLogprob(1, -1.0),) * entries
                    scene.deltas.put(text(sent)._replace(logprobs=entry))
                    sent += 1
        await until(lambda: len(scene.all) == sent)
        assert scene.all == list(range(sent))
        sending.cancel()

    asyncio.run(check())


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
        backend.sinks.deliver([(request.request_id, _end())])
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
