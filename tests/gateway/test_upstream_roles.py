"""Tests of upstreams with roles, which compute the prompt and the output of a request."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from draftgate.backends.worker_config import UpstreamSettings
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.config.reading import ConfigError, effective_config
from draftgate.policies.types import Role
from tests.gateway.divided_vllm import (
    ASKED,
    CHAT,
    MESSAGES,
    TEXTS,
    Divided,
    Vllm,
    divided,
    request_for,
)
from tests.gateway.harness import events, is_idle, until
from tests.gateway.upstreams import after, cut_after, held, refusal, stream_of

PREFILLED = "x-draftgate-prefill-upstream"

NOT_JSON = refusal(200, b"<html>")
BROKEN_STREAM = stream_of(
    b'data: {"error":{"message":"KV load failed","type":"InternalServerError","code":500}}\n\n'
)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [CHAT, TEXTS])
async def test_prompt_and_output_have_different_upstreams(path: str, stream: bool) -> None:
    """The first upstream computes the prompt, and the second one the output with its KV cache."""
    fields: dict[str, Any] = {"stream": stream, "seed": 7, "min_tokens": 3}
    if stream:
        fields["stream_options"] = {"include_usage": True}
    async with divided() as servers:
        body = request_for(path, **fields)
        reply = await servers.http.post(path, json=body)
        assert reply.status_code == 200
        assert "by d-0" in reply.text
        assert servers.work() == {"p-0": ["prompt"], "d-0": ["output"]}
        (prompt,), (output,) = servers.prefill[0].sent, servers.decode[0].sent
        kept = {name: body[name] for name in body.keys() - {"stream_options", "min_tokens"}}
        one = {"max_tokens": 1, "stream": False, "kv_transfer_params": ASKED}
        assert prompt == {**kept, **one}
        params = output.pop("kv_transfer_params")
        assert params["remote_engine_id"] == "p-0"
        assert output == body
        assert reply.headers["x-draftgate-upstream"] == "d-0"
        assert reply.headers[PREFILLED] == "p-0"
        assert is_idle(servers.gateway.node)


async def test_messages_are_divided() -> None:
    """Requests of Anthropic's API are divided where vLLM has the endpoint, and also as chats."""
    async with divided() as servers:
        reply = await servers.http.post(MESSAGES, json=request_for(MESSAGES))
        assert reply.json()["content"][0]["text"] == "by d-0"
        for server in (*servers.prefill, *servers.decode):
            server.handler = _without(MESSAGES, server)
        other = request_for(MESSAGES, "other " * 200)  # the first prompt is cached
        reply = await servers.http.post(MESSAGES, json=other)
        assert reply.json()["content"][0]["text"] == "by d-0"
        assert servers.work() == {"p-0": ["prompt"] * 2, "d-0": ["output"] * 2}
        assert servers.decode[0].http.requests[-1].path == CHAT


async def test_max_completion_tokens_is_one_for_the_prompt() -> None:
    """A chat with `max_completion_tokens` has one token of output where its prompt is computed."""
    async with divided() as servers:
        body = request_for(CHAT, max_completion_tokens=9)
        del body["max_tokens"]
        assert (await servers.http.post(CHAT, json=body)).status_code == 200
        (prompt,), (output,) = servers.prefill[0].sent, servers.decode[0].sent
        assert (prompt["max_completion_tokens"], prompt["max_tokens"]) == (1, 1)
        assert (output["max_completion_tokens"], output.get("max_tokens")) == (9, None)


def _without(path: str, server: Vllm) -> Any:
    """Return a handler of a server that does not have an endpoint."""

    async def handle(request: web.Request) -> web.StreamResponse:
        if request.path == path:
            return web.json_response({"detail": "Not Found"}, status=404)
        return await server.respond(request)

    return handle


def _stores(servers: Divided) -> None:
    servers.prefill[0].stores = True


def _frees(servers: Divided) -> None:
    """Let the KV cache of each prompt be freed before another server can copy it."""
    server = servers.prefill[0]

    async def handle(request: web.Request) -> web.StreamResponse:
        response = await server.respond(request)
        server.pinned.clear()
        return response

    server.handler = handle


def _fails(**handlers: Any) -> Callable[[Divided], None]:
    """Return a function that sets the handlers of servers, by name with _ in place of -."""

    def prepare(servers: Divided) -> None:
        for server in (*servers.prefill, *servers.decode):
            server.handler = handlers.get(server.name.replace("-", "_"))

    return prepare


def _both_fail(handler: Any) -> Callable[[Divided], None]:
    return _fails(p_0=handler, p_1=handler)


NO_PROMPT = {"d-0": ["both"]}

# Each case: preparation of two servers for prompts and two for outputs, what the servers do then,
# and the one that computed the prompt, if any. `p-0` and `d-0` get the first calls.
FAILURES: dict[str, tuple[Callable[[Divided], None], dict[str, list[str]], str | None]] = {
    "prefill-lost": (_fails(p_0=cut_after()), {"p-1": ["prompt"], "d-0": ["output"]}, "p-1"),
    "prefill-busy": (_fails(p_0=refusal(429)), {"p-1": ["prompt"], "d-0": ["output"]}, "p-1"),
    "prefill-out": (_fails(p_0=refusal(503)), {"p-1": ["prompt"], "d-0": ["output"]}, "p-1"),
    "prefill-denied": (_fails(p_0=refusal(401)), {"p-1": ["prompt"], "d-0": ["output"]}, "p-1"),
    "prefill-broken": (_fails(p_0=refusal(500)), {"p-1": ["prompt"], "d-0": ["output"]}, "p-1"),
    "prefill-streams": (
        _fails(p_0=stream_of(b": x\n\n")),
        {"p-1": ["prompt"], "d-0": ["output"]},
        "p-1",
    ),
    "prefills-lost": (_both_fail(cut_after()), NO_PROMPT, None),
    "prefills-out": (_both_fail(refusal(503)), NO_PROMPT, None),
    "prefill-rejects": (_fails(p_0=refusal(400, b"{}")), NO_PROMPT, None),
    "prefill-not-json": (_fails(p_0=NOT_JSON), NO_PROMPT, None),
    "store": (_stores, {"p-0": ["prompt"], "d-0": ["both"]}, "p-0"),
    "freed": (_frees, {"p-0": ["prompt"], "d-0": ["no KV"], "d-1": ["both"]}, None),
    "decode-lost": (_fails(d_0=cut_after()), {"p-0": ["prompt"], "d-1": ["both"]}, None),
    "decode-out": (_fails(d_0=refusal(503)), {"p-0": ["prompt"], "d-1": ["both"]}, None),
    "decode-broken": (_fails(d_0=refusal(500)), {"p-0": ["prompt"], "d-1": ["both"]}, None),
    "decodes-lost": (
        _fails(d_0=cut_after(), d_1=cut_after()),
        {"p-0": ["prompt"]},
        None,
    ),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("failure", FAILURES)
async def test_request_survives(failure: str, stream: bool) -> None:
    """Whatever fails, the request gets one response, and nothing stays reserved."""
    prepare, work, prefilled_by = FAILURES[failure]
    async with divided(2, 2) as servers:
        prepare(servers)
        reply = await servers.http.post(TEXTS, json=request_for(TEXTS, stream=stream))
        assert servers.work() == work
        if failure == "decodes-lost":
            assert reply.status_code == 502 or events(reply.text)[-1]["error"]
        else:
            assert reply.status_code == 200
            assert "by d-" in reply.text
        assert reply.headers.get(PREFILLED) == prefilled_by
        assert is_idle(servers.gateway.node)


async def test_stream_that_begins_with_an_error_is_computed_again() -> None:
    """A stream of the output that begins with an error event continues without the KV cache."""
    async with divided(1, 2) as servers:
        servers.decode[0].handler = BROKEN_STREAM
        reply = await servers.http.post(TEXTS, json=request_for(TEXTS, stream=True))
        assert events(reply.text)[-1] == "[DONE]"
        assert servers.work() == {"p-0": ["prompt"], "d-1": ["both"]}
        assert "kv_transfer_params" not in servers.decode[1].sent[0]
        assert is_idle(servers.gateway.node)


async def test_only_upstream_for_outputs_computes_the_prompt_itself() -> None:
    """An upstream that cannot get the KV cache gets the request again, without parameters."""
    async with divided() as servers:
        _frees(servers)
        reply = await servers.http.post(TEXTS, json=request_for(TEXTS))
        assert reply.status_code == 200
        assert servers.work() == {"p-0": ["prompt"], "d-0": ["no KV", "both"]}


async def test_errors_of_the_request_are_those_of_the_output() -> None:
    """A client gets the error for its own request, not for that with one token."""
    async with divided() as servers:
        body = request_for(TEXTS, min_tokens=30)
        reply = await servers.http.post(TEXTS, json=body)
        assert reply.status_code == 400
        assert "min_tokens" in reply.json()["error"]["message"]


async def test_upstream_for_prompts_takes_whole_requests_in_an_outage() -> None:
    """While all upstreams for outputs are paused, those for prompts compute whole requests."""
    async with divided() as servers:
        servers.decode[0].handler = refusal(503)
        await servers.http.post(TEXTS, json=request_for(TEXTS))
        servers.prefill[0].work.clear()
        reply = await servers.http.post(TEXTS, json=request_for(TEXTS))
        assert reply.status_code == 200
        assert servers.work() == {"p-0": ["both"]}


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (1, 3), (3, 1), (2, 2)])
async def test_phases_are_chosen_by_their_own_loads(prefill: int, decode: int) -> None:
    """Prompts are spread over the upstreams for prompts, and outputs over those for outputs."""
    async with divided(prefill, decode) as servers:
        prompts, outputs = asyncio.Event(), asyncio.Event()
        for server in servers.prefill:
            server.handler = after(prompts, server.respond)
        for server in servers.decode:
            server.handler = after(outputs, server.respond)
        count = 2 * prefill * decode
        sending = [
            asyncio.create_task(servers.http.post(TEXTS, json=request_for(TEXTS, seed=number)))
            for number in range(count)
        ]
        await until(lambda: _arrived(servers.prefill) == count)
        assert {len(one.http.bodies) for one in servers.prefill} == {count // prefill}
        assert _arrived(servers.decode) == 0
        prompts.set()
        await until(lambda: _arrived(servers.decode) == count)
        assert {len(one.http.bodies) for one in servers.decode} == {count // decode}
        # The upstreams of the prompts are free again, although the outputs are not complete.
        fleet = servers.gateway.node.fleet.workers
        assert [one.reserved_tokens for one in fleet[:prefill]] == [0] * prefill
        outputs.set()
        assert {reply.status_code for reply in await asyncio.gather(*sending)} == {200}
        assert is_idle(servers.gateway.node)


def _arrived(servers: Sequence[Vllm]) -> int:
    return sum(len(one.http.bodies) for one in servers)


async def test_request_waits_for_capacity_of_both_phases() -> None:
    """A prompt waits in the queue while the upstreams for prompts are full, but only for them."""
    async with divided(1, 4, concurrency=1) as servers:
        gate = asyncio.Event()
        (first,) = servers.prefill
        first.handler = after(gate, first.respond)
        sending = [
            asyncio.create_task(servers.http.post(TEXTS, json=request_for(TEXTS, seed=number)))
            for number in range(3)
        ]
        queue = servers.gateway.node.dispatcher.queue
        await until(lambda: len(queue) == 2 and len(first.http.bodies) == 1)
        gate.set()
        assert {reply.status_code for reply in await asyncio.gather(*sending)} == {200}
        assert first.work == ["prompt"] * 3


async def test_short_and_cached_prompts_go_to_the_output_directly() -> None:
    """The upstream of the output computes fewer uncached tokens than the setting itself."""
    async with divided(1, 2) as servers:
        assert (await servers.http.post(CHAT, json=request_for(CHAT, "hi"))).status_code == 200
        assert servers.work() == {"d-0": ["both"]} or servers.work() == {"d-1": ["both"]}
        headers = {"x-session-id": "s"}
        first = await servers.http.post(CHAT, json=request_for(CHAT), headers=headers)
        second = await servers.http.post(CHAT, json=request_for(CHAT), headers=headers)
        assert first.headers[PREFILLED] == "p-0"
        assert PREFILLED not in second.headers
        upstreams = {one.headers["x-draftgate-upstream"] for one in (first, second)}
        assert len(upstreams) == 1
        metrics = (await servers.http.get("/metrics")).text
        for outcome, count in (("direct", 2), ("computed", 1)):
            labels = f'model_name="theirs",outcome="{outcome}"'
            assert f"draftgate_upstream_prefills_total{{{labels}}} {count}.0" in metrics


UNDIVIDED: dict[str, dict[str, Any]] = {
    "choices": {"n": 2},
    "echo": {"echo": True},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "prompts": {"prompt": ["a" * 500, "b" * 500]},
}


@pytest.mark.parametrize("case", UNDIVIDED)
async def test_requests_that_need_the_whole_prompt_are_not_divided(case: str) -> None:
    """Several choices or prompts, and log probabilities of the prompt, have one upstream."""
    async with divided() as servers:
        body = {**request_for(TEXTS), **UNDIVIDED[case]}
        assert (await servers.http.post(TEXTS, json=body)).status_code == 200
        assert servers.work() == {"d-0": ["both"]}
        assert servers.decode[0].sent == [body]


async def test_one_token_needs_no_upstream_for_outputs() -> None:
    """A request for one token is computed by an upstream for prompts."""
    async with divided() as servers:
        await servers.http.post(TEXTS, json={**request_for(TEXTS), "max_tokens": 1})
        assert servers.work() == {"p-0": ["both"]}


@pytest.mark.parametrize("text", ["hi", "word " * 200], ids=["direct", "divided"])
@pytest.mark.parametrize("key", ["kv_transfer_params", "kv\\u005ftransfer_params"])
async def test_parameters_of_clients_reach_no_upstream(key: str, text: str) -> None:
    """A client cannot name blocks of a server, or the address of a server, whatever it sends."""
    async with divided() as servers:
        stolen = json.dumps({**ASKED, "do_remote_prefill": True, "remote_host": "10.0.0.9"})
        body = json.dumps(request_for(TEXTS, text))[:-1] + f', "{key}": {stolen}}}'
        headers = {"Content-Type": "application/json"}
        reply = await servers.http.post(TEXTS, content=body, headers=headers)
        assert reply.status_code == 200
        bodies = [*servers.prefill[0].http.bodies, *servers.decode[0].http.bodies]
        assert not any(b"10.0.0.9" in one for one in bodies)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_disconnect_cancels_the_phase(phase: str) -> None:
    """A client that disconnects in a phase ends its call, and nothing stays reserved."""
    async with divided() as servers:
        (server,) = servers.prefill if phase == "prefill" else servers.decode
        server.handler = held()
        sending = asyncio.create_task(servers.http.post(TEXTS, json=request_for(TEXTS)))
        await server.http.arrived.get()
        sending.cancel()
        assert await server.http.disconnected.get() == TEXTS
        await until(lambda: is_idle(servers.gateway.node))
        assert servers.work() == ({} if phase == "prefill" else {"p-0": ["prompt"]})


async def test_log_line_decision_and_metrics_show_both_upstreams(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log line, the decision and the list of workers name the phases of a request."""
    async with divided(log_level="info") as servers:
        with caplog.at_level(logging.INFO, logger="draftgate"):
            await servers.http.post(TEXTS, json=request_for(TEXTS))
        (line,) = [one for one in caplog.records if one.getMessage() == "request"]
        fields = line.__dict__["draftgate_fields"]
        assert (fields["worker"], fields["prefill_worker"]) == ("d-0", "p-0")
        (decision,) = (await servers.http.get("/decisions")).json()["decisions"]
        assert decision["worker_id"] == "p-0"
        assert decision["phases"]["policy"] == "upstream_roles"
        assert decision["phases"]["decode_worker_id"] == "d-0"
        metrics = (await servers.http.get("/metrics")).text
        count = 'draftgate_upstream_prefill_seconds_count{model_name="theirs"} 1.0'
        assert count in metrics
        listed = (await servers.http.get("/workers")).json()["workers"]
        assert {one["worker_id"]: one["role"] for one in listed} == {
            "p-0": "prefill",
            "d-0": "decode",
        }


async def test_prompts_of_a_paused_upstream_go_to_the_output() -> None:
    """While all upstreams for prompts are paused, those for outputs compute the prompts."""
    async with divided() as servers:
        servers.prefill[0].handler = refusal(503)
        for _ in range(2):
            reply = await servers.http.post(TEXTS, json=request_for(TEXTS))
            assert reply.status_code == 200
        assert len(servers.prefill[0].http.bodies) == 1
        assert servers.work() == {"d-0": ["both"] * 2}


def test_roles_are_read_from_the_file(tmp_path: Path) -> None:
    """A file gives upstreams their roles, and an unknown role is an error."""
    file = tmp_path / "config.yaml"
    file.write_text("upstream: [{url: 'http://a', role: prefill}, http://b]")
    upstreams = effective_config({}, {}, str(file)).config.upstream
    assert [one.role for one in upstreams] == [Role.PREFILL, Role.ANY]
    file.write_text("upstream: [{url: 'http://a', role: encode}]")
    with pytest.raises(ConfigError, match="upstream"):
        effective_config({}, {}, str(file))


def test_nodes_set_their_roles_themselves() -> None:
    """An upstream that is a node of Draftgate has the role of its own setting."""
    upstream = (UpstreamSettings(url="http://a", role=Role.DECODE),)
    with pytest.raises(ValueError, match="--role"):
        ServeConfig(backend="peer", upstream=upstream).worker_configs()


async def test_prompts_of_plain_upstreams_do_not_decide_about_drafts() -> None:
    """Upstreams for prompts are no choice between upstreams with and without drafts."""
    page = "vllm:spec_decode_num_drafts_total 1\nvllm:spec_decode_num_draft_tokens_total 3\n"
    async with divided(1, 1, metrics={"d-0": page}) as servers:
        reply = await servers.http.post(TEXTS, json=request_for(TEXTS))
        assert reply.headers[PREFILLED] == "p-0"
        assert "x-speculation-pool" not in reply.headers
