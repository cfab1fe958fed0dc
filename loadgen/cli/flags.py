"""Groups of flags that several commands share. A command takes a group as one value."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from draftgate.addresses import read_server_url
from draftgate.loadgen.command_line import flag_values, output_file
from draftgate.loadgen.measuring.slo import SHARES
from draftgate.loadgen.other_tools import OtherTool
from draftgate.loadgen.planning.plan import CONCURRENCY, PROMPT, PROMPT_MAX_TOKENS, REQUESTS, Load
from draftgate.loadgen.sending.target import Target
from draftgate.loadgen.types import Slo
from draftgate.loadgen.workloads import WORKLOADS
from draftgate.loadgen.workloads.rag_flow import Agent, Deadlines, RagOptions

Url = Annotated[str, typer.Argument(help="The server, e.g. http://127.0.0.1:8000.", metavar="URL")]
JsonOut = Annotated[
    Path | None, typer.Option("--json", help="Write the results here.", callback=output_file)
]
HtmlOut = Annotated[
    Path | None,
    typer.Option("--html", help="Write a page with plots here.", callback=output_file),
]
Processes = Annotated[
    int,
    typer.Option(min=1, help="Send with this many processes.", rich_help_panel="Schedule"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFlags:
    """Where to write the results of runs."""

    panel: ClassVar = "Results"

    json_out: JsonOut = None
    html_out: HtmlOut = None
    tool: Annotated[
        OtherTool | None,
        typer.Option(
            "--as",
            metavar="|".join(OtherTool),
            help="Also print the results by the definitions of this tool.",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFlags:
    """Which requests to send, and their SLO. Most fields are fields of `Load`."""

    panel: ClassVar = "Requests"

    workload: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help=f"One of {', '.join(WORKLOADS)}, or a file of requests (JSON lines).",
        ),
    ] = None
    trace: Annotated[
        Path | None, typer.Option(help="Replay this trace (Azure, Mooncake, BurstGPT or JSONL).")
    ] = None
    prompt: Annotated[
        str | None, typer.Option(help=f"Send one prompt. Default without a workload: {PROMPT!r}.")
    ] = None
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--completions", help="Endpoint. Default: the workload's."),
    ] = None
    slo_ttft_ms: Annotated[float | None, typer.Option(help="TTFT limit in milliseconds.")] = None
    slo_tpot_ms: Annotated[float | None, typer.Option(help="TPOT limit in milliseconds.")] = None
    slo_gap_ms: Annotated[
        float | None, typer.Option(help="Limit of each gap between chunks, in milliseconds.")
    ] = None
    deadline_ms: Annotated[
        float | None,
        typer.Option(help="Limit of the whole response, in milliseconds."),
    ] = None
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Limit per response. Default: the workload's ({PROMPT_MAX_TOKENS} for --prompt).",
        ),
    ] = None
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Temperature of all requests.")
    ] = None
    speculation: Annotated[
        str | None, typer.Option(help="Mode to request: MODE[:K], e.g. off, auto, ngram:4.")
    ] = None
    text_file: Annotated[
        Path | None, typer.Option(help="Write prompts from this text instead of Python's library.")
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of arrivals, workload and requests.")] = 0
    rag_agent: Annotated[
        Agent,
        typer.Option(
            metavar="|".join(Agent),
            help="Plan all searches of `rag` at once, or one after another.",
        ),
    ] = Agent.PLANNED
    rag_deadlines: Annotated[
        Deadlines,
        typer.Option(
            metavar="|".join(Deadlines),
            help="Announce deadlines of `rag` by flow, by request (split), or not.",
        ),
    ] = Deadlines.FLOW
    embedding_model: Annotated[
        str, typer.Option(help="Model that embeds the passages of `rag`. Default: --model.")
    ] = ""
    query_embedding_model: Annotated[
        str, typer.Option(help="Model that embeds the queries. Default: --embedding-model.")
    ] = ""

    def load(self, **sent: Any) -> Load:
        """Return the load of these requests, with further fields of `Load`.

        Raises:
            ValueError: two flags contradict each other.
        """
        values = flag_values(self)
        chat = values.pop("chat")
        limits = ("slo_ttft_ms", "slo_tpot_ms", "deadline_ms", "slo_gap_ms")
        slo = Slo.of_ms(*(values.pop(name) for name in limits))
        values["rag"] = RagOptions(
            values.pop("rag_agent"),
            values.pop("rag_deadlines"),
            values.pop("embedding_model"),
            values.pop("query_embedding_model"),
        )
        values["endpoint"] = None if chat is None else "chat" if chat else "completions"
        return Load(**values, slo=slo, **sent)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFlags:
    """When to send requests, in an open or a closed loop. The fields are fields of `Load`."""

    panel: ClassVar = "Schedule"

    rate_rps: Annotated[
        float | None, typer.Option("--rate", help="Requests per second in an open loop.")
    ] = None
    arrival: Annotated[
        str | None,
        typer.Option(
            help="constant, poisson, gamma:CV, onoff[:ON_S,OFF_S] or ramp:FIRST,LAST[,SECONDS]."
        ),
    ] = None
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help=f"Clients of a closed loop ({CONCURRENCY} without --rate)."),
    ] = None
    duration_s: Annotated[float | None, typer.Option("--duration", help="Seconds to send.")] = None
    requests: Annotated[
        int | None, typer.Option(min=1, help=f"Number of requests ({REQUESTS} without --duration).")
    ] = None
    time_scale: Annotated[
        float | None, typer.Option(help="Replay a trace this many times faster than recorded.")
    ] = None

    def load(self, request: RequestFlags) -> Load:
        """Return the load of these requests on this schedule.

        Raises:
            ValueError: two flags contradict each other.
        """
        return request.load(**flag_values(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFlags:
    """How to reach the server. The fields are fields of `Target`."""

    panel: ClassVar = "Server"

    model: Annotated[
        str, typer.Option(help="Model id. Default: the first that the server lists.")
    ] = ""
    api_key: Annotated[
        str, typer.Option(envvar="OPENAI_API_KEY", show_default=False, help="Bearer token.")
    ] = ""
    timeout_s: Annotated[float, typer.Option(help="Time limit of one request, in seconds.")] = 300.0

    def target(self, url: str, **more: Any) -> Target:
        """Return the target at a URL, with further fields of `Target`.

        Raises:
            ValueError: the text is not the address of a server.
        """
        return Target(read_server_url(url), **flag_values(self), **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchFlags:
    """The goal of a search. The fields are fields of `SearchGoal`."""

    panel: ClassVar = "Search"

    share: Annotated[
        float,
        typer.Option(help=f"Share of requests to meet their SLO: {', '.join(map(str, SHARES))}."),
    ] = 0.95
    precision: Annotated[
        float, typer.Option(help="Half-width of the 95 % interval over the rate at the end.")
    ] = 0.05
    max_rate_rps: Annotated[float, typer.Option("--max-rate", help="Try no higher rate.")] = inf
    most_requests: Annotated[
        int,
        typer.Option("--max-requests", min=1, help="Limit of requests for all probes together."),
    ] = 100_000

    def goal(self) -> dict[str, Any]:
        """Return the fields of `SearchGoal`."""
        return flag_values(self)
