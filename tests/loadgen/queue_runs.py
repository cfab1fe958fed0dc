"""Runs of a simulated queue in virtual time, with seeded noise."""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from draftgate.loadgen.types import (
    ClientHealth,
    LoadRun,
    PlannedRequest,
    Record,
    RequestSpec,
    Slo,
    TextChunk,
)

HEALTHY = ClientHealth(max_lag_s=0.002, p99_lag_s=0.001, cpu_share=0.2, loop_stall_s=0.003)
PROMISED = Slo(ttft_s=2.0, tpot_s=0.06)
CHUNKS = 6
TOKENS = 2 * CHUNKS


def queue_run(
    requests: int = 300,
    load: float = 0.6,
    slower: float = 1.0,
    seed: int = 0,
    noise: int = 0,
    slo: Slo = PROMISED,
) -> LoadRun:
    """Return a run of a server that handles one request after another, for 1/2 s on average.

    Args:
        load: offered requests per second times 1/2 s, where 1 is saturation.
        slower: a factor for all service times.
        seed: the seed of arrivals and requests, which take between half and twice the mean.
        noise: the seed of the server's own variation, 20 % up or down per request.
    """
    load_rng, server_rng = np.random.default_rng((1, seed)), np.random.default_rng((2, seed, noise))
    instants = np.cumsum(load_rng.exponential(0.5 / load, requests))
    service_s = (
        0.25 * (1 + 2 * load_rng.random(requests)) * slower * server_rng.uniform(0.8, 1.2, requests)
    )
    ends = list(
        accumulate(
            zip(instants, service_s, strict=True),
            lambda end_s, one: max(end_s, one[0]) + one[1],
            initial=0.0,
        )
    )[1:]
    records = [
        _record(index, float(at_s), float(end_s), float(taken_s), slo)
        for index, (at_s, end_s, taken_s) in enumerate(zip(instants, ends, service_s, strict=True))
    ]
    length_s = float(instants[-1])
    rate = {"rate_rps": 2 * load, "seed": seed}
    return LoadRun(rate, records, float(max(ends)), length_s, health=HEALTHY)


def _record(index: int, at_s: float, end_s: float, taken_s: float, slo: Slo) -> Record:
    """Return a record whose text arrives evenly over the service until its end."""
    begin_s, gap_s = end_s - taken_s, taken_s / CHUNKS
    chunks = tuple(TextChunk(begin_s + gap_s * (k + 1), 2, 4) for k in range(CHUNKS))
    question = RequestSpec("x", (), TOKENS, index, "code", slo=slo)
    usage = {"prompt_tokens": 3, "completion_tokens": TOKENS, "total_tokens": 3 + TOKENS}
    return Record(
        PlannedRequest(index, at_s, question), at_s, at_s, end_s, "ok", chunks=chunks, usage=usage
    )
