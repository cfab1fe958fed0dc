"""Settings and requests of workloads for tests."""

from __future__ import annotations

from pathlib import Path

from draftgate.loadgen.planning.corpus import open_corpus
from draftgate.loadgen.types import RequestSpec, Slo
from draftgate.loadgen.workloads import make_workload
from draftgate.loadgen.workloads.base import TokenEstimator, WorkloadSettings

COUNTER = TokenEstimator(4.0)
SLO = Slo(ttft_s=0.25, tpot_s=0.06)
LEAST_P = 1e-3
"""Least p-value of a test of a distribution. Seeds are fixed, so the tests are deterministic."""


class WordCounter:
    """An exact counter that counts words."""

    def count(self, text: str) -> int:
        return len(text.split())


def make_requests(name: str, count: int, **settings) -> list[RequestSpec]:
    """Return the first requests of a workload with seed 7."""
    workload = make_workload(name, settings_of(7, **settings))
    return [workload.request(index) for index in range(count)]


def settings_of(seed: int, text_file: Path | None = None, **settings) -> WorkloadSettings:
    """Return settings with an estimator of four characters per token."""
    settings = {"counter": COUNTER} | settings
    return WorkloadSettings(seed, corpus=open_corpus(text_file), **settings)
