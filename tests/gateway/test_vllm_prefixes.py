"""Tests of routing by the KV cache events of two real vLLM servers.

They need `vllm/` and `smollm2/` in the folder `REAL_MODELS`, and pyzmq.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.fleet.prefixes import CachingVllm, caching_servers, run_arms, summary
from bench.harness.vllm import MODEL, is_installed
from draftgate.backends.tokenizer import Tokenizer
from draftgate.gateway.http.requests.upstream_prompts import encode_forwarded

REAL = Path(os.environ.get("REAL_MODELS", ""))

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not is_installed(REAL), reason="needs vLLM in REAL_MODELS"),
]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[CachingVllm]]:
    """Two servers whose caches hold some of the documents."""
    pytest.importorskip("zmq")
    with caching_servers(REAL, tmp_path_factory.mktemp("vllm")) as found:
        yield found


def test_predicted_hit_rate_is_that_of_the_servers(
    servers: list[CachingVllm], tmp_path: Path
) -> None:
    """The tokens that gateways expect to be cached are those that the servers find in their caches,
    within 2% of all prompt tokens, while the caches are too small for all documents. The requests
    come one by one, because a prompt that is still computed counts only for the server."""
    rounds = run_arms(
        REAL, tmp_path, servers, ["events"], rounds=2, requests=20, number=2, clients=1
    )
    found = summary(rounds["events"])
    assert found["hit_rate"] > 0.2
    assert abs(found["predicted_hit_rate"] - found["hit_rate"]) < 0.02


USER = {"role": "user", "content": "What is a KV cache?"}
PARTS = {"role": "user", "content": [{"type": "text", "text": t} for t in ("Hello", "there")]}
CHATS: tuple[dict[str, Any], ...] = (
    {"messages": [USER]},
    {"messages": [{"role": "system", "content": "Be brief. "}, USER]},
    {"messages": [PARTS, {"role": "assistant", "content": " Hi é 你好\n"}, USER]},
    {"messages": [USER], "add_generation_prompt": False},
    {
        "messages": [USER, {"role": "assistant", "content": "It is"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    {"messages": [USER], "add_special_tokens": True},
)


def test_prompts_have_the_tokens_of_the_server(servers: list[CachingVllm]) -> None:
    """The gateway encodes chats and completions as the server's own `/tokenize` does."""
    tokenizer = Tokenizer(REAL / MODEL)
    bodies = [("/v1/chat/completions", body) for body in CHATS]
    bodies += [
        ("/v1/completions", {"prompt": text}) for text in ("def f(x):\n", " é", "<|im_end|>")
    ]
    for path, body in bodies:
        sent = {"model": MODEL, **body}
        theirs = httpx.post(f"{servers[0].server.url}/tokenize", json=sent, timeout=60).json()
        ours = encode_forwarded(path, json.dumps(body).encode(), tokenizer)
        assert ours is not None
        assert ours.token_ids == theirs["tokens"], body
