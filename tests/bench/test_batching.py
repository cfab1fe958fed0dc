"""Tests of the comparison of batching policies, with a mock server."""

from __future__ import annotations

from argparse import Namespace
from itertools import islice

from bench.gateway import batching as study
from bench.gateway.batching import LONG_EVERY_S, LONG_TOKENS, long_prompts, measure
from draftgate.loadgen.types import Slo
from tests.loadgen.mock_server import Mock, serving

TEXT = "".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(4000))


def test_long_prompts_arrive_at_fixed_intervals() -> None:
    """Long prompts differ from their first character, and have the same number of tokens."""
    first, second = islice(long_prompts(TEXT, seed=1), 2)
    assert (first.at_s, second.at_s) == (0.0, LONG_EVERY_S)
    assert first.request.prompt != second.request.prompt
    assert dict(first.request.extra) == {"truncate_prompt_tokens": LONG_TOKENS}


async def test_chats_are_searched_beside_long_prompts(monkeypatch) -> None:
    """The result is the search of chats with a limit of their gaps, beside long prompts."""
    monkeypatch.setattr(study, "SLO", Slo.of_ms(50.0, 1000.0, chunk_gap_ms=1000.0))
    mock = Mock()
    async with serving(mock) as url:
        row = await measure("slack", url, TEXT, Namespace(rate=100.0, requests=60, seed=0))
    assert (row["batching"], row["long_prompts"]) == ("slack", 1)
    assert row["search"]["requests"] >= 60
    assert any("truncate_prompt_tokens" in body for body in mock.bodies)
    assert any("messages" in body for body in mock.bodies)
