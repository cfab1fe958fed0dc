"""The options that several questions of `draftgate plan` share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from draftgate.loadgen.command_line import check_plotly

WorkloadName = Annotated[
    str | None,
    typer.Option(
        "--workload", help="Workload: code, chat, long_document, shared_prefix, mixed, rag."
    ),
]
TraceFile = Annotated[
    Path | None,
    typer.Option("--trace", help="Recorded requests (Azure, Mooncake, BurstGPT or JSONL)."),
]
Rate = Annotated[float | None, typer.Option("--rate", help="Requests per second.")]
SloTtftMs = Annotated[
    float | None, typer.Option("--slo-ttft-ms", help="Target: time to first token.")
]
SloTpotMs = Annotated[
    float | None, typer.Option("--slo-tpot-ms", help="Target: time per output token.")
]
Share = Annotated[
    float,
    typer.Option(
        "--share",
        min=0.0,
        max=1.0,
        help="Share of the requests that must meet both targets.",
    ),
]
Profiles = Annotated[
    str,
    typer.Option("--profiles", help="Device profiles: names or files, separated by commas."),
]
Speculation = Annotated[
    str, typer.Option("--speculation", help="Whether machines speculate: auto or off.")
]
Proposer = Annotated[str, typer.Option("--proposer", help="Proposer: ngram or draft_model.")]
Precision = Annotated[
    float,
    typer.Option("--precision", min=0.01, max=0.5, help="Relative half width of the intervals."),
]
MaxSimulations = Annotated[
    int, typer.Option("--max-simulations", min=1, help="Most deployments to simulate.")
]
LinkGbps = Annotated[
    float | None,
    typer.Option(
        "--link-gbps",
        min=0.001,
        help="Bandwidth of the link between two machines, in Gbit/s (default: 20).",
    ),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of all random choices.")]
Limits = Annotated[
    list[str] | None,
    typer.Option(
        "--limit", help="Number of machines that can be rented. Repeatable.", metavar="NAME=NUMBER"
    ),
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the plan to this file.")]


HtmlFile = Annotated[
    Path | None,
    typer.Option("--html", callback=check_plotly, help="Write a page with plots to this file."),
]
ComposeFile = Annotated[
    Path | None,
    typer.Option("--compose", help="Write the machines as a Compose file."),
]
KubernetesFolder = Annotated[
    Path | None,
    typer.Option("--kubernetes", help="Write the machines as Kubernetes manifests to this folder."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentFlags:
    """The workload, its targets and the machines of a plan of deployments."""

    panel: ClassVar = "Options"

    profiles: Profiles
    workload: WorkloadName = None
    trace: TraceFile = None
    rate: Rate = None
    slo_ttft_ms: SloTtftMs = None
    slo_tpot_ms: SloTpotMs = None
    share: Share = 0.9
    speculation: Speculation = "auto"
    proposer: Proposer = "ngram"
    link_gbps: LinkGbps = None
    precision: Precision = 0.05
    max_simulations: MaxSimulations = 50
    seed: Seed = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFiles:
    """The files to write."""

    panel: ClassVar = "Options"

    json_out: JsonFile = None
    html_out: HtmlFile = None
    compose: ComposeFile = None
    kubernetes: KubernetesFolder = None

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
