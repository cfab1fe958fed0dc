"""Streams under random interleavings of events: one typed ending, and everything is freed."""

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
from draftgate.gateway.http import slow_readers
from draftgate.gateway.lifecycle import NodeState
from draftgate.gateway.node import Node
from tests.gateway.harness import ScriptedBackend, events, is_idle, port_of, running, until

MUCH = "x" * 200_000
"""More than connection and kernel hold for a client that does not read."""


class Act(StrEnum):
    """An event that can happen while a stream is open."""

    EMIT = "a step of one token"
    EMIT_MORE = "a step of several tokens"
    EMIT_MUCH = "a step that no buffer holds"
    STOP = "the client stops reading"
    RESUME = "the client reads on"
    LEAVE = "the client leaves"
    LAST = "a prompt's last step"
    CRASH = "the worker breaks"
    DRAIN = "the node is told to stop"


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
]

ACTS = st.lists(st.tuples(st.sampled_from(Act), st.integers(0, 1), st.integers(0, 3)), max_size=9)
"""What happens, to which prompt, and how often the event loop turns after it."""


class Client:
    """A client on a plain socket with a small window."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.setblocking(False)
        self._reading = asyncio.Event()
        self._reading.set()
        self._task: asyncio.Task[None] | None = None
        self.received = b""

    async def ask(self, where: Listening, api: Api) -> None:
        """Connect, send the request, and start reading."""
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self._socket, ("127.0.0.1", port_of(where)))
        data = json.dumps({**api.body, "stream": True}).encode()
        head = f"POST {api.path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
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
        """Stop reading, apart from data already under way."""
        self._reading.clear()

    def resume(self) -> None:
        """Continue reading."""
        self._reading.set()

    async def leave(self) -> None:
        """Close the connection."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait({self._task})
        self._socket.close()

    async def everything(self) -> bytes:
        """Read to the end."""
        assert self._task is not None
        self.resume()
        async with asyncio.timeout(10):
            await self._task
        self._socket.close()
        return self.received


@dataclass
class Play:
    """One stream, the events played on it, and what its client should receive.

    Attributes:
        texts: emitted so far, by prompt.
        ended: prompts whose last step was emitted.
    """

    where: Listening
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

    async def act(self, act: Act, prompt: int) -> None:
        """Play an event, if it is still possible."""
        prompt %= len(self.requests)
        texts = {Act.EMIT: "one ", Act.EMIT_MORE: "two or three ", Act.EMIT_MUCH: MUCH}
        if act in texts:
            self.emit(prompt, texts[act])
        elif act is Act.LAST:
            self.emit(prompt, "end", last=True)
        elif act is Act.CRASH and not self.crashed:
            self.crashed = not self.complete
            self.scripted.crash("broken")
        elif act is Act.DRAIN and self.draining is None:
            self.draining = asyncio.create_task(drain(self.where.node, 60))
        elif not self.left:
            await self._reads(act)

    async def _reads(self, act: Act) -> None:
        if act is Act.STOP:
            self.client.stop()
        elif act is Act.RESUME:
            self.client.resume()
        elif act is Act.LEAVE:
            self.left = True
            await self.client.leave()

    def emit(self, prompt: int, text: str, *, last: bool = False) -> None:
        """Deliver a step, if the worker still would."""
        if prompt in self.ended or self.scripted.failure is not None:
            return
        self.texts[prompt] += text
        self.scripted.emit(self.requests[prompt], text, last=last)
        if last:
            self.ended.add(prompt)

    async def finish(self) -> None:
        """Let the worker finish, and check what the client received."""
        for prompt in range(len(self.requests)):
            self.emit(prompt, "end", last=True)
        if not self.left:
            check(self, *parsed(await self.client.everything()))
        await until(lambda: is_idle(self.where.node))
        if self.draining is not None:
            assert await self.draining
            assert self.where.node.state is NodeState.DRAINING


def parsed(raw: bytes) -> tuple[int, str]:
    """Return status and body of a whole answer."""
    head, _, rest = raw.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    if b"chunked" not in head.lower():
        return status, rest.decode()
    body = b""
    while True:
        length, _, rest = rest.partition(b"\r\n")
        size = int(length, 16)
        if not size:
            assert rest == b"\r\n", "something stands behind the end"
            return status, body.decode()
        assert rest[size : size + 2] == b"\r\n", "a chunk is cut"
        body, rest = body + rest[:size], rest[size + 2 :]


def check(play: Play, status: int, body: str) -> None:
    """Check that the only ending of an answer matches what happened."""
    if status != 200:
        assert play.crashed
        assert (status, json.loads(body)["error"]["code"]) == (503, "worker_failed")
        return
    told = events(body)
    if play.api.path == "/v1/responses":
        endings = [e["type"] for e in told if e["type"] in ENDINGS_OF_RESPONSES]
        assert endings == [told[-1]["type"]] == ["response.failed" if play.crashed else COMPLETED]
    else:
        endings = [e for e in told if e == "[DONE]" or "error" in e]
        assert endings == [told[-1]]
        assert (endings[0] != "[DONE]") is play.crashed
    if not play.crashed:
        assert shown(play.api, told) == play.texts
        assert finish_reasons(told) == (["stop"] * play.api.prompts if is_choices(play) else [])


COMPLETED = "response.completed"
ENDINGS_OF_RESPONSES = {COMPLETED, "response.incomplete", "response.failed", "error"}


def is_choices(play: Play) -> bool:
    """Whether answers have choices."""
    return play.api.path != "/v1/responses"


def finish_reasons(told: list[Any]) -> list[str]:
    """Return the finish reasons of the choices."""
    choices = [choice for e in told if e != "[DONE]" for choice in e.get("choices", [])]
    return [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]


def shown(api: Api, told: list[Any]) -> list[str]:
    """Return the texts that a client received, by choice."""
    texts = [""] * api.prompts
    for event in told:
        if event == "[DONE]":
            continue
        if event.get("type") == "response.output_text.delta":
            texts[0] += event["delta"]
        for choice in event.get("choices", []):
            delta = choice.get("delta", {})
            texts[choice["index"]] += choice.get("text", "") or delta.get("content") or ""
    return texts


def check_balanced(node: Node) -> None:
    """Check that every reservation is settled or released."""
    totals = node.dispatcher.admission.ledger.totals("")
    assert totals.open == 0
    assert totals.reserved == totals.settled + totals.released > 0


async def played(api: Api, acts: list[tuple[Act, int, int]]) -> None:
    """Open a stream and play events on it."""
    scripted = ScriptedBackend()
    async with running(backends=[scripted]) as where:
        client = Client()
        await client.ask(where, api)
        requests = [await scripted.submitted.get() for _ in range(api.prompts)]
        play = Play(where, scripted, api, client, requests, [""] * api.prompts)
        for act, prompt, turns in acts:
            await play.act(act, prompt)
            for _ in range(turns):
                await asyncio.sleep(0)
        await play.finish()
        check_balanced(where.node)
        assert not len(scripted.streams)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("api", APIS, ids=["chat", "completion", "two prompts", "response"])
@settings(max_examples=40)
@given(acts=ACTS)
@example(acts=[(Act.STOP, 0, 1), (Act.EMIT_MUCH, 0, 3), (Act.EMIT_MUCH, 1, 3), (Act.LEAVE, 0, 0)])
@example(acts=[(Act.STOP, 0, 1), (Act.EMIT_MUCH, 0, 3), (Act.LAST, 0, 3), (Act.CRASH, 0, 0)])
@example(acts=[(Act.EMIT_MUCH, 0, 0), (Act.CRASH, 0, 0), (Act.DRAIN, 0, 0)])
@example(acts=[(Act.LAST, 0, 3), (Act.LEAVE, 0, 0), (Act.DRAIN, 0, 0)])
def test_any_interleaving_ends_once_and_frees_everything(
    api: Api, acts: list[tuple[Act, int, int]]
) -> None:
    """Steps, slow reading, leaving, a failed worker and a drain happen in any order.

    A client that stays gets one typed ending that matches what happened.
    """
    seconds = count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slow_readers, "CHECK_INTERVAL_S", 0.001)
        clock = SimpleNamespace(monotonic=lambda: float(next(seconds)))
        patch.setattr("draftgate.gateway.http.routes.time", clock)
        asyncio.run(played(api, acts))
