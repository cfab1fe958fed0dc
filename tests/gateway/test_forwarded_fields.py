"""Tests of the fields that the gateway reads from forwarded bodies and changes for the upstream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftgate.gateway.accounts import ANONYMOUS, Account
from draftgate.gateway.dispatch.quotas import quota_account
from draftgate.gateway.errors import InvalidRequest
from draftgate.gateway.http.requests.forwarded import (
    DEFAULT_OUTPUT_TOKENS,
    MOST_CHOICES,
    MOST_OUTPUT_TOKENS,
    changed_fields,
    read_fields,
    rewrite_body,
)
from draftgate.gateway.http.requests.limits import MAX_PRIORITY
from draftgate.gateway.state.commands import ReadTotals
from draftgate.policies.types import SpeculationMode
from tests.gateway.harness import client
from tests.gateway.upstreams import (
    DONE,
    LAST,
    TOKEN,
    USAGE,
    Handler,
    cut_after,
    forwarding,
    refusal,
    stream_of,
    upstream,
    whole,
)

CAPPED = Account("slow", key="k", first_priority=2, least_ttft_ms=500.0, least_tpot_ms=20.0)
KEY = {"Authorization": "Bearer k"}


def keys_file(tmp_path: Path, **bounds: Any) -> str:
    """Write a keys file with the single key `k` and return its path."""
    path = tmp_path / "keys.yaml"
    path.write_text(json.dumps({"keys": [{"name": "slow", "key": "k", **bounds}]}))
    return str(path)


@pytest.mark.parametrize(
    ("sent_fields", "expected"),
    [
        ({}, DEFAULT_OUTPUT_TOKENS),
        ({"max_tokens": -5}, DEFAULT_OUTPUT_TOKENS),
        ({"max_tokens": 0}, 0),
        ({"max_tokens": "9"}, DEFAULT_OUTPUT_TOKENS),
        ({"max_tokens": True}, DEFAULT_OUTPUT_TOKENS),
        ({"max_tokens": 10**15}, MOST_OUTPUT_TOKENS),
        ({"max_tokens": 10**40}, MOST_OUTPUT_TOKENS),
        ({"max_tokens": 7, "max_completion_tokens": 8}, 8),
        ({"max_output_tokens": 9}, 9),
    ],
)
def test_max_tokens_is_bounded(sent_fields: dict[str, object], expected: int) -> None:
    """The gateway ignores invalid limits and bounds `max_tokens` by the model's context."""
    body = json.dumps(sent_fields).encode()
    assert read_fields(body).max_tokens == expected
    assert read_fields(body, 99).max_tokens == min(expected, 99)


@pytest.mark.parametrize(
    ("sent_fields", "expected"), [(10**9, MOST_CHOICES), (-1, 1), (0, 1), (3, 3)]
)
def test_choices_are_bounded(sent_fields: int, expected: int) -> None:
    """The gateway bounds `n`, so a request cannot reserve more sequences than it may have
    choices."""
    assert read_fields(json.dumps({"n": sent_fields}).encode()).n == expected


@pytest.mark.parametrize(
    ("sent_fields", "expected"),
    [
        ({}, (SpeculationMode.AUTO, None, 1.0)),
        ({"temperature": 0, "speculation": {"mode": "off"}}, (SpeculationMode.OFF, None, 0.0)),
        ({"speculation": {"max_draft_tokens": 0}}, (SpeculationMode.AUTO, 0, 1.0)),
        ({"speculation": {"mode": "ngram", "x": 1}}, (SpeculationMode.NGRAM, None, 1.0)),
        ({"speculation": {"mode": "OFF"}}, (SpeculationMode.AUTO, None, 1.0)),
        (
            {"speculation": {"mode": None, "max_draft_tokens": "9"}},
            (SpeculationMode.AUTO, None, 1.0),
        ),
        ({"speculation": ["off"], "temperature": "hot"}, (SpeculationMode.AUTO, None, 1.0)),
        (
            {"speculation": {"max_draft_tokens": -1}, "temperature": -2},
            (SpeculationMode.AUTO, None, 0.0),
        ),
        ({"temperature": True}, (SpeculationMode.AUTO, None, 1.0)),
    ],
)
def test_speculation_fields_are_read(
    sent_fields: dict[str, Any], expected: tuple[SpeculationMode, int | None, float]
) -> None:
    """The gateway ignores invalid speculation fields, because the upstream may reject them."""
    fields = read_fields(json.dumps(sent_fields).encode())
    assert (fields.mode, fields.max_draft_tokens, fields.temperature) == expected


def test_priorities_are_bounded() -> None:
    """The gateway bounds the priority of a request."""
    for sent_fields in (-(10**12), 10**12):
        body = json.dumps({"priority": sent_fields}).encode()
        assert abs(read_fields(body).priority) == MAX_PRIORITY


@pytest.mark.parametrize(
    ("sent_fields", "sent"),
    [
        (b'{"x":1.50}', b'{"x":1.50,"priority":2}'),
        (b'{"priority":-3,"x":1.50}', b'{"priority":2,"x":1.50}'),
        (b'{"priority":null}', b'{"priority":2}'),
        (b'{ "priority": 2 }', b'{ "priority": 2 }'),
        (b'{ "priority": 7 }', b'{ "priority": 7 }'),
    ],
)
def test_priority_is_capped_by_the_account(sent_fields: bytes, sent: bytes) -> None:
    """The gateway changes only the priority, and only if the account does not permit the value."""
    found = changed_fields(read_fields(sent_fields), ((), "theirs"), CAPPED)
    assert rewrite_body(sent_fields, found) == sent
    assert not changed_fields(read_fields(sent_fields), ((), "theirs"), ANONYMOUS)


@pytest.mark.parametrize(
    "sent_fields", [b'{"priority":"-3"}', b'{"priority":1.0}', b"{", b'{"a":NaN}']
)
def test_unreadable_priority_of_a_capped_account_is_rejected(sent_fields: bytes) -> None:
    """The gateway rejects a priority that it cannot read, because the upstream might accept the
    value."""
    with pytest.raises(InvalidRequest):
        changed_fields(read_fields(sent_fields), ((), "theirs"), CAPPED)


async def test_account_caps_apply_at_the_upstream(tmp_path: Path) -> None:
    """The upstream receives the targets and the priority that the account permits."""
    bounds = {"first_priority": 0, "least_ttft_ms": 500, "least_tpot_ms": 20}
    slo = {"x-slo-ttft-ms": "1", "x-slo-tpot-ms": "30"}
    async with (
        upstream(whole) as engine,
        forwarding(engine, api_keys_file=keys_file(tmp_path, **bounds)) as gateway,
        client(gateway) as http,
    ):
        body = {"prompt": "x", "priority": -9}
        await http.post("/v1/completions", json=body, headers={**KEY, **slo})
        assert json.loads(engine.bodies[0]) == {"prompt": "x", "priority": 0}
        headers = engine.requests[0].headers
        assert (headers["x-slo-ttft-ms"], headers["x-slo-tpot-ms"]) == ("500", "30")


@pytest.mark.parametrize("fields", [{"max_tokens": -1}, {"max_tokens": 10**15}, {"n": 10**9}])
async def test_invalid_bodies_pass_to_the_upstream(fields: dict[str, int]) -> None:
    """The gateway forwards invalid values to the upstream unchanged."""
    async with (
        upstream(refusal(400, b'{"error": {}}')) as engine,
        forwarding(engine) as gateway,
        client(gateway) as http,
    ):
        assert (await http.post("/v1/completions", json=fields)).status_code == 400
        assert json.loads(engine.bodies[0]) == fields


@pytest.mark.parametrize(
    ("handler", "used"),
    [
        (stream_of(TOKEN, LAST, USAGE, DONE), 10),
        (stream_of(TOKEN, LAST, DONE), 40 + 2),
        (cut_after(TOKEN), 40 + 1),
        (whole, 7),
        (refusal(200, b'{"choices": []}'), 40 + 8),
        (cut_after(), 40),
        (refusal(400, b"{}"), 0),
        (refusal(429, b"{}"), 0),
        (refusal(503, b"{}"), 0),
    ],
    ids=["usage", "no-usage", "cut", "whole", "whole-no-usage", "no-answer", "400", "429", "503"],
)
async def test_quota_is_used_without_reported_usage(
    tmp_path: Path, handler: Handler, used: int
) -> None:
    """The gateway charges an estimated prompt and one token per event if the upstream reports no
    usage.

    The gateway charges the maximum for a whole response without usage, and nothing for an error
    response.
    """
    limits = {"tokens_per_minute": 100, "first_priority": None}
    body = {"prompt": "x" * 200, "max_tokens": 8, "stream": True}
    body["prompt"] = "x" * (160 - len(json.dumps({**body, "prompt": ""}, separators=(",", ":"))))
    async with (
        upstream(handler) as engine,
        forwarding(engine, api_keys_file=keys_file(tmp_path, **limits)) as gateway,
        client(gateway) as http,
    ):
        await http.post("/v1/completions", json=body, headers=KEY)
        store = gateway.node.store
        assert (await store.call(ReadTotals(quota_account("slow", "")))).settled == used
        assert (await store.call(ReadTotals(quota_account("slow", "")))).open == 0
