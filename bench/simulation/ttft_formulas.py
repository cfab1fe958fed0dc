"""Simulated workers compared with DistServe's formulas for the TTFT (`policies.planning.queueing`).

Equal prompts arrive at random (Poisson) and have one output token. A worker takes one prompt at a
time, so it is an M/D/1 queue. The time D of a prompt on one device is the TTFT of an idle worker.

* Tensor parallelism has the profile of several GPUs. Its speed-up K is the ratio of idle TTFTs.
* The simulator has no pipeline parallelism. Two stages are two workers that take half of D each. A
  prompt arrives at the second worker when it leaves the first one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean
from typing import Any, Final, NamedTuple

from msgspec import structs

from draftgate.backends.sim.assembly import SimEnvironment
from draftgate.gateway.cli.plan.machines import CONFIG, OFF
from draftgate.gateway.cli.simulate.cluster import SimulatedCluster, simulate
from draftgate.gateway.cli.simulate.drawn import Drawn
from draftgate.loadgen.planning.traces import TraceRow
from draftgate.loadgen.types import Slo
from draftgate.policies.planning.queueing import mean_ttft_s

LOADS: Final = (0.2, 0.5)
"""Utilisation of the workers."""

PROMPT_TOKENS: Final = 512

IDLE_RPS: Final = 1e-3
"""Rate at which a prompt never waits."""


class PrefillWorkers(NamedTuple):
    """Workers that compute prompts.

    Attributes:
        profile: name or file of the profile of each worker.
        stages: number of workers through which each prompt passes. Together they take the time of
            the profile.
    """

    name: str
    profile: str
    stages: int = 1

    def ttft_s(self, rate_rps: float, requests: int, seed: int) -> list[tuple[float, float]]:
        """Simulate prompts, and return the arrival and the TTFT of each one, in seconds."""
        config = structs.replace(CONFIG, speculation=OFF, profile=self.profile, max_num_seqs=1)
        drawn = Drawn((TraceRow(0.0, PROMPT_TOKENS, 1),) * requests, seed)
        arrivals = planned = drawn.planned(rate_rps, Slo())
        for _ in range(self.stages):
            environment = SimEnvironment(seed, roofline=False, slowness=(1.0 / self.stages,))
            records = simulate(SimulatedCluster(config, 1, environment), planned, to_job=drawn.job)
            planned = [
                replace(one, at_s=record.end_s)
                for one, record in zip(planned, records, strict=True)
            ]
        return [
            (first.at_s or 0.0, (last.at_s or 0.0) - (first.at_s or 0.0))
            for first, last in zip(arrivals, planned, strict=True)
        ]

    def mean_ttft_s(self, rate_rps: float, requests: int, seed: int) -> float:
        """Return the mean TTFT of simulated prompts."""
        return fmean(ttft_s for _, ttft_s in self.ttft_s(rate_rps, requests, seed))

    def idle_ttft_s(self) -> float:
        """Return the TTFT of a prompt that never waits."""
        return self.mean_ttft_s(IDLE_RPS, 2, 0)


def prefill_workers(one_device: str, tensor_parallel: str) -> tuple[PrefillWorkers, ...]:
    """Return one device, two pipeline stages, and a tensor-parallel group.

    Args:
        one_device, tensor_parallel: profiles of the same model.
    """
    return (
        PrefillWorkers("one device", one_device),
        PrefillWorkers("two stages", one_device, stages=2),
        PrefillWorkers("tensor parallel", tensor_parallel),
    )


def compare(
    workers: PrefillWorkers, prompt_s: float, requests: int, seed: int
) -> Iterator[dict[str, Any]]:
    """Yield the mean TTFT in the simulator and by the formula at each load.

    Args:
        prompt_s: seconds of a prompt on one device.
    """
    idle_s = workers.idle_ttft_s()
    for load in LOADS:
        rate_rps = load * workers.stages / idle_s
        simulated_s = workers.mean_ttft_s(rate_rps, requests, seed)
        formula_s = mean_ttft_s(rate_rps, prompt_s, workers.stages, prompt_s / idle_s)
        yield {
            "workers": workers.name,
            "stages": workers.stages,
            "speed_up": prompt_s / idle_s,
            "load": load,
            "rate_rps": rate_rps,
            "simulated_s": simulated_s,
            "formula_s": formula_s,
            "error": formula_s / simulated_s - 1.0,
        }
