"""The `draftgate` command.

Each command imports its dependencies when it runs, so that `--help` starts quickly.
"""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final

import typer

import draftgate
from draftgate.backends.model_store.known_models import CHAT_MODEL
from draftgate.extensions import extensions
from draftgate.gateway.accounts import Period
from draftgate.gateway.cli.options import (
    BAD_USAGE,
    ModelSettingsCommand,
    SettingsCommand,
    config_as_json,
    config_as_text,
    config_from,
    fail,
)
from draftgate.gateway.cli.ray import app as ray_app
from draftgate.gateway.process import defer_collections
from draftgate.loadgen.command_line import HelpGroup, PlainTyper

COMMAND_GROUP: Final = "draftgate.commands"


class CommandGroup(HelpGroup):
    """The commands of this module, and those that entry points in `draftgate.commands` add.

    An entry point is a `typer.Typer`. The group imports them when it lists its commands or lacks
    the named one, so a server imports none.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        self._add_installed()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, name: str) -> Any:
        if name not in self.commands:
            self._add_installed()
        return super().get_command(ctx, name)

    def _add_installed(self) -> None:
        for name, entry in extensions(COMMAND_GROUP).items():
            if name not in self.commands:
                self.commands[name] = typer.main.get_command(entry.load())


app = PlainTyper(
    "A gateway for LLM inference that decides, per request, whether and how far to speculate.",
    name="draftgate",
    cls=CommandGroup,
    add_completion=True,
)

PASS_THROUGH: Final = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
}
"""Context settings of commands that pass their arguments to a parser of their own."""


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"draftgate {draftgate.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Accept the options in front of a command."""


@app.command(cls=SettingsCommand)
def serve(context: typer.Context) -> None:
    """Serve a model over the OpenAI HTTP API.

    You can also set each option with the variable DRAFTGATE_NAME, or with the key NAME of a YAML
    file. `draftgate config show` prints the effective values.
    """
    defer_collections()
    config = config_from(context).config
    from draftgate.gateway.cli.models import prepare_models

    config = prepare_models(config)
    from draftgate.gateway.cli.server import run_server

    run_server(config)


Name = Annotated[
    str,
    typer.Argument(help=f"{CHAT_MODEL}, or ORGANISATION/MODEL on the hub.", metavar="NAME"),
]


@app.command()
def pull(name: Name) -> None:
    """Download a model into the cache of this machine."""
    from draftgate.gateway.cli.models import run_pull

    run_pull(name)


@app.command("list")
def list_models() -> None:
    """List the models of this machine, with their sizes and paths."""
    from draftgate.gateway.cli.models import run_list

    run_list()


@app.command("rm")
def remove_model(name: Name) -> None:
    """Delete a model from the cache of this machine."""
    from draftgate.gateway.cli.models import run_rm

    run_rm(name)


MaxTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Maximum tokens of an answer (default: what the context holds)."),
]
Temperature = Annotated[
    float | None, typer.Option(min=0.0, help="Sampling temperature. 0 is greedy.")
]
Seed = Annotated[
    int | None, typer.Option(min=0, max=(1 << 64) - 1, help="Sampling seed (default: random).")
]
System = Annotated[str | None, typer.Option(help="Text of a system message.")]
Url = Annotated[
    str | None,
    typer.Option("--url", help="Use the server at this address, in place of an own engine."),
]
ApiKey = Annotated[
    str, typer.Option(envvar="OPENAI_API_KEY", show_default=False, help="The server's API key.")
]


@app.command(cls=ModelSettingsCommand)
def chat(
    context: typer.Context,
    *,
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    url: Url = None,
    api_key: ApiKey = "",
) -> None:
    """Chat with a model in the terminal.

    Without MODEL, this is the chat model that `draftgate pull` downloads. If stdin is a pipe, each
    line of it is a message.
    """
    if url is None:
        defer_collections()
    from draftgate.gateway.cli.models import chat_place

    place = chat_place(context, url, api_key)
    from draftgate.gateway.cli.chat import Sampling, run_chat

    run_chat(place, system, Sampling(max_tokens, temperature, seed))


@app.command(cls=ModelSettingsCommand)
def run(  # noqa: PLR0913 - each is a flag
    context: typer.Context,
    prompt: Annotated[
        str, typer.Argument(help="A message, or - to read it from stdin.", metavar="PROMPT")
    ],
    *,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text, without the chat template.")
    ] = False,
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    url: Url = None,
    api_key: ApiKey = "",
) -> None:
    """Print the answer of a model to one message.

    A model without a chat template continues the text, by 128 tokens without --max-tokens. The
    answer is written to stdout, and a summary of speculation to stderr.
    """
    if url is None:
        defer_collections()
    from draftgate.gateway.cli.models import chat_place

    place = chat_place(context, url, api_key)
    from draftgate.gateway.cli.chat import Sampling, run_prompt

    run_prompt(place, prompt, system, Sampling(max_tokens, temperature, seed), raw=raw)


@app.command(context_settings=PASS_THROUGH, add_help_option=False)
def load(context: typer.Context) -> None:
    """Send load to a server, and check and measure every stream."""
    from draftgate.loadgen.cli import app as loadgen

    loadgen(context.args, prog_name="draftgate load")


BENCHES: Final = {
    "engine": "bench.engine.command",
    "kernels": "bench.engine.kernels",
    "cpu": "bench.cpu.command",
    "edge": "bench.edge.command",
    "fleet": "bench.fleet.command",
    "moves": "bench.gateway.moves",
    "full-memory": "bench.gateway.full_memory",
    "batch": "bench.gateway.batch",
    "phases": "bench.gateway.phases",
    "store": "bench.gateway.store",
}
"""Benchmarks that measure this machine."""

STUDIES: Final = {
    "policies": "bench.simulation.policies",
    "priors": "bench.simulation.priors",
    "llumnix": "bench.simulation.llumnix",
    "distserve": "bench.simulation.distserve",
    "melange": "bench.simulation.melange",
    "splitwise": "bench.simulation.splitwise",
}
"""Studies in the simulator."""


class BenchGroup(HelpGroup):
    """The benchmarks of the checkout, each with the first line of its module as help."""

    def list_commands(self, _ctx: Any) -> list[str]:
        return [*BENCHES, *STUDIES]

    def heading(self, name: str) -> str:
        return "Measurements" if name in BENCHES else "Studies in the simulator"

    def get_command(self, _ctx: Any, name: str) -> Any:
        # The package has no benchmarks. They are in the checkout, beside the folder draftgate/.
        checkout = Path(draftgate.__file__).resolve().parent.parent
        if not (checkout / "bench").is_dir():
            fail("benchmarks need a source checkout, not a package", BAD_USAGE)
        modules = BENCHES | STUDIES
        if name not in modules:
            fail(f"unknown benchmark {name!r}; known: {', '.join(modules)}", BAD_USAGE)
        if str(checkout) not in sys.path:
            sys.path.insert(0, str(checkout))

        def run(context: typer.Context) -> None:
            # Line buffering shows progress immediately, even in a file or a pipe.
            for stream in (sys.stdout, sys.stderr):
                stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
            import_module(modules[name]).main(context.args)

        holder = PlainTyper("")
        holder.command(name, add_help_option=False, context_settings=PASS_THROUGH)(run)
        command = typer.main.get_command(holder)
        command.help = _first_line(modules[name])
        return command


def _first_line(module: str) -> str:
    """Return the first line of a module's docstring without importing the module."""
    found = find_spec(module)
    assert found is not None
    assert found.origin is not None
    text = ast.get_docstring(ast.parse(Path(found.origin).read_text(encoding="utf-8")))
    return (text or "").partition("\n")[0]


app.add_typer(
    PlainTyper("Run a benchmark. `bench NAME --help` lists its options.", cls=BenchGroup),
    name="bench",
)


@app.command()
def explain(
    source: Annotated[
        str,
        typer.Argument(
            help="The address of a server, or a file that --decisions-file wrote.", metavar="SOURCE"
        ),
    ],
    policy: Annotated[
        str | None, typer.Option(help="Show what this policy would have decided.")
    ] = None,
    request: Annotated[
        str | None, typer.Option(help="Show only the decisions about the response with this id.")
    ] = None,
    api_key: ApiKey = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> None:
    """Show recorded speculation decisions, and what another policy would have decided."""
    from draftgate.gateway.cli.explain import run_explain

    run_explain(source, policy, request, api_key, as_json=as_json)


@app.command()
def usage(
    server: Annotated[
        str, typer.Argument(help="The address of a server.", metavar="SERVER")
    ] = "http://127.0.0.1:8000",
    api_key: ApiKey = "",
    by: Annotated[
        Period | None,
        typer.Option(
            help="Print the usage of each key and model by day or by month.",
            metavar="|".join(Period),
        ),
    ] = None,
    last: Annotated[int, typer.Option(help="Number of days or months.", min=1)] = 1,
) -> None:
    """Print what keys and teams have spent in the present period, as CSV."""
    from draftgate.gateway.cli.usage import run_usage

    run_usage(server, api_key, by, last)


@app.command("collect-env")
def collect_env(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Describe this machine and the installed packages, for bug reports."""
    from draftgate.gateway.cli.environment import as_text, collect_environment

    found = collect_environment()
    if as_json:
        import json

        typer.echo(json.dumps(found, indent=2))
    else:
        typer.echo(as_text(found))


config_app = PlainTyper("Show the configuration.")
app.add_typer(config_app, name="config")
app.add_typer(ray_app, name="ray")


@config_app.command("show", cls=SettingsCommand)
def show_config(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the effective settings and the origin of each, with secrets masked."""
    effective = config_from(context)
    typer.echo(config_as_json(effective) if as_json else config_as_text(effective))


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        # Escape the characters that the locale cannot encode.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    app()
