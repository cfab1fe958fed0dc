"""Tests of probes, metrics, ids, sockets and tokenising for operators."""

from __future__ import annotations

import asyncio
import math
import re
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from draftgate.gateway.app import Listening, start_workers
from draftgate.gateway.dispatch import placement
from draftgate.gateway.http import generation
from draftgate.gateway.offload import offload
from draftgate.gateway.routes import build_app
from tests.gateway.harness import ScriptedBackend, client, post_raw, running, until

COMPLETION = {"prompt": "def f(x):", "max_tokens": 30, "seed": 1}


async def test_probes_respond_while_the_model_loads(scripted: ScriptedBackend) -> None:
    """A loading node is alive but not ready, and responds to requests with 503 and Retry-After."""
    scripted.gate.clear()
    async with running(backends=[scripted], start=False) as gateway, client(gateway) as http:
        loading = asyncio.create_task(start_workers(gateway.node))
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/ready")).status_code == 503
        assert (await http.get("/metrics")).status_code == 200
        for response in (
            await http.post("/v1/completions", json=COMPLETION),
            await http.get("/v1/models"),
            await http.post("/tokenize", json={"prompt": "x"}),
        ):
            assert (response.status_code, response.json()["error"]["code"]) == (
                503,
                "model_loading",
            )
            assert int(response.headers["retry-after"]) > 0
        scripted.gate.set()
        await loading
        assert (await http.get("/ready")).status_code == 200


async def test_metrics_have_the_names_dashboards_use(http: httpx.AsyncClient) -> None:
    """The metrics page contains Draftgate's and vLLM's names in Prometheus format."""
    await http.post("/v1/completions", json=COMPLETION)
    await http.post("/v1/chat/completions", json={"messages": []})
    response = await http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {f.name: f for f in text_string_to_metric_families(response.text)}
    samples = {
        sample.name: sample.value
        for family in families.values()
        for sample in family.samples
        if "le" not in sample.labels
    }
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
        "time_to_first_token_seconds_count", "e2e_request_latency_seconds_count",
        "prompt_tokens_total", "generation_tokens_total", "spec_decode_num_drafts_total",
        "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total",
        "spec_decode_num_accepted_tokens_per_pos_total", "request_success_total",
        "inter_token_latency_seconds_count", "time_per_output_token_seconds_count",
        "request_time_per_output_token_seconds_count", "request_queue_time_seconds_count",
        "request_prefill_time_seconds_count", "request_decode_time_seconds_count",
        "request_prompt_tokens_count", "request_generation_tokens_count",
        "request_params_max_tokens_count", "prefix_cache_queries_total", "prefix_cache_hits_total",
    ):  # fmt: skip
        assert f"vllm:{name}" in samples
    assert samples["draftgate_generation_tokens_total"] == 30
    assert samples["vllm:generation_tokens_total"] == 30
    assert samples["draftgate_time_to_first_token_seconds_count"] == 1
    requests = families["draftgate_requests"].samples
    outcomes = {sample.labels["outcome"] for sample in requests if sample.value}
    assert outcomes == {"finished", "rejected"}
    assert all(f.documentation for f in families.values())


async def test_step_cost_error_is_a_gauge_of_each_worker() -> None:
    """The metrics page contains a finite step cost error for each worker."""
    async with running(devices=(0, 1)) as gateway, client(gateway) as http:
        for _ in range(2):
            await http.post("/v1/completions", json=COMPLETION)
        text = (await http.get("/metrics")).text
        (family,) = (
            f
            for f in text_string_to_metric_families(text)
            if f.name == "draftgate_step_cost_error_ratio"
        )
        errors = {sample.labels["worker"]: sample.value for sample in family.samples}
        known = [
            worker.backend._worker._scheduler.cost_error for worker in gateway.node.fleet.workers
        ]
    assert errors == {"0": known[0], "1": known[1]}
    assert all(0.0 < error < math.inf for error in known)


async def test_accepted_tokens_per_position_sum_to_accepted_tokens(http: httpx.AsyncClient) -> None:
    """The accepted tokens per position never increase and sum to the accepted tokens."""
    body = {**COMPLETION, "max_tokens": 200}
    decoding = (await http.post("/v1/completions", json=body)).json()["metrics"][
        "speculative_decoding"
    ]
    text = (await http.get("/metrics")).text
    found = re.findall(r'^vllm:spec\S+per_pos_total{.*position="(\d+)"} (\S+)$', text, re.MULTILINE)
    counts = [float(value) for _, value in sorted((int(p), v) for p, v in found)]
    assert sum(counts) == decoding["num_accepted_tokens"] > 0
    assert counts == sorted(counts, reverse=True)
    assert sum(decoding["acceptance_histogram"]) == decoding["num_spec_steps"]


async def test_two_requests_may_have_the_same_request_id(sim: Listening) -> None:
    """The server serves several requests with the same request id."""
    async with client(sim) as http:
        headers = {"x-request-id": "same"}
        responses = await asyncio.gather(
            *(http.post("/v1/completions", json=COMPLETION, headers=headers) for _ in range(3))
        )
    assert len({a.json()["choices"][0]["text"] for a in responses}) == 1


async def test_tokenize_and_detokenize_are_inverse(http: httpx.AsyncClient) -> None:
    """The server restores any text from its tokens, including special tokens and partial
    characters."""
    for text in ("def f(x):\n\treturn 'ü🙂'\n", "<|endoftext|>x", " "):
        tokenized = (await http.post("/tokenize", json={"prompt": text})).json()
        assert tokenized["count"] == len(tokenized["tokens"])
        assert tokenized["max_model_len"] == 8192
        back = await http.post("/detokenize", json={"tokens": tokenized["tokens"]})
        assert back.json()["prompt"] == text


async def test_tokenize_accepts_messages(http: httpx.AsyncClient) -> None:
    """The server tokenises messages as in a chat completion."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    tokenized = (await http.post("/tokenize", json={"messages": messages})).json()
    body = {"messages": messages, "max_tokens": 1}
    response = (await http.post("/v1/chat/completions", json=body)).json()
    assert response["usage"]["prompt_tokens"] == tokenized["count"]
    response = await http.post("/tokenize", json={})
    assert response.json()["error"]["param"] == "prompt"
    response = await http.post("/detokenize", json={"tokens": [1, 10**9]})
    assert response.json()["error"]["param"] == "tokens[1]"


async def test_tokenize_accepts_tools_only_with_messages(http: httpx.AsyncClient) -> None:
    """The server rejects tools for a plain prompt, which cannot contain tools."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    response = await http.post("/tokenize", json={"prompt": "a", "tools": tools})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


async def test_long_bodies_are_parsed_in_a_thread(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server parses long bodies in a thread and short bodies in the loop."""
    offloaded = []

    async def spy(work: Any, *arguments: Any) -> Any:
        offloaded.append(work)
        return await offload(work, *arguments)

    monkeypatch.setattr(generation, "offload", spy)
    monkeypatch.setattr(placement, "offload", spy)
    await http.post("/v1/completions", json=COMPLETION)
    assert offloaded == []
    body = {"prompt": "x = 1\n" * 4000, "max_tokens": 1}
    assert (await http.post("/v1/completions", json=body)).status_code == 400  # exceeds the context
    assert len(offloaded) == 2  # parsing and the checks of the prompt


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_accepted_sockets_have_tcp_nodelay(loop: Any) -> None:
    """Accepted sockets have TCP_NODELAY, without which a router delays the first chunk by 44 ms."""
    seen = []

    async def record_option(request: web.Request) -> web.Response:
        accepted = request.transport.get_extra_info("socket")
        seen.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        return web.Response()

    async def scenario() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("draftgate.gateway.http.endpoints.health.version", record_option)
            async with running() as gateway, client(gateway) as http:
                await http.get("/version")

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(scenario())
    assert len(seen) == 1
    assert seen[0] != 0


async def test_all_endpoints_are_routed(sim: Listening) -> None:
    """The server routes exactly the paths of the API."""
    routes = [r for r in build_app(sim.node).router.routes() if r.resource]
    paths = {route.resource.canonical.rstrip("/") or "/" for route in routes}
    assert paths == {
        "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}",
        "/v1/embeddings", "/v1/rerank", "/rerank", "/v2/rerank", "/score", "/v1/score", "/tokenize",
        "/detokenize",
        "/health", "/ready", "/version", "/metrics", "/decisions",
        "/live", "/workers", "/workers/{worker_id}/role", "/", "/web/{name}",
        "/v1/responses", "/v1/responses/input_tokens", "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/input_items", "/openapi.json", "/peer/v1/workers/{number}",
            "/peer/v1/workers/{number}/blocks",
        "/v1/messages", "/v1/messages/count_tokens",
        "/v1/files", "/v1/files/{file_id}", "/v1/files/{file_id}/content",
        "/v1/batches", "/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel",
        "/keys", "/keys/{name}", "/keys/{name}/rotate", "/audit",
        "/usage", "/usage/history", "/records", "/records/{request_id}", "/session",
        "/login", "/docs", "/operations", "/requests", "/requests/{request_id}",
    }  # fmt: skip


async def test_model_reports_its_chat_template_and_proposers() -> None:
    """The entry of the model says whether it has a chat template, and which proposers it has."""
    async with running() as gateway, client(gateway) as http:
        (model,) = (await http.get("/v1/models")).json()["data"]
        proposers = gateway.node.fleet.workers[0].backend.load().proposers
    assert model["chat"] is True
    assert model["proposers"] == list(proposers) != []


@pytest.mark.parametrize("simulated", [True, False])
async def test_model_says_whether_it_is_simulated(simulated: bool) -> None:
    """The entry of a model says whether a simulator stands in for it."""
    backends = [] if simulated else [ScriptedBackend()]
    async with running(backends=backends) as gateway, client(gateway) as http:
        (model,) = (await http.get("/v1/models")).json()["data"]
    assert model["simulated"] is simulated


async def test_model_reports_the_parameters_of_requests_that_set_none(tmp_path: Path) -> None:
    """The entry of a model has its own defaults alone, and not those of the API."""
    file = tmp_path / "defaults.json"
    file.write_text('{"temperature": 0.2, "do_sample": true}')
    for setting, expected in ((str(file), {"temperature": 0.2}), ("none", {})):
        async with running(generation_config=setting) as gateway, client(gateway) as http:
            (model,) = (await http.get("/v1/models")).json()["data"]
        assert model["default_parameters"] == expected


async def test_served_model_name_replaces_the_model_id() -> None:
    """The setting `--served-model-name` renames the model for clients."""
    async with running(served_model_name=("org/mine",)) as gateway, client(gateway) as http:
        assert (await http.get("/v1/models")).json()["data"][0]["id"] == "org/mine"
        assert (await http.get("/v1/models/org/mine")).status_code == 200
        for name, status in (("org/mine", 200), ("draftgate-demo", 404)):
            response = await http.post("/v1/completions", json={**COMPLETION, "model": name})
            assert response.status_code == status


async def test_a_model_has_several_served_names() -> None:
    """Clients may use each of several names. Responses have the first, and the list has all."""
    names = ("org/mine", "b", "gpt-4o")
    async with running(served_model_name=names) as gateway, client(gateway) as http:
        listed = (await http.get("/v1/models")).json()["data"]
        assert tuple(model["id"] for model in listed) == names
        for name in names:
            assert (await http.get(f"/v1/models/{name}")).json()["id"] == name
            response = await http.post("/v1/completions", json={**COMPLETION, "model": name})
            assert response.json()["model"] == "org/mine"
        error = (await http.post("/v1/completions", json={**COMPLETION, "model": "c"})).json()
        assert all(name in error["error"]["message"] for name in names)
        metrics = (await http.get("/metrics")).text
        assert 'model_name="org/mine"' in metrics
        assert 'model_name="b"' not in metrics


async def test_health_counts_requests_in_flight(scripted: ScriptedBackend) -> None:
    """The path `/health` counts a request from its arrival to its last byte."""
    async with running(backends=[scripted]) as gateway, client(gateway) as http:
        _, writer = await post_raw(gateway, "/v1/completions", COMPLETION)
        await scripted.submitted.get()
        assert (await http.get("/health")).json()["in_flight"] == 1
        writer.close()
        await until(lambda: gateway.node.in_flight == 0)
