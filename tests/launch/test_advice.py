"""Tests that the launcher reads the advice of real gateways."""

from __future__ import annotations

from draftgate.gateway.launch.advice import STALE_S, GatewayAdvice
from draftgate.gateway.telemetry import metric_definitions as metric
from draftgate.policies.scaling import ScalingAdvice, ScalingReason
from tests.gateway.harness import FixedAdvisor, running

KEY = "metrics-key"


class Clock:
    """A clock that the test sets, in seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def test_the_largest_advice_of_the_pool_counts() -> None:
    """The launcher follows the gateway that advises most workers for its own pool. A gateway that
    no longer responds is reported once, and its last advice counts for `STALE_S`."""
    clock, lines = Clock(), list[str]()
    async with running(pool="p", api_keys=("k",), metrics_keys=(KEY,)) as one:
        async with running(pool="p", api_keys=("k",), metrics_keys=(KEY,)) as other:
            for gateway, workers in ((one, 2), (other, 5)):
                fixed = FixedAdvisor(ScalingAdvice(workers, ScalingReason.PRICE, 1.0))
                gateway.node.models[0].scaling._advisor = fixed
                gateway.node.take_sample()
            other.node.metrics.set(metric.DESIRED_WORKERS, 9, "another pool")
            advice = GatewayAdvice([one.url, other.url], "p", KEY, lines.append, clock)
            assert await advice.read() == 5
        for clock.now_s in (1.0, STALE_S - 1.0):
            assert await advice.read() == 5
        clock.now_s = STALE_S
        assert await advice.read() == 2
    (line,) = lines
    assert line.startswith(f"cannot read the scaling advice of {other.url}")


async def test_a_gateway_that_rejects_the_key_gives_no_advice() -> None:
    """Without a key for its metrics, a gateway gives no advice, and the reason is printed."""
    lines = list[str]()
    async with running(api_keys=("k",)) as gateway:
        advice = GatewayAdvice([gateway.url], "default", None, lines.append)
        assert await advice.read() is None
        assert await advice.read() is None
    (line,) = lines
    assert "401" in line
