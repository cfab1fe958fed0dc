"""`draftgate plan mix`, the cheapest mix of machines for a workload."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from draftgate.gateway.cli.options import BAD_USAGE, fail
from draftgate.lab.plan.options import PlanFiles, Profiles, Share, WorkloadFlags, limits
from draftgate.lab.plan.solver import require_solver, silent_solver
from draftgate.lab.planning.mix import BucketRates, MachineType, cheapest_mix

if TYPE_CHECKING:
    from draftgate.lab.plan.load_question import LoadQuestion

Matrix = tuple[tuple[float, ...], ...]
"""A number for each range of input lengths (row) and output lengths (column)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixFlags(WorkloadFlags):
    """The flags of a plan of a mix, with its own defaults."""

    profiles: Profiles = "l4-8b,a10g-8b,a100-8b,h100-8b,h200-8b"
    share: Share = 0.95


def mix(
    flags: MixFlags,
    tputs: Annotated[
        Path | None,
        typer.Option(
            help="JSON file with the throughput and price of each GPU, and the workload.",
            metavar="FILE",
        ),
    ] = None,
    arrival: Annotated[
        str | None,
        typer.Option(help="Arrivals: recorded (default of a trace), poisson, gamma:CV, ..."),
    ] = None,
    class_name: Annotated[
        str | None,
        typer.Option("--class", help="Class of a trace's requests, which selects their drafts."),
    ] = None,
    requests: Annotated[
        int, typer.Option(min=2, help="Number of requests to plan for and to simulate.")
    ] = 2000,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            help="Number of machines that can be rented. Repeatable.", metavar="NAME=NUMBER"
        ),
    ] = None,
    *,
    files: PlanFiles,
) -> None:
    """Find the cheapest mix of GPUs that serves a workload within its latency targets.

    The workload is a trace or a built-in workload at a rate, whose mix is also simulated, or a file
    of given throughputs in the format of Mélange. If no mix is feasible, the plan names the lengths
    of the requests that cannot be served.
    """
    from draftgate.loadgen.interruption import interruptible

    require_solver()
    with interruptible() as interruption:
        try:
            most = limits(limit or [])
            if tputs is not None:
                files.write(_given(tputs, most), None)
                return
            question = _question(flags, most, arrival, class_name, requests)
            interrupted = _answer(question, files)
        except (OSError, ValueError) as error:
            fail(error, BAD_USAGE)
        except KeyboardInterrupt:
            fail("interrupted before there was a mix", interruption.status)
    if interrupted:
        raise typer.Exit(interruption.status)


def _question(
    flags: MixFlags,
    most: Mapping[str, int],
    arrival: str | None,
    class_name: str | None,
    requests: int,
) -> LoadQuestion:
    """Return the question that the flags ask.

    Raises:
        OSError: the trace cannot be read.
        ValueError: a flag is missing or wrong.
    """
    from draftgate.lab.plan.load_question import LoadQuestion
    from draftgate.lab.plan.machines import CONFIG, Rentable, with_engine
    from draftgate.lab.plan.sources import source_with_arrivals
    from draftgate.loadgen.types import Slo

    rate = flags.rate
    if rate is None:
        raise ValueError("give --rate, or --tputs")
    if not rate > 0.0:
        raise ValueError(f"--rate must be positive, not {rate}")
    slo = Slo.of_ms(flags.slo_ttft_ms, flags.slo_tpot_ms)
    source = source_with_arrivals(
        flags.workload,
        flags.trace,
        slo,
        arrival=arrival,
        class_name=class_name,
        most_tokens=CONFIG.max_model_len or 0,
    )
    types = with_engine(flags.profiles.split(","), flags.engine)
    return LoadQuestion(
        source.requests(rate, 0, requests).kept(),
        rate,
        slo,
        flags.share,
        {name: Rentable.load(name, flags.proposer) for name in types},
        {with_engine([name], flags.engine)[0]: number for name, number in most.items()},
        flags.speculation,
        flags.proposer,
    )


def _answer(question: LoadQuestion, files: PlanFiles) -> bool:
    """Print and write the plan, and return whether the search was interrupted.

    Raises:
        OSError: a file cannot be written.
        KeyboardInterrupt: the search was interrupted before it had a mix.
    """
    from draftgate.lab.plan.mix_report import answer_of, attempt_line, mix_page, print_plan
    from draftgate.loadgen.report.progress import StepProgress

    with StepProgress("predicting throughputs", "requests") as progress:
        question = replace(
            question,
            report=lambda attempt: progress.print(attempt_line(attempt)),
            progress=progress.report,
        )
        found, records = question.answer()
    head = {key: found[key] for key in ("format", "question")}
    plan = {**head, "answer": answer_of(found, question.targets), **found}
    print_plan(plan)
    files.write(plan, lambda: mix_page(plan, question.planner, records))
    return bool(plan["interrupted"])


def _given(file: Path, limits: Mapping[str, int]) -> dict[str, Any]:
    """Plan for given throughputs, and print the plan.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file or a limit is wrong.
    """
    from draftgate.lab.plan.mix_report import print_counts, served_by

    given = msgspec.json.decode(file.read_bytes(), type=Throughputs)
    with silent_solver():
        found = cheapest_mix(given.workload(), given.types(limits))
    buckets = [list(given.buckets[one]) for one in found.infeasible_buckets]
    names = ", ".join(map(str, buckets))
    answer = f"No mix within the limits serves the buckets {names} (row and column, from 0)."
    if found.feasible:
        answer = f"{served_by(found, given.total_request_rate)}."
    typer.echo(answer)
    if found.feasible:
        print_counts(found.counts, {name: gpu.cost for name, gpu in given.gpu_info.items()}, {})
    return {
        "format": "plan/1",
        "question": "mix",
        "answer": answer,
        "feasible": found.feasible,
        "cost_per_hour": found.cost_per_hour if found.feasible else None,
        "counts": dict(found.counts),
        "machines": [],
        "infeasible_buckets": buckets,
        "simulated": None,
    }


class GivenGpu(msgspec.Struct, frozen=True):
    """A type of machine in the file of throughputs.

    Attributes:
        cost: price of an hour.
        tputs: requests per second by bucket, 0 for a bucket that the machine cannot serve.
    """

    cost: float
    tputs: Matrix


class Throughputs(msgspec.Struct, frozen=True):
    """A file of throughputs, in the format of Mélange.

    Attributes:
        workload_distribution: share of each bucket. The shares need not add up to 1.
        total_request_rate: requests per second of all buckets.
        slice_factor: number of parts of a bucket that different types may serve.
    """

    gpu_info: dict[str, GivenGpu]
    workload_distribution: Matrix
    total_request_rate: float
    slice_factor: float = 1

    @property
    def buckets(self) -> list[tuple[int, int]]:
        """Row and column of each bucket."""
        rows = enumerate(self.workload_distribution)
        return [(row, column) for row, shares in rows for column in range(len(shares))]

    def workload(self) -> BucketRates:
        """Return the rates of all buckets.

        Raises:
            ValueError: the shares do not have a positive sum, or `slice_factor` is a fraction.
        """
        if self.slice_factor % 1:
            raise ValueError(f"slice_factor must be a whole number, not {self.slice_factor}")
        shares = _flat(self.workload_distribution)
        total = math.fsum(shares)
        if not total > 0.0:
            raise ValueError("workload_distribution must have a positive sum")
        rates = tuple(self.total_request_rate * share / total for share in shares)
        return BucketRates(rates, int(self.slice_factor))

    def types(self, limits: Mapping[str, int]) -> dict[str, MachineType]:
        """Return the types of machines.

        Args:
            limits: number of available machines, by type.

        Raises:
            ValueError: a matrix has another shape than the distribution, or a limit is for an
                unknown type.
        """
        if unknown := limits.keys() - self.gpu_info.keys():
            raise ValueError(f"--limit {min(unknown)}: the file has no such GPU")
        widths = _widths(self.workload_distribution)
        for name, gpu in self.gpu_info.items():
            if _widths(gpu.tputs) != widths:
                raise ValueError(f"tputs of {name} and workload_distribution differ in shape")
        return {
            name: MachineType(gpu.cost, _flat(gpu.tputs), limits.get(name))
            for name, gpu in self.gpu_info.items()
        }


def _flat(matrix: Matrix) -> tuple[float, ...]:
    return tuple(number for row in matrix for number in row)


def _widths(matrix: Matrix) -> list[int]:
    return [len(row) for row in matrix]
