"""Servers that speak vLLM's messages for prompts and outputs on different servers.

They follow `NixlConnector` of vLLM 0.32 (`v1/nixl/pull_scheduler.py`) and its proxy of examples.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import httpx
from aiohttp import web

from draftgate.backends.worker_config import UpstreamSettings
from draftgate.gateway.app import Listening
from draftgate.policies.types import Role
from tests.gateway.harness import client, running
from tests.gateway.upstreams import DONE, SSE, Handler, ScriptedUpstream, upstream

CHAT, TEXTS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"

ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""The parameters that ask a server for the KV cache of a prompt."""

WORDS = "word " * 200
"""A text of about 250 tokens by its size."""

LEAST_TOKENS = 100
"""The setting `upstream_prefill_tokens` of the nodes."""


def request_for(path: str, text: str = WORDS, **fields: Any) -> dict[str, Any]:
    """Return a request of 20 tokens with this text as its prompt."""
    prompt = {"prompt": text}
    if path != TEXTS:
        prompt = {"messages": [{"role": "user", "content": text}]}
    return {"model": "theirs", "max_tokens": 20, **prompt, **fields}


@dataclass
class Vllm:
    """A server of vLLM with a KV connector.

    Attributes:
        name: the name of the server, which is also the id of its engine.
        pinned: the blocks that wait for another server, for all servers, by engine and request.
        work: what the server did for each request: `prompt`, `output` with the KV cache of another
            server, `both`, or `no KV` if the cache was not available.
        handler: a handler that replaces the server's own one, or None.
        stores: whether the connector has a store, so that its responses contain no parameters.
    """

    name: str
    pinned: dict[tuple[str, str], list[int]]
    http: ScriptedUpstream
    work: list[str] = field(default_factory=list)
    handler: Handler | None = None
    stores: bool = False

    @property
    def sent(self) -> list[dict[str, Any]]:
        """The bodies of its requests."""
        return [json.loads(body) for body in self.http.bodies]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self.handler is not None:
            return await self.handler(request)
        return await self.respond(request)

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """Respond as vLLM does."""
        body = await request.json()
        params = body.get("kv_transfer_params")
        if body.get("stream_options") and not body.get("stream"):
            return _rejected("Stream options can only be defined when `stream=True`.")
        if body.get("min_tokens", 0) > body.get("max_tokens", 16):
            return _rejected("min_tokens must be less than or equal to max_tokens")
        if params and params.get("do_remote_decode"):
            assert params == ASKED
            assert (body["max_tokens"], body["stream"]) == (1, False)
            self.work.append("prompt")
            return self._whole(request, None if self.stores else self._pin())
        if params and params.get("do_remote_prefill"):
            key = params["remote_engine_id"], params["remote_request_id"]
            if self.pinned.get(key) != params["remote_block_ids"]:
                self.work.append("no KV")
                return _failed("KV cache load failed")
            del self.pinned[key]  # the other server frees what has been copied
            self.work.append("output")
        else:
            self.work.append("both")
        return await self._stream(request) if body.get("stream") else self._whole(request, None)

    def _pin(self) -> dict[str, Any]:
        number = len(self.work)
        self.pinned[self.name, f"cmpl-{number}"] = [number, number + 1]
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [number, number + 1],
            "remote_engine_id": self.name,
            "remote_request_id": f"cmpl-{number}",
            "remote_host": "10.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "remote_num_tokens": 250,
        }

    def _whole(self, request: web.Request, params: Mapping[str, Any] | None) -> web.Response:
        text = f"by {self.name}"
        choice = {"index": 0, "finish_reason": "stop", "text": text}
        usage = {"prompt_tokens": 250, "completion_tokens": 2, "total_tokens": 252}
        body: dict[str, Any] = {"id": "c", "choices": [choice], "usage": usage}
        if request.path == CHAT:
            choice["message"] = {"role": "assistant", "content": text}
        elif request.path == MESSAGES:
            content = [{"type": "text", "text": text}]
            usage = {"input_tokens": 250, "output_tokens": 2}
            body = {"id": "m", "type": "message", "content": content, "usage": usage}
        return web.json_response({**body, "kv_transfer_params": params})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        text, key = f"by {self.name}", "delta" if request.path == CHAT else "text"
        delta = {"content": text} if request.path == CHAT else text
        chunk = {"id": "c", "choices": [{"index": 0, key: delta, "finish_reason": "stop"}]}
        response = web.StreamResponse(headers=SSE)
        await response.prepare(request)
        await response.write(b"data: %b\n\n" % json.dumps(chunk).encode())
        await response.write(DONE)
        await response.write_eof()
        return response


def _rejected(message: str) -> web.Response:
    error = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
    return web.json_response({"error": error}, status=400)


def _failed(message: str) -> web.Response:
    error = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
    return web.json_response({"error": error}, status=500)


@dataclass
class Divided:
    """A node before servers with roles.

    Attributes:
        prefill, decode: the servers `p-0`, `p-1`, ... and `d-0`, `d-1`, ...
    """

    gateway: Listening
    http: httpx.AsyncClient
    prefill: list[Vllm]
    decode: list[Vllm]

    def work(self) -> dict[str, list[str]]:
        """Return what the servers did, without those that did nothing."""
        return {one.name: one.work for one in (*self.prefill, *self.decode) if one.work}


@asynccontextmanager
async def divided(
    prefill: int = 1,
    decode: int = 1,
    *,
    concurrency: int = 0,
    metrics: Mapping[str, str] = MappingProxyType({}),
    **settings: Any,
) -> AsyncIterator[Divided]:
    """Run a node with a number of servers for prompts and of servers for outputs.

    Args:
        metrics: the metrics pages of servers, by name.
    """
    names = [*(f"p-{number}" for number in range(prefill))]
    names += [f"d-{number}" for number in range(decode)]
    pinned: dict[tuple[str, str], list[int]] = {}
    async with AsyncExitStack() as stack:
        servers = []
        for name in names:
            http = await stack.enter_async_context(upstream())
            server = Vllm(name, pinned, http)
            http.handler, http.metrics = server.handle, metrics.get(name, "")
            servers.append(server)
        upstreams = tuple(
            UpstreamSettings(
                url=one.http.url,
                name=one.name,
                role=Role.PREFILL if one.name.startswith("p") else Role.DECODE,
                concurrency=concurrency,
            )
            for one in servers
        )
        shared = {"backend": "openai", "upstream_prefill_tokens": LEAST_TOKENS, **settings}
        gateway = await stack.enter_async_context(running(upstream=upstreams, **shared))
        http_client = await stack.enter_async_context(client(gateway))
        yield Divided(gateway, http_client, servers[:prefill], servers[prefill:])
