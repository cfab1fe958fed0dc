"""Requests of a trace, with arrivals scaled to a rate.

`Drawn` has lengths from a trace and Poisson arrivals, identical at every rate. Rows and unit gaps
are drawn once per seed, and a rate only scales the gaps. All rates and policies therefore get the
same requests in the same order (common random numbers). `Recorded` has the rows in recorded order,
with their prefixes.
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
from draftgate.loadgen.planning.traces import TraceRow, at_rate
from draftgate.loadgen.types import PlannedRequest, RequestSpec, Slo

INDEX_BYTES = 4
"""Number of leading ids that make each prompt unique, so that no prompt hits the prefix cache."""

NAME_BYTES = 4
"""Number of bytes of a block's name. Each byte is a token id of the block."""


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
    def from_rows(cls, rows: Sequence[TraceRow], requests: int, seed: int) -> Drawn:
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


@dataclass(frozen=True, slots=True)
class Recorded:
    """The first rows of a trace that fit a model's context.

    Attributes:
        rows: rows in order of arrival.
        class_name: class of the requests whose row names none, which selects recorded drafts.
    """

    rows: tuple[TraceRow, ...]
    class_name: str = "trace"

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[TraceRow],
        requests: int,
        most_tokens: int,
        class_name: str = "trace",
    ) -> Recorded:
        """Return the first `requests` rows whose prompt and output fit.

        Raises:
            ValueError: the trace has fewer rows that fit.
        """
        fitting = [row for row in rows if row.prompt_tokens + row.output_tokens <= most_tokens]
        if len(fitting) < requests:
            raise ValueError(
                f"{requests} requests are needed, but only {len(fitting)} of the trace fit"
            )
        return cls(tuple(fitting[:requests]), class_name)

    def planned(self, rate_rps: float, slo: Slo, seed: int) -> list[PlannedRequest]:
        """Return the requests at a mean rate.

        Args:
            seed: seed of the text of the first request.
        """
        return [
            PlannedRequest(
                index,
                row.at_s,
                RequestSpec("", (), max(row.output_tokens, 1), seed + index, name, slo=slo),
            )
            for index, row in enumerate(at_rate(self.rows, rate_rps))
            for name in [row.class_name or self.class_name]
        ]

    def job(self, planned: PlannedRequest) -> Job:
        """Return the job of a planned request. Prompts share prefixes as in the trace."""
        return replace(job_of(planned), prompts=(compact(self._prompt(planned.index)),))

    def _prompt(self, index: int) -> bytes:
        """Return the token ids of the blocks that the trace names, followed by unique token ids."""
        row = self.rows[index]
        tokens = max(row.prompt_tokens, NAME_BYTES)
        times = -(-row.block_tokens // NAME_BYTES)
        blocks = [
            (name.to_bytes(NAME_BYTES, "big") * times)[: row.block_tokens]
            for name in row.prefix_ids
        ]
        shared = b"".join(blocks)[:tokens]
        # These ids are beyond the ids of blocks, so unique text never equals a block.
        own = (index + (1 << 31)).to_bytes(NAME_BYTES, "big")
        return shared + (own * (-(-tokens // NAME_BYTES)))[: tokens - len(shared)]
