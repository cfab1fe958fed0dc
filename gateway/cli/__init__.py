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
from draftgate.extensions import extensions
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
    config = config_from(context).config
    from draftgate.gateway.cli.server import run_server

    run_server(config)


@app.command(cls=ModelSettingsCommand)
def generate(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help="The text to continue.", metavar="PROMPT")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens to generate.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature. 0 is greedy.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=(1 << 64) - 1, help="Sampling seed.")] = 0,
    chat: Annotated[
        bool, typer.Option("--chat", help="Apply the model's chat template to the prompt.")
    ] = False,
) -> None:
    """Generate text without a server.

    The command writes the text to stdout and a summary of speculation to stderr.
    """
    config = config_from(context).config
    from draftgate.gateway.cli.generate import Sample, run_generate

    run_generate(config, Sample(prompt, max_tokens, temperature, seed, chat))


@app.command(context_settings=PASS_THROUGH, add_help_option=False)
def load(context: typer.Context) -> None:
    """Send load to a server, and check and measure every stream."""
    from draftgate.loadgen.cli import app as loadgen

    loadgen(context.args, prog_name="draftgate load")


BENCHES: Final = {
    "engine": "bench.engine.command",
    "kernels": "bench.engine.kernels",
    "policies": "bench.simulation.policies",
    "evidence": "bench.simulation.evidence",
    "priors": "bench.simulation.priors",
    "edge": "bench.edge.command",
    "cpu": "bench.cpu.command",
    "moves": "bench.gateway.moves",
    "store": "bench.gateway.store",
}


class BenchGroup(HelpGroup):
    """The benchmarks of the checkout, each with the first line of its module as help."""

    def list_commands(self, _ctx: Any) -> list[str]:
        return list(BENCHES)

    def get_command(self, _ctx: Any, name: str) -> Any:
        # The package has no benchmarks. They are in the checkout, beside the folder draftgate/.
        checkout = Path(draftgate.__file__).resolve().parent.parent
        if not (checkout / "bench").is_dir():
            fail("benchmarks need a source checkout, not a package", BAD_USAGE)
        if name not in BENCHES:
            fail(f"unknown benchmark {name!r}; known: {', '.join(BENCHES)}", BAD_USAGE)
        if str(checkout) not in sys.path:
            sys.path.insert(0, str(checkout))

        def run(context: typer.Context) -> None:
            # Line buffering shows progress immediately, even in a file or a pipe.
            for stream in (sys.stdout, sys.stderr):
                stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
            import_module(BENCHES[name]).main(context.args)

        holder = PlainTyper("")
        holder.command(name, add_help_option=False, context_settings=PASS_THROUGH)(run)
        command = typer.main.get_command(holder)
        command.help = _first_line(BENCHES[name])
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
    api_key: Annotated[
        str, typer.Option(envvar="OPENAI_API_KEY", show_default=False, help="The server's API key.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> None:
    """Show recorded speculation decisions, and what another policy would have decided."""
    from draftgate.gateway.cli.explain import run_explain

    run_explain(source, policy, request, api_key, as_json=as_json)


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
