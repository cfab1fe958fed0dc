"""The options that several questions of `draftgate plan` share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from draftgate.loadgen.command_line import output_file, output_folder

Profiles = Annotated[
    str, typer.Option(help="Device profiles: names or files, separated by commas.")
]
Share = Annotated[
    float,
    typer.Option(min=0.0, max=1.0, help="Share of the requests that must meet both targets."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadFlags:
    """The workload, its targets and the machines of a plan."""

    panel: ClassVar = "Options"

    profiles: Profiles
    workload: Annotated[
        str | None,
        typer.Option(help="Workload: code, chat, long_document, shared_prefix, mixed, rag."),
    ] = None
    trace: Annotated[
        Path | None, typer.Option(help="Recorded requests (Azure, Mooncake, BurstGPT or JSONL).")
    ] = None
    rate: Annotated[float | None, typer.Option(help="Requests per second.")] = None
    slo_ttft_ms: Annotated[float | None, typer.Option(help="Target: time to first token.")] = None
    slo_tpot_ms: Annotated[float | None, typer.Option(help="Target: time per output token.")] = None
    share: Share = 0.9
    speculation: Annotated[str, typer.Option(help="Whether machines speculate: auto or off.")] = (
        "auto"
    )
    proposer: Annotated[str, typer.Option(help="Proposer: ngram or draft_model.")] = "ngram"
    engine: Annotated[
        str | None,
        typer.Option(
            help="Engine whose host costs the machines have: draftgate, vllm or vllm-2024 (default:"
            " those of the profiles)."
        ),
    ] = None

    @property
    def load(self) -> str:
        """The name of the workload or the trace."""
        return self.workload or (self.trace.name if self.trace is not None else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentFlags(WorkloadFlags):
    """The flags of a plan of deployments."""

    link_gbps: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Bandwidth of the link between two machines, in Gbit/s (default: 20).",
        ),
    ] = None
    precision: Annotated[
        float, typer.Option(min=0.01, max=0.5, help="Relative half width of the intervals.")
    ] = 0.05
    max_simulations: Annotated[int, typer.Option(min=1, help="Most deployments to simulate.")] = 50
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random choices.")] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFiles:
    """The files to write."""

    panel: ClassVar = "Options"

    json_out: Annotated[
        Path | None,
        typer.Option("--json", help="Write the plan to this file.", callback=output_file),
    ] = None
    html_out: Annotated[
        Path | None,
        typer.Option("--html", help="Write a page with plots to this file.", callback=output_file),
    ] = None
    compose: Annotated[
        Path | None,
        typer.Option(help="Write the machines as a Compose file.", callback=output_file),
    ] = None
    kubernetes: Annotated[
        Path | None,
        typer.Option(
            help="Write the machines as Kubernetes manifests to this folder.",
            callback=output_folder,
        ),
    ] = None

    def write(self, plan: Mapping[str, Any], page: Callable[[], str] | None) -> None:
        """Write a plan to the files, if there are any.

        Args:
            page: returns the page with plots. None writes no page.

        Raises:
            OSError: a file cannot be written.
            ValueError: the plan has no machines, a machine is a group of several GPUs, or different
                GPUs divide the phases.
        """
        from draftgate.lab.plan.deployment import Deployable, compose_text
        from draftgate.lab.plan.kubernetes import write_kubernetes

        if self.json_out is not None:
            self.json_out.write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")
        if self.html_out is not None and page is not None:
            self.html_out.write_text(page(), encoding="utf-8")
        if self.compose is None and self.kubernetes is None:
            return
        planned = Deployable.from_plan(plan)
        if self.compose is not None:
            self.compose.write_text(compose_text(planned), encoding="utf-8")
        if self.kubernetes is not None:
            write_kubernetes(planned, self.kubernetes)


def limits(texts: Sequence[str]) -> dict[str, int]:
    """Return the limits of `--limit NAME=NUMBER`.

    Raises:
        ValueError: a text has another form.
    """
    found = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        if not name or not number.isdecimal():
            raise ValueError(f"--limit {text}: expected NAME=NUMBER")
        found[name] = int(number)
    return found
