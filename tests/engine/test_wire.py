"""The wire between a gateway and an engine's own process: what is sent is what arrives."""

from __future__ import annotations

import socket

import pytest

from draftgate.backends.engine.wire import Channel, Command, Ready, Report, SetPace, Stepped, Submit
from draftgate.backends.token_ids import compact
from draftgate.backends.types import (
    Capabilities,
    Delta,
    FinishReason,
    GenerationRequest,
    GrammarKind,
    GrammarSpec,
    ModelCard,
    Pace,
    Phases,
    ResumedChoice,
    SamplingParams,
    SpeculationOutcome,
    StepTrace,
    Task,
)
from draftgate.policies.types import (
    ServiceLevel,
    SpeculationMode,
    SpeculationPlan,
    WorkerLoad,
    WorkerSpeed,
)

PLAN = SpeculationPlan("auto", SpeculationMode.AUTO, "ngram", 4, "because", 0.1)
REQUESTS = [
    GenerationRequest("a", compact([1, 2]), SamplingParams(5, (1 << 64) - 1), PLAN),
    GenerationRequest(
        "b",
        compact([3]),
        SamplingParams(5, 0, 0.8, logit_bias=((7, -1.5),), stop=("x",)),
        PLAN,
        n=2,
        tenant="t",
        grammar=GrammarSpec(GrammarKind.REGEX, "a+"),
        resumed=(ResumedChoice(1, (8, 9)),),
        service=ServiceLevel(1.5, 0.0125, -(1 << 31)),
        traced=True,
    ),
    GenerationRequest("c", compact([1, 2]), SamplingParams(0, 0), PLAN, task=Task.EMBED),
]
OUTCOME = SpeculationOutcome(3, 9, 4, (1, 1, 0, 1))
STEP = StepTrace(2, "ngram", 3, (5, 9), 1, (0.75, 0.5), 0.125)
PHASES = Phases(1.0, 2.0, ((3.0, 16), (4.0, 5)), 4.0)
REPORT = Stepped(
    [
        ("a", Delta(0, (5, 6), "text", (), FinishReason.STOP, OUTCOME, 16, (STEP,), PHASES)),
        ("c", Delta(0, (), "", finish_reason=FinishReason.STOP, embedding=b"\x00\x80\xff")),
    ],
    WorkerLoad(
        *(1, 2, 3, 4, 0.25, 0.7, ("ngram", "draft_model"), 0.05),
        *(64, 900, 512, 16, WorkerSpeed(0.02, 1e-4, 3e-4), 5),
    ),
)
READY = Ready(ModelCard("m", "r", 512, "c", 1, Capabilities(exact=True), 640, (0,)))


@pytest.mark.parametrize("request_", REQUESTS, ids=["plain", "with everything", "to embed"])
def test_a_request_arrives_whole(request_: GenerationRequest) -> None:
    """Service level, tenant, grammar and resumed tokens travel as everything else does."""
    here, there = socket.socketpair()
    with here, there:
        Channel[Report](here, Report).send(Submit(request_))
        assert next(iter(Channel[Command](there, Command))) == Submit(request_)


@pytest.mark.parametrize("pace", Pace)
def test_a_pace_arrives_as_one(pace: Pace) -> None:
    """Not as a number: workers compare by identity."""
    here, there = socket.socketpair()
    with here, there:
        Channel[Report](here, Report).send(SetPace("a", pace))
        assert next(iter(Channel[Command](there, Command))).pace is pace


@pytest.mark.parametrize("report", [REPORT, READY], ids=["step", "ready"])
def test_a_report_arrives_whole(report: Report) -> None:
    """Outcomes, from which the gateway learns, traces, all of the load, and what can be done."""
    here, there = socket.socketpair()
    with here, there:
        Channel[Command](here, Command).send(report)
        assert next(iter(Channel[Report](there, Report))) == report
