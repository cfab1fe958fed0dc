"""Requests of a trace in recorded order, with their prefixes and with arrivals scaled to a rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from draftgate.backends.token_ids import compact
from draftgate.gateway.dispatch.job import Job
from draftgate.lab.simulate.conversion import job_of
from draftgate.loadgen.planning.traces import TraceRow, at_rate
from draftgate.loadgen.types import PlannedRequest, RequestSpec, Slo

NAME_BYTES = 4
"""Number of bytes of a block's name. Each byte is a token id of the block."""


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
    def of(
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

    def cut(self, first: int, requests: int) -> Recorded:
        """Return a range of rows, with arrivals relative to the first row."""
        rows = self.rows[first : first + requests]
        return replace(self, rows=tuple(replace(row, at_s=row.at_s - rows[0].at_s) for row in rows))

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
