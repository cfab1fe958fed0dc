"""Tests of the split of a deadline over the requests of a flow."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from draftgate.loadgen.types import Slo
from draftgate.loadgen.workloads.rag_flow import (
    LEAST_S,
    PROMPT_TOKENS_PER_OUTPUT,
    WAITING,
    RequestWork,
    split_deadline,
)


@pytest.mark.parametrize("seed", range(50))
def test_a_hop_announces_its_share_of_the_deadline(seed: int) -> None:
    """TTFT + (n - 1) TPOT is the hop's share of the remaining time, by its share of the work."""
    rng = Random(seed)
    work, *later = (RequestWork(rng.randrange(1, 4000), rng.randrange(2, 600)) for _ in range(3))
    deadline_s, elapsed_s = rng.uniform(5, 20), rng.uniform(0, 4)
    slo = split_deadline(Slo(latency_s=deadline_s), elapsed_s, work, later)
    units = [
        WAITING + w.prompt_tokens / PROMPT_TOKENS_PER_OUTPUT + w.output_tokens
        for w in (work, *later)
    ]
    budget_s = (deadline_s - elapsed_s) * units[0] / sum(units)
    assert slo.ttft_s + (work.output_tokens - 1) * slo.tpot_s == pytest.approx(budget_s)
    assert slo.latency_s is None


def test_hops_that_take_their_announced_time_end_at_the_deadline() -> None:
    """The flow ends at the deadline if each hop takes its announced time."""
    works, at_s, paces = [RequestWork(60, 32), RequestWork(40), RequestWork(1400, 129)], 0.0, []
    for place, work in enumerate(works):
        slo = split_deadline(Slo(latency_s=10.0), at_s, work, works[place + 1 :])
        at_s += slo.ttft_s + (work.output_tokens - 1) * (slo.tpot_s or 0.0)
        paces += [] if slo.tpot_s is None else [slo.tpot_s]
    assert at_s == pytest.approx(10.0)
    assert paces == pytest.approx([paces[0]] * 2)


def test_saved_time_goes_to_later_hops() -> None:
    """A hop announces more time if the client sends the hop earlier."""
    work, promise = RequestWork(100, 50), Slo(latency_s=10.0)
    limits = [split_deadline(promise, s, work).tpot_s for s in (1.0, 2.0, 9.0)]
    assert limits == sorted(limits, reverse=True)


@pytest.mark.parametrize("elapsed_s", [9.9999, 10.0, 50.0])
def test_a_late_hop_announces_the_minimum(elapsed_s: float) -> None:
    """The announced limits stay positive after the deadline."""
    slo = split_deadline(Slo(latency_s=10.0), elapsed_s, RequestWork(20, 9), ())
    units = WAITING + 1 + 9
    assert slo.tpot_s == pytest.approx(LEAST_S / units)
    assert slo.ttft_s == pytest.approx((WAITING + 2) * LEAST_S / units)


def test_embeddings_announce_only_a_ttft() -> None:
    """Embeddings announce their whole share as a TTFT."""
    slo = split_deadline(Slo(latency_s=3.0), 0.0, RequestWork(40), [RequestWork(40)])
    assert slo == Slo(ttft_s=pytest.approx(1.5))


def test_the_last_hop_keeps_the_users_limits() -> None:
    """Only the last hop keeps the user's own TTFT and TPOT where they are tighter."""
    work, promise = RequestWork(20, 9), Slo(ttft_s=1.5, tpot_s=0.01, latency_s=10.0)
    assert split_deadline(promise, 1.0, work) == Slo(pytest.approx(0.5), 0.01)
    assert split_deadline(promise, 9.9, work).tpot_s < 0.01
    units = WAITING + 1 + 9
    assert split_deadline(promise, 1.0, work, [work]).tpot_s == pytest.approx(9 / (2 * units))
    plain = replace(promise, latency_s=None)
    assert split_deadline(plain, 1.0, work) == Slo(pytest.approx(0.5), 0.01)
    assert split_deadline(plain, 1.0, work, [work]) == split_deadline(Slo(), 1.0, work) == Slo()
