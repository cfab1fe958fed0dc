"""The requests of a plan, at any rate, from a trace or a workload."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Final, NamedTuple, Protocol

from draftgate.backends.token_ids import compact
from draftgate.gateway.dispatch.job import Job
from draftgate.lab.planning.histogram import PlannedLength
from draftgate.lab.simulate.conversion import job_of
from draftgate.loadgen.planning.arrivals import parse_arrival
from draftgate.loadgen.planning.plan import Load, make_plan
from draftgate.loadgen.planning.traces import TraceRow, at_rate, read_trace
from draftgate.loadgen.types import PlannedRequest, RequestSpec, Slo

SAMPLE: Final = 2000
"""Requests from which lengths are estimated. The mean of ShareGPT's outputs, with a coefficient of
variation of 0.9, is then within 4% (95% confidence)."""

_RECORDED: Final = "recorded"
"""The arrivals of a trace as recorded, scaled to the rate."""


class Requests(NamedTuple):
    """Planned requests in order, and the function that converts them to jobs."""

    planned: Iterable[PlannedRequest]
    to_job: Callable[[PlannedRequest], Job]

    def kept(self) -> Requests:
        """Return the requests in a form that several simulations can use."""
        return self._replace(planned=tuple(self.planned))

    def lengths(self) -> list[PlannedLength]:
        """Return the lengths of the requests."""
        return [
            PlannedLength(
                one.at_s or 0.0,
                len(self.to_job(one).prompts[0]),
                one.request.max_tokens,
                one.request.class_name,
            )
            for one in self.planned
        ]


class Source(Protocol):
    """Requests with targets, at any rate."""

    def requests(self, rate_rps: float, seed: int, count: int) -> Requests:
        """Return requests that arrive at a mean rate.

        Raises:
            ValueError: the source has too few requests.
        """
        ...


@dataclass(frozen=True, slots=True)
class TraceSource:
    """Requests with lengths from a trace in random order, and the same targets for all.

    Arrivals are Poisson.
    """

    rows: Sequence[TraceRow]
    slo: Slo

    def requests(self, rate_rps: float, seed: int, count: int) -> Requests:
        """See `Source`."""
        drawn = Drawn.from_rows(self.rows, count, seed)
        return Requests(drawn.planned(rate_rps, self.slo), drawn.job)


@dataclass(frozen=True, slots=True)
class RecordedSource:
    """The first requests of a trace in recorded order. A shorter trace is used whole.

    Attributes:
        arrival: an arrival process, or `_RECORDED`.
        class_name: class of the requests whose row names none.
        most_tokens: context of the model. Longer requests are left out.
    """

    rows: Sequence[TraceRow]
    slo: Slo
    arrival: str
    class_name: str
    most_tokens: int

    def requests(self, rate_rps: float, seed: int, count: int) -> Requests:
        """See `Source`."""
        most = self.most_tokens
        fitting = sum(row.prompt_tokens + row.output_tokens <= most for row in self.rows)
        if min(count, fitting) < 2:
            raise ValueError("the trace has fewer than two requests that fit the context")
        recorded = Recorded.from_rows(
            self.rows, min(count, fitting), self.most_tokens, self.class_name
        )
        if self.arrival != _RECORDED:
            times_s = parse_arrival(self.arrival)(rate_rps, seed)
            spread = zip(recorded.rows, times_s, strict=False)
            recorded = replace(
                recorded, rows=tuple(replace(row, at_s=at_s) for row, at_s in spread)
            )
        return Requests(recorded.planned(rate_rps, self.slo, seed), recorded.job)


@dataclass(frozen=True, slots=True)
class WorkloadSource:
    """Requests of a built-in workload.

    Attributes:
        load: the workload, whose rate, seed and number of requests are replaced.
        most_tokens: context of the model, if it limits the requests.
    """

    load: Load
    most_tokens: int | None = None

    def requests(self, rate_rps: float, seed: int, count: int) -> Requests:
        """See `Source`."""
        load = replace(self.load, rate_rps=rate_rps, seed=seed, requests=count)
        plan = make_plan(load, max_model_len=self.most_tokens, lazily=True)
        return Requests(plan.requests, job_of)


def source_of(workload: str | None, trace: Path | None, slo: Slo) -> Source:
    """Return the source that two options select, with Poisson arrivals.

    Raises:
        OSError: the trace cannot be read.
        ValueError: neither or both are given, or the trace is malformed.
    """
    _require_one(workload, trace)
    if trace is not None:
        return TraceSource(read_trace(trace), slo)
    return WorkloadSource(Load(workload=workload, slo=slo))


def source_with_arrivals(
    workload: str | None,
    trace: Path | None,
    slo: Slo,
    *,
    arrival: str | None,
    class_name: str | None,
    most_tokens: int,
) -> Source:
    """Return the source that options select, with the arrivals of an option.

    Args:
        arrival: arrival process, by default `_RECORDED` for a trace and `poisson` for a workload.
        class_name: class of the requests of a trace that names none.
        most_tokens: context of the model.

    Raises:
        OSError: the trace cannot be read.
        ValueError: neither or both sources are given, or the trace is malformed.
    """
    _require_one(workload, trace)
    if trace is not None:
        rows = read_trace(trace)
        return RecordedSource(rows, slo, arrival or _RECORDED, class_name or "trace", most_tokens)
    load = Load(workload=workload, rate_rps=1.0, arrival=arrival, slo=slo)
    return WorkloadSource(load, most_tokens)


def _require_one(workload: str | None, trace: Path | None) -> None:
    if (workload is None) == (trace is None):
        raise ValueError("give either --workload or --trace")


def lengths_of(source: Source) -> list[tuple[int, int]]:
    """Return the tokens of prompt and output of a sample of requests."""
    sample = source.requests(1.0, 0, SAMPLE).lengths()
    return [(one.prompt_tokens, one.output_tokens) for one in sample]


def classes_of(source: Source) -> frozenset[str]:
    """Return the classes of a sample of requests, which select their recorded drafts."""
    return frozenset(one.request.class_name for one in source.requests(1.0, 0, SAMPLE).planned)


# --- Requests of a trace, with arrivals scaled to a rate ------------------------------------------
#
# `Drawn` has lengths from a trace and Poisson arrivals, identical at every rate. Rows and unit gaps
# are drawn once per seed, and a rate only scales the gaps. All rates and policies therefore get the
# same requests in the same order (common random numbers). `Recorded` has the rows in recorded
# order, with their prefixes.


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
        instants = parse_arrival(arrival)(1.0, self.seed)
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
