"""Drafts from earlier outputs over the HTTP API."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.gateway.harness import client, needs_engine, running

ENGINE = {
    "backend": "engine",
    "kv_bytes": 32 << 20,
    "threads": 1,
    "dtype": "float32",
    "speculation": "fixed:6",
    "proposer": "ngram",
}

BODY = {"prompt": "def add(a, b):", "max_tokens": 48, "temperature": 0.8, "seed": 3}


async def completed(http: httpx.AsyncClient, **fields: Any) -> tuple[str, int]:
    """Return the text of a completion and its number of accepted draft tokens."""
    body = (await http.post("/v1/completions", json={**BODY, **fields})).json()
    return body["choices"][0]["text"], body["metrics"]["speculative_decoding"][
        "num_accepted_tokens"
    ]


@needs_engine
async def test_earlier_output_serves_drafts_of_the_same_salt_and_changes_no_text() -> None:
    """A repeated request accepts more drafts, unless it is excluded or has another salt."""
    async with running(**ENGINE) as listening, client(listening) as http:
        text, first = await completed(http)
        excluded = await completed(http, speculation={"corpus": False})
        salted = await completed(http, cache_salt="a")
        again = await completed(http)
        salted_again = await completed(http, cache_salt="a")
    assert excluded == salted == (text, first)
    assert again == salted_again
    assert again[0] == text
    assert again[1] > 2 * first


@needs_engine
@pytest.mark.parametrize("feeds", [True, False])
async def test_excluded_request_feeds_no_later_draft(feeds: bool) -> None:
    """An output with `corpus` false is not found by the next request."""
    async with running(**ENGINE) as listening, client(listening) as http:
        _, first = await completed(http, speculation={"corpus": feeds})
        _, second = await completed(http)
    assert (second > first) == feeds
