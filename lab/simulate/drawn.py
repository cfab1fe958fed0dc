"""Requests with lengths from a trace and Poisson arrivals, identical at every rate.

Rows and unit gaps are drawn once per seed, and a rate only scales the gaps. All rates and policies
therefore get the same requests in the same order (common random numbers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from random import Random

from draftgate.backends.token_ids import compact
from draftgate.gateway.dispatch.job import Job
from draftgate.lab.simulate.conversion import job_of
from draftgate.loadgen.planning.arrivals import parse_arrival
from draftgate.loadgen.planning.traces import TraceRow
from draftgate.loadgen.types import PlannedRequest, RequestSpec, Slo

INDEX_BYTES = 4
"""Number of leading ids that make each prompt unique, so that no prompt hits the prefix cache."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Requests without a rate.

    Attributes:
        rows: lengths of the requests, in order.
        seed: seed of arrivals and texts.
    """

    rows: tuple[TraceRow, ...]
    seed: int

    @classmethod
    def of(cls, rows: Sequence[TraceRow], requests: int, seed: int) -> Drawn:
        """Draw rows in random order, which repeat only if the trace is too short.

        Raises:
            ValueError: the trace has no rows.
        """
        if not rows:
            raise ValueError("the trace has no requests")
        random, drawn = Random(seed), list[TraceRow]()
        while len(drawn) < requests:
            drawn += random.sample(rows, min(len(rows), requests - len(drawn)))
        return cls(tuple(drawn), seed)

    def planned(self, rate_rps: float, slo: Slo, arrival: str = "poisson") -> list[PlannedRequest]:
        """Return the requests at a mean rate in requests per second, with a service level.

        Args:
            arrival: the arrival process, in the form of `--arrival`.
        """
        instants = parse_arrival(arrival).arrival_times(1.0, self.seed)
        return [
            PlannedRequest(
                index,
                unit / rate_rps,
                RequestSpec("", (), max(row.output_tokens, 1), self.seed + index, "trace", slo=slo),
            )
            for index, (row, unit) in enumerate(
                zip(self.rows, islice(instants, len(self.rows)), strict=True)
            )
        ]

    def job(self, planned: PlannedRequest) -> Job:
        """Return the job of a planned request, with a prompt of its row's length."""
        tokens = max(self.rows[planned.index].prompt_tokens, INDEX_BYTES)
        ids = planned.index.to_bytes(INDEX_BYTES, "big") + bytes(tokens - INDEX_BYTES)
        return replace(job_of(planned), prompts=(compact(ids),))
