"""Tests of the headers with the state of a key's quota."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.gateway.http.rate_limits import duration
from draftgate.gateway.state.commands import ReadLevels, StoreCommand, T
from draftgate.gateway.state.memory.store import MemoryStore
from draftgate.gateway.state.store import StoreError
from tests.gateway.harness import client, running
from tests.gateway.upstreams import forwarding, upstream, whole

KEY = {"authorization": "Bearer sk-a"}
FREE = {"authorization": "Bearer sk-free"}
MESSAGES = [{"role": "user", "content": "x"}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
}


@pytest.fixture
def keys(tmp_path: Path) -> str:
    """A file with a key with quotas, and one without."""
    path = tmp_path / "keys.yaml"
    path.write_text(
        "keys:\n"
        "  - {name: a, key: sk-a, requests_per_minute: 5, tokens_per_minute: 100000}\n"
        "  - {name: free, key: sk-free}\n"
    )
    return str(path)


def frozen() -> MemoryStore:
    """Return a store whose time stands still, so that no quota refills."""
    return MemoryStore(lambda: 1000.0)


def state(headers: Any, field: str, limit: str) -> str:
    """Return a field of the state of a limit in either format."""
    names = (f"x-ratelimit-{field}-{limit}", f"anthropic-ratelimit-{limit}-{field}")
    (found,) = (headers[name] for name in names if name in headers)
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", REQUESTS)
async def test_responses_state_what_remains(keys: str, path: str, *, stream: bool) -> None:
    """Each response states what remains, also with status 429, and in the format of its API."""
    async with running(api_keys_file=keys, store=frozen()) as gateway, client(gateway) as http:
        body = {**REQUESTS[path], "stream": stream}
        for left in (4, 3, 2, 1, 0, 0):
            response = await http.post(path, json=body, headers=KEY)
            headers = response.headers
            assert state(headers, "limit", "requests") == "5"
            assert state(headers, "remaining", "requests") == str(left)
            assert state(headers, "limit", "tokens") == "100000"
            assert 0 < int(state(headers, "remaining", "tokens")) < 100000
            anthropic = [name for name in headers if name.startswith("anthropic-ratelimit")]
            assert len(anthropic) == (6 if path == "/v1/messages" else 0)
        assert response.status_code == 429
        assert "quota allows 5 requests at once" in response.text
        reset = state(headers, "reset", "requests")
        if path == "/v1/messages":
            ends_s = datetime.fromisoformat(reset).timestamp()
            assert 0 < ends_s - time.time() <= 61
        else:
            assert reset == "1m0s"


async def test_requests_without_a_quota_have_no_headers(keys: str) -> None:
    """Neither a key without a quota nor an endpoint that uses none has the headers."""
    async with running(api_keys_file=keys, store=frozen()) as gateway, client(gateway) as http:
        for response in (
            await http.post("/v1/completions", json=REQUESTS["/v1/completions"], headers=FREE),
            await http.get("/v1/models", headers=KEY),
            await http.post("/v1/completions", json=REQUESTS["/v1/completions"]),
        ):
            assert not [name for name in response.headers if "ratelimit" in name]


async def test_forwarded_responses_state_what_remains(keys: str) -> None:
    """A response of an upstream has the state of the gateway's quota."""
    async with (
        upstream(whole) as engine,
        forwarding(engine, api_keys_file=keys, store=frozen()) as gateway,
        client(gateway) as http,
    ):
        body = REQUESTS["/v1/completions"]
        response = await http.post("/v1/completions", json=body, headers=KEY)
        assert response.headers["x-ratelimit-remaining-requests"] == "4"


class Broken(MemoryStore):
    """A store in another process, which does not tell levels."""

    memory = None

    async def call(self, command: StoreCommand[T]) -> T:
        if isinstance(command, ReadLevels):
            raise StoreError("unreachable")
        return self.apply(command)


async def test_a_broken_store_costs_only_the_headers(keys: str) -> None:
    """A response without a known state has no headers, and succeeds."""
    async with running(api_keys_file=keys, store=Broken()) as gateway, client(gateway) as http:
        body = REQUESTS["/v1/completions"]
        response = await http.post("/v1/completions", json=body, headers=KEY)
        assert response.status_code == 200
        assert "x-ratelimit-limit-requests" not in response.headers


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.0, "0ms"), (0.0121, "13ms"), (1.0, "1s"), (1.5, "1.5s"), (360.0, "6m0s"),
     (3603.0, "1h0m3s"), (61.25, "1m1.25s")],
)  # fmt: skip
def test_times_have_the_form_of_openai(seconds: float, shown: str) -> None:
    """A time until a reset is a duration such as OpenAI's API sends."""
    assert duration(seconds) == shown


@given(seconds=st.floats(0.0, 1e6))
def test_a_reset_is_never_early(seconds: float) -> None:
    """The parts of a duration add up to the time, rounded up to a millisecond."""
    text, total = duration(seconds), 0.0
    if text.endswith("ms"):
        total = int(text.removesuffix("ms")) / 1000
    else:
        for unit, factor in (("h", 3600), ("m", 60), ("s", 1)):
            number, found, rest = text.partition(unit)
            if found:
                total, text = total + float(number) * factor, rest
    assert seconds - 1e-6 <= total <= seconds + 0.001 + 1e-6
