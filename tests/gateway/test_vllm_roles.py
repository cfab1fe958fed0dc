"""Tests of two real vLLM servers, one for prompts and one for outputs, with `NixlConnector`.

They need `vllm/`, `smollm2/` and `nixl/` in the folder `REAL_MODELS`. `nixl/` is made by
`pip install --target nixl nixl`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from bench.harness.processes import free_port
from bench.harness.vllm import MODEL, VllmServer, is_installed, vllm_server
from draftgate.backends.worker_config import UpstreamSettings
from draftgate.policies.types import Role
from tests.gateway.harness import client, events, running

REAL = Path(os.environ.get("REAL_MODELS", ""))
NIXL = REAL / "nixl"
CONNECTOR = '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu"}'
CHAT, TEXTS = "/v1/chat/completions", "/v1/completions"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not (is_installed(REAL) and NIXL.is_dir()), reason="needs vLLM and NIXL in REAL_MODELS"
    ),
]


class Servers(NamedTuple):
    """The server of prompts and that of outputs."""

    prefill: VllmServer
    decode: VllmServer


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Two servers of one model, which copy KV caches over the loopback interface."""
    folder = tmp_path_factory.mktemp("vllm")
    with ExitStack() as stack:
        found = []
        for name in Servers._fields:
            variables = {
                "PYTHONPATH": str(NIXL),
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
                "UCX_TLS": "tcp,self,sm",
                "UCX_NET_DEVICES": "lo",
            }
            options = ("--kv-transfer-config", CONNECTOR)
            log = folder / f"{name}.log"
            server = vllm_server(REAL, log, *options, variables=variables)
            found.append(stack.enter_context(server))
        yield Servers(*found)


def text_of(reply: httpx.Response) -> str:
    """Return the text of a whole response or of a stream."""
    if reply.headers["content-type"].startswith("text/event-stream"):
        found = [one for one in events(reply.text) if one != "[DONE]"]
    else:
        found = [reply.json()]
    choices = [choice for one in found for choice in one["choices"]]
    return "".join(map(_text_of_choice, choices))


def _text_of_choice(choice: dict[str, Any]) -> str:
    message = choice.get("message") or choice.get("delta") or {}
    return choice.get("text") or message.get("content") or ""


def copied_tokens(server: VllmServer) -> float:
    """Return the prompt tokens that a server has copied from another one."""
    page = httpx.get(f"{server.url}/metrics", timeout=60).text
    lines = [line.split() for line in page.splitlines() if line.startswith(_COPIED)]
    return sum(float(line[-1]) for line in lines)


_COPIED = "vllm:external_prefix_cache_hits_total"


def request_for(path: str, number: int, stream: bool) -> dict[str, Any]:
    """Return a greedy request with a prompt of its own of several hundred tokens."""
    text = f"Story {number}. " + "The quick brown fox jumps over the lazy dog. " * 30
    prompt = (
        {"prompt": text} if path == TEXTS else {"messages": [{"role": "user", "content": text}]}
    )
    return {"model": MODEL, **prompt, "max_tokens": 12, "temperature": 0, "stream": stream}


async def test_outputs_are_those_of_one_server(servers: Servers) -> None:
    """Divided requests have the text of whole ones, and the server of outputs copies the prompts.
    Once the server of prompts is dead, the other one computes them."""
    upstream = tuple(
        UpstreamSettings(url=server.url, name=role.value, role=role)
        for server, role in zip(servers, (Role.PREFILL, Role.DECODE), strict=True)
    )
    settings = {"backend": "openai", "upstream": upstream, "upstream_prefill_tokens": 100}
    cases = [(path, stream) for path in (TEXTS, CHAT) for stream in (False, True)]
    async with running(**settings) as gateway, client(gateway) as http:
        for number, (path, stream) in enumerate(cases):
            body, before = request_for(path, number, stream), copied_tokens(servers.decode)
            divided = await http.post(path, json=body)
            assert divided.headers["x-draftgate-prefill-upstream"] == "prefill"
            assert copied_tokens(servers.decode) - before > 200
            alone = await http.post(f"{servers.prefill.url}{path}", json=body)
            assert text_of(divided) == text_of(alone) != ""
        servers.prefill.signal(signal.SIGKILL)
        body = request_for(TEXTS, len(cases), stream=False)
        direct = await http.post(TEXTS, json=body)
        assert direct.status_code == 200
        assert "x-draftgate-prefill-upstream" not in direct.headers
