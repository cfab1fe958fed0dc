"""The scaling advice of a node: its inputs, and where it appears."""

from __future__ import annotations

import json
import logging

import pytest

from draftgate.gateway.telemetry.live import Activity, node_sample
from draftgate.policies.scaling import (
    WITH_MOVES,
    WITHOUT_MOVES,
    ScalingAdvice,
    ScalingReason,
    ScalingRules,
)
from draftgate.policies.types import WorkerLoad
from tests.gateway.harness import FixedAdvisor, client, running

LOAD = WorkerLoad(3, 2, 6, 8, 0.2, 0.5, ("ngram",))


async def test_the_advice_appears_in_metrics_samples_and_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The metric has the advised number with the name of the pool, samples of `/live` also have the
    reason, and each change is logged once."""
    async with running(pool="blue") as gateway, client(gateway) as http:
        node = gateway.node
        logging.getLogger("draftgate").propagate = True
        node.models[0].scaling._advisor = FixedAdvisor(ScalingAdvice(4, ScalingReason.QUEUE, 3.2))
        with caplog.at_level(logging.INFO, "draftgate"):
            node.take_sample()
            node.take_sample()
        page = (await http.get("/metrics")).text
        _, samples = await node.live.after(0)
    (line,) = (line for line in page.splitlines() if line.startswith("draftgate_desired_workers{"))
    assert 'pool="blue"' in line
    assert line.endswith(" 4.0")
    sample = json.loads(samples[-1])
    assert (sample["desired_workers"], sample["scaling_reason"]) == (4, "queue")
    logged = [one for one in caplog.records if "number of workers" in one.message]
    assert len(logged) == 1


async def test_drained_workers_and_queued_requests_are_part_of_the_demand() -> None:
    """The policy sees the load of a drained worker apart from those that stay."""
    async with running(devices=(0, 1, 2)) as gateway:
        node = gateway.node
        advisor = FixedAdvisor(ScalingAdvice(1, ScalingReason.START, 0.0))
        node.models[0].scaling._advisor = advisor
        node.fleet.workers[1].drained = True
        node.take_sample()
    assert (len(advisor.view.loads), len(advisor.view.leaving)) == (2, 1)
    assert advisor.view.queued == 0


@pytest.mark.parametrize(
    ("rescheduling", "rules"), [("off", WITHOUT_MOVES), ("llumnix", WITH_MOVES)]
)
async def test_pool_that_moves_streams_is_advised_by_its_own_rules(
    rescheduling: str, rules: ScalingRules
) -> None:
    """The advice uses what moves make possible, but only with a rescheduling policy."""
    async with running(rescheduling=rescheduling) as gateway:
        assert gateway.node.models[0].scaling._advisor._rules is rules


def test_a_sample_shows_the_largest_advice_of_all_processes() -> None:
    """The processes of a node may advise different numbers, of which the largest counts."""
    one, other = Activity(desired_workers=2), Activity(desired_workers=3, scaling_reason="slo")
    sample = node_sample(7.0, [LOAD], [one, other])
    assert (sample.desired_workers, sample.scaling_reason) == (3, "slo")
