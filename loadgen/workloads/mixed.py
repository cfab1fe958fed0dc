"""Workload `mixed`: classes of different urgency and tenants of different size at one server."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from draftgate.loadgen.types import RequestSpec, Slo
from draftgate.loadgen.workloads.base import Shares, Workload, WorkloadSettings
from draftgate.loadgen.workloads.chat import Chat
from draftgate.loadgen.workloads.code import Code
from draftgate.loadgen.workloads.long_document import LongDocument

CLASSES: Final = {"interactive": 0.5, "standard": 0.3, "batch": 0.2}
TENANTS: Final = {"tenant-a": 0.6, "tenant-b": 0.3, "tenant-c": 0.1}
"""Shares of the requests. A session keeps its tenant."""

INTERACTIVE: Final = Slo(ttft_s=0.5, tpot_s=0.03)
STANDARD_TTFT: Final = 2.0 / 0.5
STANDARD_TPOT: Final = 0.1 / 0.03
"""MLPerf Inference's limits for Llama 3.1 8B: interactive 500/30 ms, server 2000/100 ms."""


class Mixed:
    """Three classes: interactive code completion, standard chat, and batch long documents.

    The class and the tenant of each request are drawn independently. The given SLO (default:
    MLPerf's) applies to the interactive class. The standard class has a multiple of this SLO, as in
    MLPerf, and the batch class has no SLO.
    """

    name = "mixed"

    def __init__(self, settings: WorkloadSettings) -> None:
        slo = INTERACTIVE if settings.slo == Slo() else settings.slo
        self._settings = settings
        self._parts: dict[str, Workload] = {
            "interactive": Code(replace(settings, slo=slo)),
            "standard": Chat(replace(settings, slo=_standard(slo))),
            "batch": LongDocument(replace(settings, slo=Slo())),
        }
        self._names, self._shares = tuple(CLASSES), Shares(tuple(CLASSES.values()))
        self._tenants, self._tenant_shares = tuple(TENANTS), Shares(tuple(TENANTS.values()))
        self._rng = settings.rng(self.name, "classes")
        self._drawn: list[tuple[str, int]] = []
        self._counts = dict.fromkeys(CLASSES, 0)

    def request(self, index: int) -> RequestSpec:
        class_name, index_in_class = self._draw(index)
        request = self._parts[class_name].request(index_in_class)
        rng = self._settings.rng(self.name, "tenant", request.session or index)
        return replace(
            request,
            seed=self._settings.seed + index,
            class_name=class_name,
            tenant=self._tenants[self._tenant_shares.draw(rng)],
        )

    def _draw(self, index: int) -> tuple[str, int]:
        """Return the class of a request and its index within that class."""
        while len(self._drawn) <= index:
            name = self._names[self._shares.draw(self._rng)]
            self._drawn.append((name, self._counts[name]))
            self._counts[name] += 1
        return self._drawn[index]


def _standard(interactive: Slo) -> Slo:
    ttft_s, tpot_s = interactive.ttft_s, interactive.tpot_s
    return Slo(
        None if ttft_s is None else ttft_s * STANDARD_TTFT,
        None if tpot_s is None else tpot_s * STANDARD_TPOT,
    )
