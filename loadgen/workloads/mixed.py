"""mixed: classes of different urgency and tenants of different size, at one server."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from draftgate.loadgen.types import RequestSpec, Slo
from draftgate.loadgen.workloads.base import Shares, Workload, WorkloadSettings
from draftgate.loadgen.workloads.chat import Chat
from draftgate.loadgen.workloads.code import Code
from draftgate.loadgen.workloads.documents import LongDocument

CLASSES: Final = {"interactive": 0.5, "standard": 0.3, "batch": 0.2}
TENANTS: Final = {"tenant-a": 0.6, "tenant-b": 0.3, "tenant-c": 0.1}
"""Shares of the requests. A session keeps its tenant."""

INTERACTIVE: Final = Slo(ttft_s=0.5, tpot_s=0.03)
STANDARD_TTFT: Final = 2.0 / 0.5
STANDARD_TPOT: Final = 0.1 / 0.03
"""MLPerf Inference's limits for Llama 3.1 8B: interactive 500/30 ms, server 2000/100 ms."""


class Mixed:
    """interactive: code completion; standard: chat; batch: long documents, promised nothing.

    Class and tenant of each request are drawn independently. The SLO asked for is the interactive
    one (MLPerf's if none is), and the standard one as many times that as MLPerf's.
    """

    name = "mixed"

    def __init__(self, setting: WorkloadSettings) -> None:
        slo = INTERACTIVE if setting.slo == Slo() else setting.slo
        self._seed = setting.seed
        self._setting = setting
        self._parts: dict[str, Workload] = {
            "interactive": Code(replace(setting, slo=slo)),
            "standard": Chat(replace(setting, slo=_standard(slo))),
            "batch": LongDocument(replace(setting, slo=Slo())),
        }
        self._names = tuple(CLASSES)
        self._shares = Shares(tuple(CLASSES.values()))
        self._tenants, self._tenant_shares = tuple(TENANTS), Shares(tuple(TENANTS.values()))
        self._classes = setting.rng(self.name, "classes")
        self._places: list[tuple[str, int]] = []
        self._drawn = dict.fromkeys(CLASSES, 0)

    def request(self, index: int) -> RequestSpec:
        class_name, place = self._place(index)
        question = self._parts[class_name].request(place)
        rng = self._setting.rng(self.name, "tenant", question.session or index)
        return replace(
            question,
            seed=self._seed + index,
            class_name=class_name,
            tenant=self._tenants[self._tenant_shares.draw(rng)],
        )

    def _place(self, index: int) -> tuple[str, int]:
        """Return a question's class, and how many of that class come before it."""
        while len(self._places) <= index:
            name = self._names[self._shares.draw(self._classes)]
            self._places.append((name, self._drawn[name]))
            self._drawn[name] += 1
        return self._places[index]


def _standard(interactive: Slo) -> Slo:
    ttft_s, tpot_s = interactive.ttft_s, interactive.tpot_s
    return Slo(
        None if ttft_s is None else ttft_s * STANDARD_TTFT,
        None if tpot_s is None else tpot_s * STANDARD_TPOT,
    )
