"""Tests of streams under random interleavings: one typed ending, and no leaked resources."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from draftgate.backends.types import GenerationRequest
from draftgate.gateway.app import Listening, drain
from draftgate.gateway.dispatch.quotas import quota_account
from draftgate.gateway.http import readers
from draftgate.gateway.lifecycle import NodeState
from draftgate.gateway.node import Node
from draftgate.gateway.state.commands import ReadTotals
from tests.examples import examples
from tests.gateway.harness import ScriptedBackend, events, is_idle, port_of, running, until
from tests.gateway.troubles import AMPLE

MUCH = "x" * 200_000
"""Text that exceeds all buffers between the server and a client that does not read."""


class Event(StrEnum):
    """An event that can happen while a stream is open."""

    EMIT = "a step of one token"
    EMIT_MORE = "a step of several tokens"
    EMIT_MUCH = "a step that no buffer holds"
    STOP = "the client stops reading"
    RESUME = "the client continues reading"
    LEAVE = "the client leaves"
    LAST = "a prompt's last step"
    CRASH = "the worker breaks"
    DRAIN = "the node begins to drain"


@dataclass(frozen=True)
class Api:
    """An endpoint that streams."""

    path: str
    body: dict[str, Any]
    prompts: int = 1


APIS = [
    Api("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 99}),
    Api("/v1/completions", {"prompt": "x", "max_tokens": 99}),
    Api("/v1/completions", {"prompt": ["x", "y"], "max_tokens": 99}, 2),
    Api("/v1/responses", {"input": "x", "max_output_tokens": 99}),
    Api("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 99}),
]

EVENTS = st.lists(
    st.tuples(st.sampled_from(Event), st.integers(0, 1), st.integers(0, 3)), max_size=9
)
"""Event, index of its prompt, and number of loop iterations after the event."""


class Client:
    """A client on a plain socket with a small receive window."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.setblocking(False)
        self._reading = asyncio.Event()
        self._reading.set()
        self._task: asyncio.Task[None] | None = None
        self.received = b""

    async def send(self, gateway: Listening, api: Api) -> None:
        """Connect, send the request and start reading."""
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self._socket, ("127.0.0.1", port_of(gateway)))
        data = json.dumps({**api.body, "stream": True}).encode()
        head = f"POST {api.path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += f"Content-Length: {len(data)}\r\n\r\n"
        await loop.sock_sendall(self._socket, head.encode() + data)
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._reading.wait()
            data = await loop.sock_recv(self._socket, 65536)
            if not data:
                return
            self.received += data

    def stop(self) -> None:
        """Stop reading, except for data that has already arrived."""
        self._reading.clear()

    def resume(self) -> None:
        """Continue reading."""
        self._reading.set()

    async def disconnect(self) -> None:
        """Close the connection."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait({self._task})
        self._socket.close()

    async def read_to_end(self) -> bytes:
        """Read to the end and return all received bytes."""
        assert self._task is not None
        self.resume()
        async with asyncio.timeout(60):
            await self._task
        self._socket.close()
        return self.received


@dataclass
class Scenario:
    """A stream, the events on the stream, and the output that its client should receive.

    Attributes:
        texts: the text that the worker has emitted so far, by prompt.
        ended: the prompts whose last step the worker has emitted.
    """

    gateway: Listening
    scripted: ScriptedBackend
    api: Api
    client: Client
    requests: list[GenerationRequest]
    texts: list[str]
    ended: set[int] = field(default_factory=set)
    left: bool = False
    crashed: bool = False
    draining: asyncio.Task[bool] | None = None

    @property
    def complete(self) -> bool:
        """Whether the worker has finished all choices."""
        return len(self.ended) == len(self.requests)

    async def trigger(self, event: Event, prompt: int) -> None:
        """Trigger an event if the event is still possible."""
        prompt %= len(self.requests)
        texts = {Event.EMIT: "one ", Event.EMIT_MORE: "two or three ", Event.EMIT_MUCH: MUCH}
        if event in texts:
            self.emit(prompt, texts[event])
        elif event is Event.LAST:
            self.emit(prompt, "end", last=True)
        elif event is Event.CRASH and not self.crashed:
            self.crashed = not self.complete
            self.scripted.crash("broken")
        elif event is Event.DRAIN and self.draining is None:
            self.draining = asyncio.create_task(drain(self.gateway.node, 60))
        elif not self.left:
            await self._trigger_client(event)

    async def _trigger_client(self, event: Event) -> None:
        if event is Event.STOP:
            self.client.stop()
        elif event is Event.RESUME:
            self.client.resume()
        elif event is Event.LEAVE:
            self.left = True
            await self.client.disconnect()

    def emit(self, prompt: int, text: str, *, last: bool = False) -> None:
        """Deliver a step unless the prompt has ended or the worker has failed."""
        if prompt in self.ended or self.scripted.failure is not None:
            return
        self.texts[prompt] += text
        self.scripted.emit(self.requests[prompt], text, last=last)
        if last:
            self.ended.add(prompt)

    async def finish(self) -> None:
        """Let the worker finish and check the output that the client received."""
        for prompt in range(len(self.requests)):
            self.emit(prompt, "end", last=True)
        if not self.left:
            check(self, *parse_response(await self.client.read_to_end()))
        await until(lambda: is_idle(self.gateway.node))
        if self.draining is not None:
            assert await self.draining
            assert self.gateway.node.state is NodeState.DRAINING


def parse_response(raw: bytes) -> tuple[int, str]:
    """Return the status and the body of a whole response."""
    head, _, rest = raw.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    if b"chunked" not in head.lower():
        return status, rest.decode()
    body = b""
    while True:
        length, _, rest = rest.partition(b"\r\n")
        size = int(length, 16)
        if not size:
            assert rest == b"\r\n", "data follows the last chunk"
            return status, body.decode()
        assert rest[size : size + 2] == b"\r\n", "a chunk is truncated"
        body, rest = body + rest[:size], rest[size + 2 :]


def check(scenario: Scenario, status: int, body: str) -> None:
    """Assert that the response has one ending, and that the ending matches the events."""
    if status != 200:
        assert (scenario.crashed, status) == (True, 503)
        error = json.loads(body)["error"]
        assert error.get("code", error["type"]) in {"worker_failed", "overloaded_error"}
        return
    received = events(body)
    if scenario.api.path == "/v1/responses":
        assert received.pop() == "[DONE]"
        endings = [e["type"] for e in received if e["type"] in ENDINGS_OF_RESPONSES]
        assert (
            endings
            == [received[-1]["type"]]
            == ["response.failed" if scenario.crashed else COMPLETED]
        )
    elif scenario.api.path == "/v1/messages":
        endings = [e["type"] for e in received if e["type"] in ("message_stop", "error")]
        expected = "error" if scenario.crashed else "message_stop"
        assert endings == [received[-1]["type"]] == [expected]
    else:
        endings = [e for e in received if e == "[DONE]" or "error" in e]
        assert endings == [received[-1]]
        assert (endings[0] != "[DONE]") is scenario.crashed
    if not scenario.crashed:
        assert received_texts(scenario.api, received) == scenario.texts
        assert finish_reasons(received) == (
            ["stop"] * scenario.api.prompts if has_choices(scenario) else []
        )


COMPLETED = "response.completed"
ENDINGS_OF_RESPONSES = {COMPLETED, "response.incomplete", "response.failed", "error"}


def has_choices(scenario: Scenario) -> bool:
    """Return whether the endpoint's responses have choices."""
    return "completions" in scenario.api.path


def finish_reasons(received: list[Any]) -> list[str]:
    """Return the finish reasons of the choices."""
    choices = [choice for e in received if e != "[DONE]" for choice in e.get("choices", [])]
    return [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]


def received_texts(api: Api, received: list[Any]) -> list[str]:
    """Return the texts that the client received, by choice."""
    texts = [""] * api.prompts
    for event in received:
        if event == "[DONE]":
            continue
        if event.get("type") == "response.output_text.delta":
            texts[0] += event["delta"]
        if event.get("type") == "content_block_delta":
            texts[0] += event["delta"]["text"]
        for choice in event.get("choices", []):
            delta = choice.get("delta", {})
            texts[choice["index"]] += choice.get("text", "") or delta.get("content") or ""
    return texts


async def check_balanced(node: Node) -> None:
    """Assert that every reservation is settled or released."""
    totals = await node.store.call(ReadTotals(quota_account("", node.fleet.model_id)))
    assert totals.open == 0
    assert totals.reserved == totals.settled + totals.released > 0


async def run_events(api: Api, stream_events: list[tuple[Event, int, int]]) -> None:
    """Open a stream and trigger the events."""
    scripted = ScriptedBackend()
    async with running(backends=[scripted]) as gateway:
        gateway.node.dispatcher.admission.quotas.change({"": AMPLE})
        client = Client()
        await client.send(gateway, api)
        requests = [await scripted.submitted.get() for _ in range(api.prompts)]
        scenario = Scenario(gateway, scripted, api, client, requests, [""] * api.prompts)
        for event, prompt, turns in stream_events:
            await scenario.trigger(event, prompt)
            for _ in range(turns):
                await asyncio.sleep(0)
        await scenario.finish()
        await check_balanced(gateway.node)
        assert not len(scripted.sinks)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize(
    "api", APIS, ids=["chat", "completion", "two prompts", "response", "message"]
)
@settings(max_examples=examples(80))
@given(stream_events=EVENTS)
@example(
    stream_events=[
        (Event.STOP, 0, 1),
        (Event.EMIT_MUCH, 0, 3),
        (Event.EMIT_MUCH, 1, 3),
        (Event.LEAVE, 0, 0),
    ]
)
@example(
    stream_events=[
        (Event.STOP, 0, 1),
        (Event.EMIT_MUCH, 0, 3),
        (Event.LAST, 0, 3),
        (Event.CRASH, 0, 0),
    ]
)
@example(stream_events=[(Event.EMIT_MUCH, 0, 0), (Event.CRASH, 0, 0), (Event.DRAIN, 0, 0)])
@example(stream_events=[(Event.LAST, 0, 3), (Event.LEAVE, 0, 0), (Event.DRAIN, 0, 0)])
def test_any_interleaving_ends_once_and_frees_everything(
    api: Api, stream_events: list[tuple[Event, int, int]]
) -> None:
    """A stream ends once and frees everything for any order of steps, pauses, failures and drains.

    A client that stays connected receives one typed ending that matches the events.
    """
    seconds = count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "CHECK_INTERVAL_S", 0.001)
        clock = SimpleNamespace(monotonic=lambda: float(next(seconds)))
        patch.setattr("draftgate.gateway.routes.time", clock)
        asyncio.run(run_events(api, stream_events))
