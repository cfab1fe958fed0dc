"""Tests of the numbers in headers."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.header_numbers import header_count, header_number, header_text
from draftgate.gateway.http.requests.headers import retry_count
from tests.gateway.harness import client
from tests.gateway.upstreams import forwarding, upstream, whole

HEADERS = ("x-slo-ttft-ms", "x-slo-tpot-ms", "x-flow-deadline-ms", "x-client-rate-tps")

NO_NUMBERS = (
    "1_000", "+1", "-1", "0x10", "1e3", "inf", "nan", "Infinity", "1,5", "1 000", ".5", "5.",
    "\u0661\u0662", "\uff11", "\u00b2", "\u2460", "1\u00a0", "True", "0b1", "5ms", "1;2", "9" * 16,
    "1.5.2", "--1", "1.\u0665", "\udcff1",
)  # fmt: skip
"""Texts that `float` or `int` or another program would read as a number, and some others."""


@pytest.mark.parametrize("text", ["", *NO_NUMBERS])
def test_text_that_is_no_plain_decimal_is_refused(text: str) -> None:
    """Only ASCII digits with an optional fraction are a number, and only digits are a count."""
    assert header_number(text) is None
    assert header_count(text) is None
    assert retry_count({"x-stainless-retry-count": text}) is None


@given(st.text(st.characters(codec="utf-8"), max_size=20))
def test_a_number_is_what_every_program_reads(text: str) -> None:
    """Whatever is accepted consists of ASCII digits and at most one point, and has their value."""
    number = header_number(text)
    if number is not None:
        assert set(text) <= set("0123456789.")
        assert number == float(text) >= 0
    count = header_count(text)
    assert count is None or (str(count) == text.lstrip("0") or count == 0)


@given(st.floats(0, 1e9))
def test_written_numbers_are_read_again(number: float) -> None:
    """A header that the gateway writes is one that it reads, up to a millionth."""
    found = header_number(header_text(number))
    assert found is not None
    assert abs(found - number) <= 1e-6


@pytest.mark.parametrize("header", HEADERS)
async def test_each_header_with_a_number_refuses_other_texts(
    http: httpx.AsyncClient, header: str
) -> None:
    """Every endpoint's header with a number is a 400 that names the header, if it is not one."""
    body = {"prompt": "a", "max_tokens": 1}
    for text in (*NO_NUMBERS, "0", "0.0"):
        headers = {"x-flow-id": b"f", header: text.encode("utf-8", "surrogateescape")}
        response = await http.post("/v1/completions", json=body, headers=headers)
        assert (response.status_code, response.json()["error"]["param"]) == (400, header), text
    for text in ("7", "0.25", "007"):
        headers = {"x-flow-id": b"f", header: text.encode()}
        response = await http.post("/v1/completions", json=body, headers=headers)
        assert response.status_code in {200, 429}, text


async def test_upstream_gets_plain_numbers(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A limit of an account reaches the upstream without an exponent."""
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text("keys:\n  - {name: a, key: sk-a, least_ttft_ms: 2500000}\n")
    headers = {"authorization": "Bearer sk-a", "x-slo-ttft-ms": "1000"}
    async with (
        upstream(whole) as engine,
        forwarding(engine, api_keys_file=str(keys)) as gateway,
        client(gateway) as http,
    ):
        await http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    assert engine.requests[0].headers["x-slo-ttft-ms"] == "2500000"
