"""A server with scripted responses: their tokens, timing and faults.

A request chooses its script by the field `mock` of its body, so a single server plays all scripts.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import re
import struct
import threading
import time
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from zlib import crc32

from aiohttp import web

from draftgate.loadgen.types import PlannedRequest, RequestSpec

WORDS = ("def", "return", "x", "(y)", "é", "=", "1", "+")


@dataclass(frozen=True)
class Script:
    """A scripted response.

    Attributes:
        tokens, per_chunk: the number of tokens, and of tokens per chunk.
        ttft_s, gap_s: the delay before the first chunk with text, and between two chunks.
        role: whether to send an empty delta with the role first.
        continuous: whether each chunk counts the tokens so far.
        fault: a key of `EVENT_FAULTS` or `TRANSPORT_FAULTS`.
        lossy: whether speculation changes the text, as a broken verification would.
        plan: the text for a request with a `response_format`.
    """

    tokens: int = 8
    per_chunk: int = 1
    ttft_s: float = 0.0
    gap_s: float = 0.0
    role: bool = False
    continuous: bool = False
    fault: str = ""
    lossy: bool = False
    plan: str = ""

    @property
    def chunks(self) -> int:
        """The number of chunks with text."""
        return -(-self.tokens // self.per_chunk)


def question(script: Script | None = None, seed: int = 1, **fields) -> RequestSpec:
    """Return a request that chooses its script."""
    values = {"prompt": "x", "messages": (), "max_tokens": 8, "seed": seed} | fields
    extra = values.pop("extra", ())
    return RequestSpec(**values, extra=(("mock", asdict(script or Script())), *extra))


def planned(
    index: int, at_s: float | None, script: Script | None = None, **fields
) -> PlannedRequest:
    """Return a planned request with its own seed."""
    return PlannedRequest(index, at_s, question(script, **{"seed": index} | fields))


def text_of(seed: int, tokens: int) -> list[str]:
    """Return the true text, a function of the seed as under seeded sampling."""
    return [f" {WORDS[(seed * 7 + i * i) % len(WORDS)]}{i}" for i in range(tokens)]


def events_of(script: Script, body: dict, answer_id: str) -> list[str]:
    """Return the events of a response, including the faults of its content."""
    seed, drafting = body["seed"], body.get("speculation", {}).get("mode") != "off"
    words = text_of(seed, script.tokens)
    if script.plan and "response_format" in body:
        each = -(-len(script.plan) // script.tokens)
        words = [script.plan[i * each : (i + 1) * each] for i in range(script.tokens)]
    if script.lossy and drafting:
        words[-1] += "?"
    head = {"id": answer_id, "object": "chunk", "created": 0, "model": "mock"}
    events = [] if not script.role else [{**head, "choices": [_choice(body, None, None)]}]
    for first in range(0, script.tokens, script.per_chunk):
        so_far = min(first + script.per_chunk, script.tokens)
        reason = "length" if so_far == script.tokens else None
        text = "".join(words[first:so_far])
        usage = {"usage": _usage(so_far)} if script.continuous else {}
        events.append({**head, "choices": [_choice(body, text, reason)], **usage})
    speculation = _speculation(script.tokens if drafting else 0)
    metrics = {"seed": seed, "numerics_class": "mock", "speculative_decoding": speculation}
    events.append({**head, "choices": [], "usage": _usage(script.tokens), "metrics": metrics})
    lines = [*map(json.dumps, events), "[DONE]"]
    return EVENT_FAULTS.get(script.fault, lambda lines: lines)(lines)


def _choice(body: dict, text: str | None, reason: str | None) -> dict:
    if "messages" not in body:
        return {"index": 0, "text": text or "", "finish_reason": reason}
    delta = {"role": "assistant", "content": ""} if text is None else {"content": text}
    return {"index": 0, "delta": delta, "finish_reason": reason}


def _usage(tokens: int) -> dict:
    return {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": 3 + tokens}


def _speculation(tokens: int) -> dict:
    steps = tokens // 4
    return {
        "policy": "fixed:4",
        "mode": "auto" if tokens else "off",
        "proposer": "ngram" if tokens else None,
        "max_draft_tokens": 4 if tokens else 0,
        "reason": "scripted",
        "price": None,
        "num_spec_steps": steps,
        "num_drafted_tokens": 4 * steps,
        "num_accepted_tokens": 3 * steps,
        "acceptance_histogram": [0, 0, 0, steps],
    }


def _with(line: str, **changes) -> str:
    return json.dumps(json.loads(line) | changes)


def _first_choice(line: str, **changes) -> str:
    event = json.loads(line)
    return _with(line, choices=[event["choices"][0] | changes])


def _usage_of(line: str, **changes) -> str:
    return _with(line, usage=json.loads(line)["usage"] | changes)


EVENT_FAULTS = {
    "truncated": lambda e: e[: len(e) // 2],
    "no_finish_reason": lambda e: [*e[:-3], _first_choice(e[-3], finish_reason=None), *e[-2:]],
    "no_usage": lambda e: [*e[:-2], e[-1]],
    "no_done": lambda e: e[:-1],
    "done_twice": lambda e: [*e, e[-1]],
    "text_after_done": lambda e: [*e, e[0]],
    "finish_twice": lambda e: [*e[:-2], _first_choice(e[-3], text=""), *e[-2:]],
    "text_after_finish": lambda e: [*e[:-2], e[0], *e[-2:]],
    "chunk_twice": lambda e: [e[0], *e],
    "usage_twice": lambda e: [*e[:-1], e[-2], e[-1]],
    "usage_shrinks": lambda e: [_with(e[0], usage=_usage(2)), _with(e[1], usage=_usage(1)), *e[2:]],
    "usage_negative": lambda e: [*e[:-2], _usage_of(e[-2], completion_tokens=-1), e[-1]],
    "usage_no_sum": lambda e: [*e[:-2], _usage_of(e[-2], total_tokens=1), e[-1]],
    "too_long": lambda e: [*e[:-2], _with(e[-2], usage=_usage(9)), e[-1]],
    "foreign_id": lambda e: [e[0], _with(e[1], id="of-another"), *e[2:]],
    "foreign_choice": lambda e: [_first_choice(e[0], index=1), *e[1:]],
    "error_event": lambda e: [*e[:2], json.dumps({"error": {"message": "the worker failed"}})],
    "abort": lambda e: [*e[:-3], _first_choice(e[-3], finish_reason="abort"), *e[-2:]],
    "not_json": lambda e: [e[0], "{", *e[1:]],
    "no_choices": lambda e: [e[0], "{}", *e[1:]],
    "wrong_type": lambda e: [_first_choice(e[0], text=7), *e[1:]],
}
"""Functions that add a fault to the lines of an intact completion."""


def vector_of(text: str) -> list[float]:
    """Return the true vector of a text: counts of words by their hash, modulo 1,024."""
    counts = [0.0] * 1024
    for word in re.findall(r"\w+", text.lower()):
        counts[crc32(word.encode()) % 1024] += 1.0
    return counts


TRANSPORT_FAULTS = ("status", "no_stream", "hang_up", "reset", "cut", "silent", "stall", "same_id")


class Mock:
    """The mock server.

    Attributes:
        sent_s: the monotonic time before each event was sent, by seed.
        embeds: the number of embeddings requests before the server refuses them.
    """

    def __init__(self, embeds: float = math.inf) -> None:
        self.embeds = embeds
        self.bodies: list[dict] = []
        self.headers: list[dict] = []
        self.sent_s: dict[int, list[float]] = {}

    def application(self) -> web.Application:
        """Return the routes that a load generator uses."""
        app = web.Application()
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_post("/v1/embeddings", self._embed)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        return app

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "mock", "max_model_len": 8192}]})

    async def _embed(self, request: web.Request) -> web.Response:
        """Respond in base64 if requested, in reverse order of the inputs."""
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if self.embeds <= 0:
            return web.json_response({"error": {"message": "no embeddings"}}, status=404)
        self.embeds -= 1
        data = []
        for index, text in enumerate(body["input"]):
            vector = vector_of(text)
            packed = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
            wanted = packed if body.get("encoding_format") == "base64" else vector
            data.append({"index": index, "embedding": wanted})
        tokens = len(body["input"])
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return web.json_response({"data": data[::-1], "usage": usage})

    async def _tokenize(self, request: web.Request) -> web.Response:
        """Count four characters as a token."""
        count = -(-len((await request.json())["prompt"]) // 4)
        tokens = list(range(count))
        return web.json_response({"count": count, "max_model_len": 8192, "tokens": tokens})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        script = Script(**body.get("mock", {"tokens": body["max_tokens"]}))
        if script.fault == "status":
            return web.json_response({"error": {"message": "busy"}}, status=429)
        if script.fault == "no_stream":
            return web.json_response({"choices": []})
        if script.fault == "hang_up":
            request.transport.abort()
        return await self._stream(request, script, body)

    async def _stream(self, request: web.Request, script: Script, body: dict) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if script.fault == "silent":
            await asyncio.sleep(60)
        answer_id = "same" if script.fault == "same_id" else f"mock-{len(self.bodies)}"
        sent_s = self.sent_s.setdefault(body["seed"], [])
        text_chunks = 0
        for event in events_of(script, body, answer_id):
            if '"text": "' in event or '"content": " ' in event:
                await asyncio.sleep(script.gap_s if text_chunks else script.ttft_s)
                text_chunks += 1
            sent_s.append(time.monotonic())
            await response.write(f": ping\n\ndata: {event}\n\n".encode())
            if script.fault in {"reset", "cut"}:
                return await self._break(request, response, script.fault)
            if script.fault == "stall":
                await asyncio.sleep(60)
        return response

    async def _break(
        self, request: web.Request, response: web.StreamResponse, how: str
    ) -> web.StreamResponse:
        """End the connection during the response, by a reset or without the last chunk."""
        if how == "reset":
            request.transport.abort()
        else:
            request.transport.close()
        return response


@asynccontextmanager
async def serving(mock: Mock):
    """Serve in this event loop, and yield the address."""
    runner = web.AppRunner(mock.application(), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextmanager
def serving_in_a_thread(mock: Mock):
    """Serve in a thread for a command with its own event loop, and yield the address."""
    ready, address = threading.Event(), []

    async def main() -> None:
        stop = asyncio.Event()
        async with serving(mock) as url:
            address.append((url, asyncio.get_running_loop(), stop))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(60)
    url, loop, stop = address[0]
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
