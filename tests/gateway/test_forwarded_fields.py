"""What is read from forwarded bodies, and what the upstream gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftgate.gateway.accounts import ANONYMOUS, Account
from draftgate.gateway.errors import InvalidRequest
from draftgate.gateway.http.requests.forwarded import (
    DEFAULT_OUTPUT_TOKENS,
    MOST_OUTPUT_TOKENS,
    changed_fields,
    read_fields,
    rewrite_body,
)
from draftgate.gateway.http.requests.limits import MAX_CHOICES, MAX_PRIORITY
from draftgate.policies.types import SpeculationMode
from tests.gateway.harness import client
from tests.gateway.upstreams import (
    DONE,
    LAST,
    TOKEN,
    USAGE,
    Answering,
    cut_after,
    in_front,
    refusal,
    stream_of,
    upstream,
    whole,
)

CAPPED = Account("slow", key="k", first_priority=2, least_ttft_ms=500.0, least_tpot_ms=20.0)
KEY = {"Authorization": "Bearer k"}


def keys_file(tmp_path: Path, **bounds: Any) -> str:
    """Write a file with one key, `k`."""
    path = tmp_path / "keys.yaml"
    path.write_text(json.dumps({"keys": [{"name": "slow", "key": "k", **bounds}]}))
    return str(path)


@pytest.mark.parametrize(
    ("said", "believed"),
    [
        ({}, DEFAULT_OUTPUT_TOKENS),
        ({"max_tokens": -5}, DEFAULT_OUTPUT_TOKENS),
        ({"max_tokens": 0}, DEFAULT_OUTPUT_TOKENS),
        ({"max_tokens": "9"}, DEFAULT_OUTPUT_TOKENS),
        ({"max_tokens": True}, DEFAULT_OUTPUT_TOKENS),
        ({"max_tokens": 10**15}, MOST_OUTPUT_TOKENS),
        ({"max_tokens": 10**40}, MOST_OUTPUT_TOKENS),
        ({"max_tokens": 7, "max_completion_tokens": 8}, 8),
        ({"max_output_tokens": 9}, 9),
    ],
)
def test_max_tokens_is_bounded(said: dict[str, object], believed: int) -> None:
    """Invalid values are ignored, and the limit is the model's context."""
    body = json.dumps(said).encode()
    assert read_fields(body).max_tokens == believed
    assert read_fields(body, 99).max_tokens == min(believed, 99)


@pytest.mark.parametrize(("said", "believed"), [(10**9, MAX_CHOICES), (-1, 1), (0, 1), (3, 3)])
def test_choices_are_bounded(said: int, believed: int) -> None:
    """A request cannot reserve more sequences than it may have choices."""
    assert read_fields(json.dumps({"n": said}).encode()).n == believed


@pytest.mark.parametrize(
    ("said", "believed"),
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
    said: dict[str, Any], believed: tuple[SpeculationMode, int | None, float]
) -> None:
    """Invalid values are ignored, since rejecting them is up to the upstream."""
    wishes = read_fields(json.dumps(said).encode())
    assert (wishes.mode, wishes.max_draft_tokens, wishes.temperature) == believed


def test_priorities_are_bounded() -> None:
    """They fit into any message."""
    for said in (-(10**12), 10**12):
        body = json.dumps({"priority": said}).encode()
        assert abs(read_fields(body).priority) == MAX_PRIORITY


@pytest.mark.parametrize(
    ("said", "sent"),
    [
        (b'{"x":1.50}', b'{"x":1.50,"priority":2}'),
        (b'{"priority":-3,"x":1.50}', b'{"priority":2,"x":1.50}'),
        (b'{"priority":null}', b'{"priority":2}'),
        (b'{ "priority": 2 }', b'{ "priority": 2 }'),
        (b'{ "priority": 7 }', b'{ "priority": 7 }'),
    ],
)
def test_priority_is_capped_by_the_account(said: bytes, sent: bytes) -> None:
    """Only that value changes, and only if it is better than allowed."""
    found = changed_fields(read_fields(said), (None, "theirs"), CAPPED)
    assert rewrite_body(said, found) == sent
    assert not changed_fields(read_fields(said), (None, "theirs"), ANONYMOUS)


@pytest.mark.parametrize("said", [b'{"priority":"-3"}', b'{"priority":1.0}', b"{", b'{"a":NaN}'])
def test_unreadable_priority_of_a_capped_account_is_refused(said: bytes) -> None:
    """The upstream might understand it, which would bypass the cap."""
    with pytest.raises(InvalidRequest):
        changed_fields(read_fields(said), (None, "theirs"), CAPPED)


async def test_account_caps_apply_at_the_upstream(tmp_path: Path) -> None:
    """It gets the targets and the priority that the account may have."""
    bounds = {"first_priority": 0, "least_ttft_ms": 500, "least_tpot_ms": 20}
    slo = {"x-slo-ttft-ms": "1", "x-slo-tpot-ms": "30"}
    async with (
        upstream(whole) as there,
        in_front(there, api_keys_file=keys_file(tmp_path, **bounds)) as where,
        client(where) as http,
    ):
        body = {"prompt": "x", "priority": -9}
        await http.post("/v1/completions", json=body, headers={**KEY, **slo})
        assert json.loads(there.bodies[0]) == {"prompt": "x", "priority": 0}
        headers = there.requests[0].headers
        assert (headers["x-slo-ttft-ms"], headers["x-slo-tpot-ms"]) == ("500", "30")


@pytest.mark.parametrize("wish", [{"max_tokens": -1}, {"max_tokens": 10**15}, {"n": 10**9}])
async def test_invalid_bodies_pass_to_the_upstream(wish: dict[str, int]) -> None:
    """They pass unchanged, and leave nothing behind here."""
    async with (
        upstream(refusal(400, b'{"error": {}}')) as there,
        in_front(there) as where,
        client(where) as http,
    ):
        assert (await http.post("/v1/completions", json=wish)).status_code == 400
        assert json.loads(there.bodies[0]) == wish


@pytest.mark.parametrize(
    ("answer", "used"),
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
    tmp_path: Path, answer: Answering, used: int
) -> None:
    """The prompt is booked by estimate and each event as a token.

    A whole answer is booked with its maximum, and a refusal with nothing.
    """
    limits = {"tokens_per_minute": 100, "first_priority": None}
    body = {"prompt": "x" * 200, "max_tokens": 8, "stream": True}
    body["prompt"] = "x" * (160 - len(json.dumps({**body, "prompt": ""}, separators=(",", ":"))))
    async with (
        upstream(answer) as there,
        in_front(there, api_keys_file=keys_file(tmp_path, **limits)) as where,
        client(where) as http,
    ):
        await http.post("/v1/completions", json=body, headers=KEY)
        ledger = where.node.dispatcher.admission.ledger
        assert ledger.totals("slow").settled == used
        assert ledger.totals("slow").open == 0
