"""Tests of fallbacks: the models of a chain that get a request in turn."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from aiohttp import web

from draftgate.backends.worker_config import UpstreamSettings
from draftgate.gateway.app import Listening
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.config.models import plan_models
from draftgate.gateway.config.reading import ConfigError, effective_config
from tests.gateway.harness import client, events, is_idle, until
from tests.gateway.upstreams import (
    DONE,
    LAST,
    TOKEN,
    Handler,
    after,
    cut_after,
    forwarding,
    refusal,
    stream_of,
    upstream,
    whole,
)

CHAT = "/v1/chat/completions"
TEXTS = "/v1/completions"
CHAIN = ("large=small", "large=other")

VLLM_LONG = (
    b'{"error":{"message":"This model\'s maximum context length is 2048 tokens. However, you '
    b'requested 4000 tokens","type":"BadRequestError","param":"input_tokens","code":400}}'
)
VLLM_LIMIT = (
    b'{"error":{"message":"max_tokens=4000 cannot be greater than max_model_len=2048.",'
    b'"type":"BadRequestError","param":"max_tokens","code":400}}'
)
SGLANG_LONG = (
    b'{"object":"error","message":"The input (5000 tokens) is longer than the model\'s context '
    b'length (4096 tokens).","type":"BadRequestError","param":null,"code":400}'
)
LLAMA_LONG = (
    b'{"error":{"code":400,"message":"the request exceeds the available context size, try '
    b'increasing it","type":"exceed_context_size_error","n_prompt_tokens":9,"n_ctx":4}}'
)
OPENAI_LONG = (
    b'{"error":{"message":"too long","type":"invalid_request_error","param":"messages",'
    b'"code":"context_length_exceeded"}}'
)
LACKS_CHATS = (
    b'{"error":{"message":"The model does not support Chat Completions API",'
    b'"type":"BadRequestError","param":null,"code":400}}'
)
LACKS_TEMPLATE = (
    b'{"error":{"message":"As of transformers v4.44, default chat template is no longer allowed, so'
    b' you must provide a chat template if the tokenizer does not define one.",'
    b'"type":"BadRequestError","param":null,"code":400}}'
)
"""The response of vLLM 0.32."""

HAS_NO_TEMPLATE = b'{"error":{"message":"this model has no chat template","param":"messages"}}'
LACKS_MODEL = (
    b'{"error":{"message":"The model `large` does not exist.","type":"NotFoundError",'
    b'"param":"model","code":404}}'
)

FAILURES: dict[str, tuple[Handler, str]] = {
    "429": (refusal(429), "overloaded"),
    "503": (refusal(503), "overloaded"),
    "500": (refusal(500), "failed"),
    "closed": (cut_after(), "failed"),
    "vllm-long": (refusal(400, VLLM_LONG), "context_too_long"),
    "vllm-limit": (refusal(400, VLLM_LIMIT), "context_too_long"),
    "sglang-long": (refusal(400, SGLANG_LONG), "context_too_long"),
    "llama-long": (refusal(400, LLAMA_LONG), "context_too_long"),
    "openai-long": (refusal(400, OPENAI_LONG), "context_too_long"),
    "no-endpoint": (refusal(404, b'{"detail":"Not Found"}'), "unsupported"),
    "no-method": (refusal(405, b'{"detail":"Method Not Allowed"}'), "unsupported"),
    "not-offered": (refusal(501), "unsupported"),
    "no-chats": (refusal(400, LACKS_CHATS), "unsupported"),
    "no-model": (refusal(404, LACKS_MODEL), "unsupported"),
    "no-template": (refusal(400, LACKS_TEMPLATE), "unsupported"),
    "no-template-either": (refusal(400, HAS_NO_TEMPLATE), "unsupported"),
}


@asynccontextmanager
async def models(
    large: Handler, small: Handler = whole, other: Handler = whole, **settings: Any
) -> AsyncIterator[tuple[Listening, httpx.AsyncClient, list[Any]]]:
    """Run a node with an upstream for each of three models."""
    chain = settings.pop("fallbacks", CHAIN)
    async with upstream(large) as first, upstream(small) as second, upstream(other) as third:
        servers = [first, second, third]
        for server, name in zip(servers, ("large", "small", "other"), strict=True):
            server.models = (name,)
        async with (
            forwarding(*servers, backend="openai", fallbacks=chain, **settings) as gateway,
            client(gateway) as http,
        ):
            yield gateway, http, servers


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("failure", FAILURES)
async def test_next_model_gets_what_a_model_cannot_answer(failure: str, stream: bool) -> None:
    """The next model of the chain responds, and headers, metrics and decisions say why."""
    handler, reason = FAILURES[failure]
    answer = stream_of(TOKEN, LAST, DONE) if stream else whole
    async with models(handler, answer) as (gateway, http, (_, small, other)):
        body = {"model": "large", "messages": [], "seed": 3, "stream": stream}
        reply = await http.post(CHAT, json=body)
        assert reply.status_code == 200
        assert reply.headers["x-draftgate-fallback"] == reason
        assert reply.headers["x-draftgate-model"] == "small"
        assert [json.loads(one) for one in small.bodies] == [{**body, "model": "small"}]
        assert other.bodies == []
        metrics = (await http.get("/metrics")).text
        labels = f'model_name="large",reason="{reason}",requested="large",used="small"'
        assert f"draftgate_upstream_fallbacks_total{{{labels}}} 1.0" in metrics
        decision, _of_first_model = (await http.get("/decisions")).json()["decisions"]
        assert decision["fallback"] == reason
        (record,) = (await http.get("/records")).json()["records"]
        assert (record["model"], record["requested_model"]) == ("small", "large")
        assert is_idle(gateway.node)


async def test_chain_is_tried_in_order() -> None:
    """The second fallback gets the request if the first one fails, too, with its own reason."""
    async with models(refusal(503), refusal(400, VLLM_LONG)) as (gateway, http, servers):
        reply = await http.post(TEXTS, json={"model": "large", "prompt": "x"})
        assert reply.status_code == 200
        assert reply.headers["x-draftgate-fallback"] == "context_too_long"
        assert reply.headers["x-draftgate-model"] == "other"
        assert [len(server.bodies) for server in servers] == [1, 1, 1]
        assert is_idle(gateway.node)


async def test_error_of_the_last_model_passes() -> None:
    """The client gets the error of the last model if no model of the chain responds."""
    refused = refusal(400, OPENAI_LONG)
    async with models(refusal(503), refusal(429), refused) as (gateway, http, _):
        reply = await http.post(TEXTS, json={"model": "large", "prompt": "x"})
        assert reply.status_code == 400
        assert reply.content == OPENAI_LONG
        assert is_idle(gateway.node)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, b'{"error":{"message":"n must be at least 1","param":"n","code":400}}'),
        (400, b'{"error":{"message":"guided_json is not supported","param":"guided_json"}}'),
        (404, b'{"error":{"message":"no such response","param":"id","code":404}}'),
        (422, b'{"detail":[{"loc":["body","prompt"],"msg":"field required"}]}'),
    ],
)
async def test_errors_about_the_request_use_no_other_model(status: int, body: bytes) -> None:
    """An error that any model would have reported passes to the client."""
    async with models(refusal(status, body)) as (_, http, (_, small, _)):
        reply = await http.post(TEXTS, json={"model": "large", "prompt": "x"})
        assert reply.status_code == status
        assert "x-draftgate-fallback" not in reply.headers
        assert small.bodies == []


@pytest.mark.parametrize("failure", ["429", "500", "closed"])
async def test_fallback_that_nobody_lists_is_left_out(failure: str) -> None:
    """The next one gets the request, and without any, the client gets the error of the model."""
    large, _ = FAILURES[failure]
    body = {"model": "large", "prompt": "Hi", "max_tokens": 1}
    async with models(large, fallbacks=()) as (_gateway, http, _servers):
        alone = await http.post(TEXTS, json=body)
    async with models(large, fallbacks=("large=nobody",)) as (_gateway, http, _servers):
        response = await http.post(TEXTS, json=body)
    assert (response.status_code, response.json()) == (alone.status_code, alone.json())
    chain = ("large=nobody", "large=small")
    async with models(large, fallbacks=chain) as (_gateway, http, _servers):
        response = await http.post(TEXTS, json=body)
    assert response.status_code == 200
    assert response.headers["x-draftgate-model"] == "small"


async def test_models_without_a_chain_have_none() -> None:
    """Requests for other models, and successful responses, are as without fallbacks."""
    async with models(whole, refusal(503)) as (_, http, _):
        reply = await http.post(TEXTS, json={"model": "small", "prompt": "x"})
        assert reply.status_code == 503
        reply = await http.post(TEXTS, json={"model": "large", "prompt": "x"})
        assert reply.status_code == 200
        assert "x-draftgate-fallback" not in reply.headers


async def test_unlisted_model_may_have_fallbacks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A name of a chain may stand for its fallbacks, which the log mentions at the start."""
    chain = ("best=small", "best=missing")
    async with models(whole, fallbacks=chain) as (_, http, _):
        warned = [one for one in caplog.records if "--fallback" in one.getMessage()]
        assert [one.__dict__["draftgate_fields"]["models"] for one in warned] == [
            ["best", "missing"]
        ]
        reply = await http.post(TEXTS, json={"model": "best", "prompt": "x"})
        assert reply.status_code == 200
        assert reply.headers["x-draftgate-fallback"] == "unsupported"


async def test_full_queue_uses_the_next_model() -> None:
    """A request that finds no capacity in time for its model goes to the next one."""
    gate = asyncio.Event()
    settings: dict[str, Any] = {"max_sequences": 1, "queue_timeout_s": 0.05}
    async with models(after(gate, whole), admission="none", **settings) as (gateway, http, _):
        body = {"model": "large", "prompt": "x"}
        first = asyncio.create_task(http.post(TEXTS, json=body))
        await until(lambda: gateway.node.in_flight == 1)
        second = await http.post(TEXTS, json=body)
        assert second.headers["x-draftgate-fallback"] == "overloaded"
        gate.set()
        assert "x-draftgate-fallback" not in (await first).headers
        assert is_idle(gateway.node)


async def test_tokens_count_once() -> None:
    """The quota and the metrics count the tokens of the model that responds, and no others."""
    async with models(refusal(503)) as (_, http, _):
        await http.post(TEXTS, json={"model": "large", "prompt": "x"})
        metrics = (await http.get("/metrics")).text
        assert 'draftgate_prompt_tokens_total{model_name="large"} 5.0' in metrics
        assert 'draftgate_generation_tokens_total{model_name="large"} 2.0' in metrics


async def test_log_line_has_model_and_reason(caplog: pytest.LogCaptureFixture) -> None:
    """The log line of a request says which other model got it, and why."""
    async with models(refusal(503)) as (_, http, _):
        with caplog.at_level(logging.INFO, logger="draftgate"):
            await http.post(TEXTS, json={"model": "large", "prompt": "x"})
        (line,) = [one for one in caplog.records if one.getMessage() == "request"]
        fields = line.__dict__["draftgate_fields"]
        assert (fields["fallback"], fields["model"]) == ("overloaded", "small")


async def test_stream_of_a_fallback_continues_on_its_own_upstreams() -> None:
    """A stream that another model has begun never continues on the requested one."""
    chunk = b'data: {"id":"c","model":"small","choices":[{"index":0,"text":"a"}]}\n\n'
    body = {"model": "large", "prompt": "x", "max_tokens": 5, "stream": True}
    async with models(refusal(503), cut_after(chunk)) as (_, http, (large, _, other)):
        reply = await http.post(TEXTS, json=body)
        assert events(reply.text)[-1]["error"]["code"] == "upstream_failed"
        assert (len(large.bodies), len(other.bodies)) == (1, 0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fallbacks: {large: [small, other], x: y}", ("large=small", "large=other", "x=y")),
        ("fallbacks: 'large=small,other,x=y'", ("large=small", "large=other", "x=y")),
        ("fallbacks: [large=small, large=other]", ("large=small", "large=other")),
    ],
)
def test_forms_of_the_setting(text: str, expected: tuple[str, ...], tmp_path: Any) -> None:
    """The file, the flags and the environment give the same chains."""
    path = tmp_path / "c.yaml"
    path.write_text(f"backend: openai\n{text}\n")
    assert effective_config({}, {}, str(path)).config.fallbacks == expected


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"a": ["b"], "b": ["c"], "c": ["a"]}, "fallbacks of each other"),
        (["a=a"], "fallbacks of each other"),
        (["a=b", "a=b"], "distinct"),
        (["a"], "MODEL=FALLBACK"),
        (["a="], "MODEL=FALLBACK"),
        ({"a": []}, None),
    ],
)
def test_invalid_chains_are_refused(value: object, reason: str | None) -> None:
    """Cycles, which could double the load of two overloaded models, and other mistakes are errors
    at the start."""
    if reason is None:
        assert effective_config({"fallbacks": value}, {}).config.fallbacks == ()
        return
    with pytest.raises(ConfigError, match=reason):
        effective_config({"fallbacks": value}, {})


def test_fallbacks_of_own_models_must_be_own_models() -> None:
    """A node without upstreams and pool refuses a fallback that it does not have at the start."""
    own = {"backend": "sim", "models": ("other=unused",), "served_model_name": ("first", "second")}
    for name in ("other", "second"):
        plan_models(ServeConfig(**own, fallbacks=(f"x={name}",)))
    with pytest.raises(ValueError, match=r"--fallback x=third: the node has no model 'third'"):
        plan_models(ServeConfig(**own, fallbacks=("x=third",)))


def test_fallbacks_concern_only_the_upstreams_of_a_node() -> None:
    """A node with a model of its own and upstreams has fallbacks for the upstreams."""
    servers = (UpstreamSettings(url="http://a:8000"),)
    config = ServeConfig(backend="sim", upstream=servers, fallbacks=("a=b",))
    own, upstreams = plan_models(config)
    assert (own.config.fallbacks, upstreams.config.fallbacks) == ((), ("a=b",))
    assert len(upstreams.worker_configs()) == len(own.worker_configs()) == 1


async def test_request_whose_client_leaves_uses_no_other_model() -> None:
    """A client that disconnects ends its request, without an attempt at another model."""
    left = asyncio.Event()

    async def waits(request: web.Request) -> web.StreamResponse:
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            left.set()

    async with models(waits) as (gateway, http, (large, small, _)):
        task = asyncio.create_task(http.post(TEXTS, json={"model": "large", "prompt": "x"}))
        await until(lambda: large.bodies)
        task.cancel()
        await left.wait()
        await until(lambda: is_idle(gateway.node))
        assert small.bodies == []


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_fallback_has_the_name_that_its_upstream_has_for_it(path: str) -> None:
    """A fallback may be an alias, also for a request that becomes a chat at its upstream."""
    body = {
        "model": "large",
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "Tell me."}],
    }
    async with upstream(refusal(503)) as first, upstream(whole_chat) as second:
        first.models, second.models = ("large",), ("their-small",)
        second.settings = {"aliases": {"small": "their-small"}, "chats_only": True}
        async with (
            forwarding(first, second, backend="openai", fallbacks=("large=small",)) as gateway,
            client(gateway) as http,
        ):
            reply = await http.post(path, json=body)
            assert reply.status_code == 200, reply.text
            assert reply.headers["x-draftgate-model"] == "small"
        assert [request.path for request in second.requests] == [CHAT]
        assert json.loads(second.bodies[0])["model"] == "their-small"


async def whole_chat(_: web.Request) -> web.Response:
    """Answer a chat."""
    message = {"role": "assistant", "content": "Bees."}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    chat = {"id": "c", "object": "chat.completion", "created": 1, "model": "their-small"}
    return web.json_response({**chat, "choices": [choice], "usage": usage})
