"""Tests of plans: from the flags of a command to the requests of a run."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from draftgate.loadgen.planning.arrivals import parse_arrival
from draftgate.loadgen.planning.plan import (
    PROMPT,
    PROMPT_MAX_TOKENS,
    REQUESTS,
    Load,
    Plan,
    PlanPart,
    make_plan,
)
from draftgate.loadgen.planning.traces import read_trace
from draftgate.loadgen.sending.driver import timed_requests
from draftgate.loadgen.types import Slo

ROWS = [
    {"at_s": 5.0, "prompt_tokens": 40, "output_tokens": 7},
    {"at_s": 6.0, "prompt_tokens": 80, "output_tokens": 8},
    {"at_s": 9.0, "prompt_tokens": 20, "output_tokens": 9},
]


@pytest.fixture
def trace(tmp_path) -> Path:
    """Return a trace of three requests within four seconds."""
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_without_a_rate_the_loop_is_closed() -> None:
    """Several clients send a single prompt with consecutive seeds by default."""
    plan = make_plan(Load(requests=3, concurrency=2, seed=5))
    assert (plan.concurrency, plan.schedule_s, plan.total) == (2, None, 3)
    planned = list(plan.requests)
    assert [(p.index, p.at_s) for p in planned] == [(0, None), (1, None), (2, None)]
    assert [p.request.seed for p in planned] == [5, 6, 7]
    question = planned[0].request
    assert (question.prompt, question.max_tokens) == (PROMPT, PROMPT_MAX_TOKENS)
    plain = make_plan(Load())
    assert (plain.concurrency, len(list(plain.requests))) == (4, REQUESTS)


def test_a_duration_ends_a_closed_loop() -> None:
    """A closed loop with a duration has an endless plan and stops when time is up."""
    plan = make_plan(Load(duration_s=60.0))
    assert plan.total is None
    assert len(list(islice(plan.requests, 1000))) == 1000
    short = Plan(range(5), concurrency=1, schedule_s=None, total=None)
    assert len(list(timed_requests(short, Load(duration_s=60.0)))) == 5
    assert list(timed_requests(short, Load(duration_s=1e-12))) == []
    both = make_plan(Load(duration_s=60.0, requests=3))
    assert both.total == 3


@pytest.mark.parametrize(
    "load",
    [
        Load(workload="chat", rate_rps=50.0, requests=40),
        Load(workload="mixed", concurrency=5, requests=23),
        Load(concurrency=3, requests=2),
    ],
)
@pytest.mark.parametrize("of", [1, 2, 3])
def test_parts_together_are_the_whole_plan(load: Load, of: int) -> None:
    """Any number of parts together have the requests of the plan, each in order."""
    whole = make_plan(load)
    parts = [make_plan(load, part=PlanPart(index, of)) for index in range(of)]
    part_requests = [list(part.requests) for part in parts]
    assert sorted((p for part in part_requests for p in part), key=lambda p: p.index) == list(
        whole.requests
    )
    assert all(part == sorted(part, key=lambda p: p.index) for part in part_requests)
    assert {(part.schedule_s, part.total) for part in parts} == {(whole.schedule_s, whole.total)}
    if whole.concurrency is not None:
        assert sum(part.concurrency for part in parts) == whole.concurrency
    else:
        assert max(map(len, part_requests)) - min(map(len, part_requests)) <= 1


def test_a_part_of_an_endless_plan_has_no_end() -> None:
    """The parts of an endless closed loop are endless and disjoint."""
    parts = [make_plan(Load(duration_s=60.0), part=PlanPart(index, 2)) for index in (0, 1)]
    even, odd = ({p.index for p in islice(part.requests, 700)} for part in parts)
    assert even | odd == set(range(1400))


def test_a_rate_opens_the_loop() -> None:
    """The times follow from the arrival process with the load's seed, by default Poisson."""
    plan = make_plan(Load(rate_rps=10.0, requests=20, seed=3))
    instants = list(islice(parse_arrival("poisson")(10.0, 3), 21))
    assert [p.at_s for p in plan.requests] == instants[:20]
    assert (plan.concurrency, plan.schedule_s, plan.total) == (None, instants[20], 20)
    even = make_plan(Load(rate_rps=10.0, requests=20, arrival="constant"))
    assert 20 / even.schedule_s == pytest.approx(10.0, rel=0.06)


def test_a_duration_is_the_schedule() -> None:
    """The plan has every arrival before the duration, which is the schedule's length."""
    plan = make_plan(Load(rate_rps=50.0, duration_s=2.0))
    instants = list(islice(parse_arrival("poisson")(50.0, 0), plan.total + 1))
    assert [p.at_s for p in plan.requests] == instants[:-1]
    assert instants[-2] < 2.0 <= instants[-1]
    assert plan.schedule_s == 2.0
    first = make_plan(Load(rate_rps=50.0, duration_s=2.0, requests=5))
    assert first.total == 5


def test_a_trace_is_replayed(trace: Path) -> None:
    """A plan replays a trace at its own times, faster, at a mean rate, or by clients."""
    rows = read_trace(trace)

    def instants(**flags):
        return [p.at_s for p in make_plan(Load(trace=trace, **flags), rows=rows).requests]

    assert instants() == [0.0, 1.0, 4.0]
    assert instants(time_scale=2.0) == [0.0, 0.5, 2.0]
    assert instants(duration_s=3.0) == [0.0, 1.0]
    assert instants(requests=1) == [0.0]
    faster = instants(rate_rps=30.0)
    assert faster[2] / faster[1] == pytest.approx(4.0)
    assert faster[2] < 0.2
    assert instants(concurrency=2) == [None] * 3
    plan = make_plan(Load(trace=trace), rows=rows)
    assert plan.schedule_s == 4.0
    assert [p.request.max_tokens for p in plan.requests] == [7, 8, 9]
    with pytest.raises(ValueError, match="no requests"):
        make_plan(Load(trace=trace))


def test_flags_reach_the_requests() -> None:
    """Temperature, speculation, endpoint, limits and SLO apply to every request."""
    slo = Slo(0.5, 0.02)
    load = Load(
        workload="code",
        requests=2,
        temperature=0.0,
        speculation="ngram:4",
        endpoint="chat",
        max_tokens=9,
        slo=slo,
    )
    for planned in make_plan(load).requests:
        body = planned.request.body("m")
        assert (body["temperature"], body["max_tokens"]) == (0.0, 9)
        assert body["speculation"] == {"mode": "ngram", "max_draft_tokens": 4}
        assert body["messages"][0]["role"] == "user"
        assert planned.request.slo == slo
    (planned,) = make_plan(Load(requests=1, speculation="off")).requests
    assert planned.request.body("m")["speculation"] == {"mode": "off"}
    (planned,) = make_plan(Load(requests=1)).requests
    assert not {"speculation", "temperature"} & set(planned.request.body("m"))


def test_a_plan_can_be_rebuilt() -> None:
    """The same load gives the same requests, and another seed gives others."""
    load = Load(workload="mixed", rate_rps=5.0, requests=12)
    plans = [list(make_plan(one).requests) for one in (load, load)]
    assert plans[0] == plans[1]
    other = Load(workload="mixed", rate_rps=5.0, requests=12, seed=1)
    assert list(make_plan(other).requests) != plans[0]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (
            {"workload": "code", "prompt": "x"},
            "only one of .*: --prompt, --workload",
        ),
        ({"concurrency": 2, "rate_rps": 1.0}, "closed loop.* excludes --rate"),
        ({"concurrency": 2, "arrival": "poisson"}, "excludes --arrival"),
        ({"arrival": "poisson"}, "--arrival requires --rate"),
        ({"arrival": "poisson", "trace": Path("t")}, "--arrival requires --rate"),
        ({"time_scale": 2.0}, "--time-scale requires --trace"),
        ({"time_scale": 2.0, "trace": Path("t"), "rate_rps": 1.0}, "time-scale"),
        ({"rate_rps": 0.0}, "rate must be positive"),
        ({"rate_rps": float("inf")}, "rate must be positive"),
        ({"duration_s": -1.0}, "duration must be positive"),
        ({"rate_rps": 1.0, "arrival": "sometimes"}, "sometimes"),
        ({"speculation": "ngram:many"}, "MODE or MODE:K"),
        ({"speculation": ":4"}, "MODE or MODE:K"),
    ],
)
def test_contradictions_are_refused(flags: dict, complaint: str) -> None:
    """The load rejects contradicting flags before any request is sent."""
    with pytest.raises(ValueError, match=complaint):
        Load(**flags)


def test_an_unknown_workload_is_refused() -> None:
    """The error for an unknown workload lists the known workloads."""
    with pytest.raises(ValueError, match="long_document"):
        make_plan(Load(workload="poetry"))


def test_a_lazy_plan_is_the_same_plan() -> None:
    """A lazy plan has the same requests and schedule as a plan built in advance."""
    load = Load(prompt="hi", rate_rps=5.0, requests=7, seed=3)
    eager, lazy = make_plan(load), make_plan(load, lazily=True)
    assert list(lazy.requests) == list(eager.requests)
    assert not list(lazy.requests)  # An iterator can be taken once.
    assert (lazy.total, lazy.schedule_s) == (eager.total, eager.schedule_s)
