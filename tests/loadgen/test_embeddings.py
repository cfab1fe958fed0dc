"""Tests of the audit of embeddings responses."""

from __future__ import annotations

import base64
import json
import struct

import pytest

from draftgate.loadgen.checking.audit import VectorAudit

ONE, TWO = [1.0, 0.5], [0.0, -2.0]


def packed(vector) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def reply(*vectors, places=None, **fields) -> bytes:
    data = [
        {"index": place, "embedding": vector}
        for place, vector in zip(places or range(len(vectors)), vectors, strict=True)
    ]
    usage = {"usage": {"prompt_tokens": 7, "total_tokens": 7}}
    return json.dumps({"object": "list", "data": data, **usage, **fields}).encode()


@pytest.mark.parametrize(
    "body",
    [
        reply(packed(ONE), packed(TWO)),
        reply(ONE, TWO),
        reply(packed(TWO), packed(ONE), places=[1, 0]),
    ],
)
def test_vectors_come_in_the_order_of_the_inputs(body: bytes) -> None:
    """The audit returns the same bytes for vectors in base64 or as numbers, in any order."""
    audit = VectorAudit(2)
    audit.add(body)
    assert (audit.verdict, audit.detail) == ("ok", "")
    assert audit.vectors == tuple(struct.pack("<2f", *vector) for vector in (ONE, TWO))
    assert audit.usage["prompt_tokens"] == 7


@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        (b"{", "malformed"),
        (b"\xff", "malformed"),
        (b"[]", "malformed"),
        (b'{"error": {"message": "busy"}}', "malformed"),
        (reply(ONE), "malformed"),
        (reply(ONE, TWO, ONE), "malformed"),
        (reply(ONE, TWO, places=[0, 2]), "malformed"),
        (reply(ONE, TWO, places=[1, 1]), "duplicated"),
        (reply(ONE, [1.0]), "malformed"),
        (reply([], []), "malformed"),
        (reply("!", packed(TWO)), "malformed"),
        (reply(packed([float("nan"), 0.0]), packed(TWO)), "malformed"),
        (reply([1e39, 0.0], TWO), "malformed"),
        (reply(ONE, TWO, usage=None), "no_usage"),
        (reply(ONE, TWO, usage={}), "bad_usage"),
        (reply(ONE, TWO, usage={"prompt_tokens": 1}), "bad_usage"),
    ],
)
def test_a_faulty_response_gives_no_vectors(body: bytes, verdict: str) -> None:
    """Missing, duplicate, unequal, infinite or uncounted vectors fail the request."""
    audit = VectorAudit(2)
    audit.add(body)
    assert audit.verdict == verdict
    assert audit.detail
    assert audit.vectors == ()
