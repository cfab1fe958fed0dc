"""Flags that several commands share, in groups: a command takes a group as one value."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_type_hints

import typer

from draftgate.loadgen.other_tools import DIALECTS
from draftgate.loadgen.planning.plan import CONCURRENCY, PROMPT, PROMPT_MAX_TOKENS, REQUESTS, Load
from draftgate.loadgen.sending.run import Target
from draftgate.loadgen.types import Slo
from draftgate.loadgen.workloads import WORKLOADS

R = TypeVar("R")

Url = Annotated[str, typer.Argument(help="The server, e.g. http://127.0.0.1:8000.", metavar="URL")]
JsonOut = Annotated[Path | None, typer.Option("--json", help="Write the figures here.")]
Processes = Annotated[
    int, typer.Option(min=1, help="How many processes send, if one does not keep up.")
]


def check_plotly(page: Path | None) -> Path | None:
    """Return the path of a page with plots.

    Raises:
        BadParameter: a page is wanted, but plotly is not installed.
    """
    if page is not None and find_spec("plotly") is None:
        raise typer.BadParameter("plotly is not installed: pip install 'draftgate[load]'")
    return page


HtmlOut = Annotated[
    Path | None,
    typer.Option("--html", callback=check_plotly, help="Write one page with plots here."),
]


def _known_dialect(name: str | None) -> str | None:
    if name is not None and name not in DIALECTS:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(DIALECTS)}")
    return name


As = Annotated[
    str | None,
    typer.Option(
        "--as",
        callback=_known_dialect,
        metavar="|".join(DIALECTS),
        help="Print the same run's figures as this tool defines them, too.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Where runs' figures go beside the terminal, and in whose words they are said."""

    panel: ClassVar[str] = "Results"

    json_out: JsonOut = None
    html_out: HtmlOut = None
    dialect: As = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """What to ask, and what is promised."""

    panel: ClassVar[str] = "Requests"

    workload: Annotated[str | None, typer.Option(help=f"What to ask: {', '.join(WORKLOADS)}.")] = (
        None
    )
    trace: Annotated[
        Path | None, typer.Option(help="Replay this trace (Azure, Mooncake, BurstGPT or JSONL).")
    ] = None
    prompt: Annotated[
        str | None, typer.Option(help=f"Ask only this (without the two above: {PROMPT!r}).")
    ] = None
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--completions", help="Endpoint; else as the workload asks."),
    ] = None
    slo_ttft_ms: Annotated[float | None, typer.Option(help="Promised time to first text.")] = None
    slo_tpot_ms: Annotated[float | None, typer.Option(help="Promised time per token.")] = None
    deadline_ms: Annotated[
        float | None,
        typer.Option(help="Promised time to the end of the answer; rag's hops share it."),
    ] = None
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help=f"Of an answer; else the workload's ({PROMPT_MAX_TOKENS})."),
    ] = None
    temperature: Annotated[float | None, typer.Option(min=0.0, help="Of all requests.")] = None
    speculation: Annotated[
        str | None, typer.Option(help="Requested MODE[:K], e.g. off, auto, ngram:4.")
    ] = None
    text_file: Annotated[
        Path | None, typer.Option(help="Text to ask about, instead of this Python's own.")
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals, workload and requests.")] = 0

    def load(self, **sent: Any) -> Load:
        """Return the load of these questions, sent like that (fields of `Load`).

        Raises:
            ValueError: flags contradict each other.
        """
        return Load(
            workload=self.workload,
            trace=self.trace,
            prompt=self.prompt,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            speculation=self.speculation,
            endpoint=None if self.chat is None else "chat" if self.chat else "completions",
            slo=Slo.of_ms(self.slo_ttft_ms, self.slo_tpot_ms, self.deadline_ms),
            seed=self.seed,
            text_file=self.text_file,
            **sent,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """How questions are sent: in an open loop, or in a closed one."""

    panel: ClassVar[str] = "Arrival"

    arrival: Annotated[
        str | None,
        typer.Option(
            help="constant, poisson, gamma:CV, onoff[:ON_S,OFF_S] or ramp:FIRST,LAST[,SECONDS]."
        ),
    ] = None
    rate: Annotated[
        float | None, typer.Option(help="Requests per second on a schedule: an open loop.")
    ] = None
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help=f"Clients of a closed loop ({CONCURRENCY} without --rate)."),
    ] = None
    duration: Annotated[float | None, typer.Option(help="Seconds to send for.")] = None
    requests: Annotated[
        int | None, typer.Option(min=1, help=f"How many to send ({REQUESTS} without --duration).")
    ] = None
    time_scale: Annotated[
        float | None, typer.Option(help="How many times faster than recorded to replay a trace.")
    ] = None
    processes: Processes = 1

    def load(self, questions: Questions) -> Load:
        """Return these questions, sent like that.

        Raises:
            ValueError: flags contradict each other.
        """
        return questions.load(
            arrival=self.arrival,
            rate_rps=self.rate,
            concurrency=self.concurrency,
            duration_s=self.duration,
            requests=self.requests,
            time_scale=self.time_scale,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Whom to ask there, and how long to wait."""

    panel: ClassVar[str] = "Server"

    model: Annotated[str, typer.Option(help="Default: the first the server lists.")] = ""
    api_key: Annotated[
        str, typer.Option(envvar="OPENAI_API_KEY", show_default=False, help="Bearer token.")
    ] = ""
    timeout_s: Annotated[float, typer.Option(help="Most seconds for one request.")] = 300.0

    def target(self, url: str, **more: Any) -> Target:
        """Return where to send, with more fields of `Target`."""
        return Target(url.rstrip("/"), self.model, self.api_key, self.timeout_s, **more)


def with_groups(command: Callable[..., R]) -> Callable[..., R]:
    """Spread each parameter of a command that is a group of flags (a dataclass) over its fields."""
    hints = get_type_hints(command, include_extras=True)
    parameters, groups = list[inspect.Parameter](), dict[str, type[Any]]()
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        if is_dataclass(hint) and isinstance(hint, type):
            groups[parameter.name] = hint
            parameters += _spread(hint)
        else:
            parameters.append(
                parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY)
            )

    @wraps(command)
    def call(**values: Any) -> R:
        for name, group in groups.items():
            values[name] = group(**{f.name: values.pop(f.name) for f in fields(group)})
        return command(**values)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    return call


def _spread(group: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=_under(group.panel, hints[field.name]),
        )
        for field in fields(group)
    ]


def _under(panel: str, hint: Any) -> Any:
    """Return an option listed under a heading of the help page; several commands may share it."""
    info = copy(hint.__metadata__[0])
    info.rich_help_panel = panel
    return Annotated[hint.__origin__, info]
