"""The study of moves between unlike workers: its requests and its paired differences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.simulation.unlike_workers import CHAT, LONG, MOST_CHAT, draw_lengths, main, plan


def test_long_prompts_have_their_own_targets_and_all_rates_the_same_requests() -> None:
    """Each request has the targets of its length, and a rate changes only the arrivals."""
    drawn = draw_lengths(200, seed=1)
    slow, fast = plan(drawn, 10.0, "gamma:4"), plan(drawn, 20.0, "gamma:4")
    for row, one in zip(drawn.rows, slow, strict=True):
        assert one.request.slo == (LONG if row.prompt_tokens > MOST_CHAT else CHAT)
    assert {one.request.class_name for one in slow} == {"chat", "long_document"}
    assert [one.request for one in slow] == [one.request for one in fast]
    assert [one.at_s for one in slow] == pytest.approx([2 * (one.at_s or 0) for one in fast])


@pytest.mark.long
def test_policies_are_compared_in_pairs(tmp_path: Path) -> None:
    """Streams move between workers of different profiles, and the differences have intervals."""
    out = tmp_path / "out.json"
    settings = ["--requests", "80", "--seeds", "3", "--speculation", "auto", "--rates", "60"]
    main([*settings, "--json", str(out)])
    (cell,) = json.loads(out.read_text())["cells"]
    assert cell["policies"]["least_time"]["ends"]["faster moved"] > 0
    assert not cell["policies"]["off"]["ends"]
    assert cell["ours_less"]["off"]["goodput_rps"]["samples"] == 3
    low, high = cell["ours_less"]["off"]["goodput_rps"]["interval"]
    assert low <= cell["ours_less"]["off"]["goodput_rps"]["mean"] <= high
