"""Tests of simulated requests with the lengths of a trace."""

from __future__ import annotations

import pytest

from draftgate.lab.plan.sources import Drawn, Recorded
from draftgate.loadgen.planning.traces import TraceRow
from draftgate.loadgen.types import Slo


def test_rates_get_the_same_requests_in_the_same_order() -> None:
    """All rates have the same unique requests in the same order, and only arrivals scale."""
    rows = tuple(TraceRow(0.0, 20 * (n % 50) + 1, n % 7 + 2) for n in range(100))
    drawn = Drawn.from_rows(rows, 80, seed=3)
    slow, fast = (drawn.planned(rate_rps, Slo(tpot_s=0.1)) for rate_rps in (1.0, 4.0))
    for one, other in zip(slow, fast, strict=True):
        assert one.request == other.request
        assert one.at_s == pytest.approx(4.0 * other.at_s)
    prompts = [drawn.job(one).prompts[0] for one in slow]
    assert [len(prompt) for prompt in prompts] == [max(r.prompt_tokens, 4) for r in drawn.rows]
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 80
    assert Drawn.from_rows(rows, 80, seed=4).rows != drawn.rows
    assert sorted(Drawn.from_rows(rows, 200, 0).rows, key=str) == sorted(rows * 2, key=str)


def test_recorded_prompts_share_the_prefixes_of_the_trace() -> None:
    """Prompts have the lengths of the trace, and equal blocks have equal token ids."""
    rows = tuple(
        TraceRow(n * 0.1, 700 + 16 * (n % 5), 20, (n % 6, 100 + n), 512) for n in range(120)
    )
    recorded = Recorded.from_rows(rows, 20, 4096)
    jobs = [recorded.job(one) for one in recorded.planned(10.0, Slo(), 0)]
    prompts = [job.prompts[0].tolist() for job in jobs]
    assert [len(one) for one in prompts] == [row.prompt_tokens for row in rows[:20]]
    assert prompts[0][:512] == prompts[6][:512]
    assert prompts[0][512:528] != prompts[6][512:528]
    assert prompts[0][:16] != prompts[1][:16]
    with pytest.raises(ValueError, match="121 requests are needed, but only 120"):
        Recorded.from_rows(rows, 121, 4096)
    assert len(Recorded.from_rows(rows, 24, 720).rows) == 24  # These rows fit.
