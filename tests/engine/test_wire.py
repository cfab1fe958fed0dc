"""The wire between a gateway and an engine's own process: what is sent is what arrives."""

from __future__ import annotations

import socket

import pytest

from backends.engine.wire import Channel, Command, Report, Stepped, Submit
from backends.types import (
    Delta,
    FinishReason,
    GenerationRequest,
    GrammarKind,
    GrammarSpec,
    ResumedChoice,
    SamplingParams,
    SpeculationOutcome,
    Task,
)
from policies.types import ServiceLevel, SpeculationMode, SpeculationPlan, WorkerLoad

PLAN = SpeculationPlan("auto", SpeculationMode.AUTO, "ngram", 4, "because", 0.1)
REQUESTS = [
    GenerationRequest("a", (1, 2), SamplingParams(5, (1 << 64) - 1), PLAN),
    GenerationRequest(
        "b",
        (3,),
        SamplingParams(5, 0, 0.8, logit_bias=((7, -1.5),), stop=("x",)),
        PLAN,
        n=2,
        tenant="t",
        grammar=GrammarSpec(GrammarKind.REGEX, "a+"),
        resumed=(ResumedChoice(1, (8, 9)),),
        service=ServiceLevel(1.5, 0.0125, -(1 << 31)),
    ),
    GenerationRequest("c", (1, 2), SamplingParams(0, 0), PLAN, task=Task.EMBED),
]
OUTCOME = SpeculationOutcome(3, 9, 4, (1, 1, 0, 1))
REPORT = Stepped(
    [
        ("a", Delta(0, (5, 6), "text", (), FinishReason.STOP, OUTCOME, 16)),
        ("c", Delta(0, (), "", finish_reason=FinishReason.STOP, embedding=b"\x00\x80\xff")),
    ],
    WorkerLoad(1, 2, 3, 4, 0.25, 0.7, ("ngram", "draft_model"), 0.05),
)


@pytest.mark.parametrize("request_", REQUESTS, ids=["plain", "with everything", "to embed"])
def test_a_request_arrives_whole(request_: GenerationRequest) -> None:
    """Service level, tenant, grammar and resumed tokens travel as everything else does."""
    here, there = socket.socketpair()
    with here, there:
        Channel[Report](here, Report).send(Submit(request_))
        assert next(iter(Channel[Command](there, Command))) == Submit(request_)


def test_a_steps_report_arrives_whole() -> None:
    """Outcomes, from which the gateway learns, and all of the load."""
    here, there = socket.socketpair()
    with here, there:
        Channel[Command](here, Command).send(REPORT)
        assert next(iter(Channel[Report](there, Report))) == REPORT
