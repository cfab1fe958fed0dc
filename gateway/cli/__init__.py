"""The `draftgate` command. What a command needs is imported when it runs: `--help` is quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import draftgate
from draftgate.gateway.cli.options import config_from, with_settings
from draftgate.gateway.cli.ray import app as ray_app
from draftgate.gateway.cli.simulate.flags import simulate
from draftgate.gateway.config import ConfigError

app = typer.Typer(
    name="draftgate",
    help="A gateway for LLM inference that decides, per request, whether and how far to speculate.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(no_args_is_help=True, help="Look at the configuration.")
app.add_typer(config_app, name="config")
app.add_typer(ray_app, name="ray")

BAD_USAGE = 2


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
    """Take the options that stand before a command."""


@app.command()
@with_settings()
def serve(settings: dict[str, Any]) -> None:
    """Serve a model over OpenAI's HTTP API."""
    from draftgate.gateway.cli.server import run_server

    run_server(config_from(settings).config)


@app.command()
@with_settings(gateway=False)
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue")],
    settings: dict[str, Any],
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=(1 << 64) - 1, help="Key of the noise")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template")] = False,
) -> None:
    """Generate text without a server; what speculation did goes to stderr."""
    from draftgate.gateway.cli.generate import Sample, run_generate

    sample = Sample(prompt, max_tokens, temperature, seed, chat)
    run_generate(config_from(settings).config, sample)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def load(context: typer.Context) -> None:
    """Send load to a server and check every stream (also: sweep, compare, report, calibrate)."""
    from draftgate.loadgen.cli import app as loadgen

    loadgen(context.args, prog_name="draftgate load")


app.command()(simulate)


BENCHES = {
    "engine": "bench.engine",
    "host": "bench.engine.host",
    "streams": "bench.engine.streams",
    "kernels": "bench.engine.kernels",
    "simulator": "bench.simulation.prediction",
    "policies": "bench.simulation.policies",
    "capacity": "bench.simulation.capacity",
    "gaps": "bench.simulation.gaps",
    "herd": "bench.simulation.herd",
    "routing": "bench.simulation.routing",
    "overload": "bench.simulation.overload",
    "tracing": "bench.gateway.tracing",
    "edge": "bench.edge.command",
    "readers": "bench.gateway.readers",
    "rag": "bench.gateway.rag",
    "store": "bench.gateway.store",
    "sweep": "bench.gateway.sweep",
    "tool-comparison": "bench.tool_comparison.command",
}


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context,
    what: Annotated[str, typer.Argument(help=" | ".join(BENCHES))],
) -> None:
    """Measure what the argument names; `--help` behind it tells what that is."""
    from importlib import import_module

    if what not in BENCHES:
        typer.echo(f"draftgate: unknown benchmark {what!r}; known: {', '.join(BENCHES)}", err=True)
        raise typer.Exit(BAD_USAGE)
    # The benchmarks stand beside the package in a checkout; an installed package has none.
    checkout = Path(draftgate.__file__).resolve().parent.parent
    if not (checkout / "bench").is_dir():
        typer.echo("draftgate: benchmarks need a source checkout, not a package", err=True)
        raise typer.Exit(BAD_USAGE)
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    import_module(BENCHES[what]).main(context.args)


@app.command()
def explain(
    source: Annotated[
        str, typer.Argument(help="The address of a server, or a file that --decisions-file wrote.")
    ],
    policy: Annotated[
        str | None, typer.Option(help="Show what this policy would have decided.")
    ] = None,
    request: Annotated[
        str | None, typer.Option(help="Show only the decisions about this response.")
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
    as_json: Annotated[bool, typer.Option("--json", help="As JSON")] = False,
) -> None:
    """Describe this machine and what is installed, for bug reports."""
    from draftgate.gateway.cli.environment import as_text, collect_environment

    found = collect_environment()
    if as_json:
        import json

        typer.echo(json.dumps(found, indent=2))
    else:
        typer.echo(as_text(found))


@config_app.command("show")
@with_settings()
def show_config(
    settings: dict[str, Any],
    as_json: Annotated[bool, typer.Option("--json", help="As JSON")] = False,
) -> None:
    """Show the settings in force, and where each one comes from. Secrets are masked."""
    from draftgate.gateway.cli.configuration import as_json_text, as_lines

    shown = as_json_text if as_json else as_lines
    typer.echo(shown(config_from(settings)))


def main() -> None:
    """Run the command line; a bad setting is one line and exit status 2."""
    try:
        app()
    except ConfigError as error:
        typer.echo(f"draftgate: {error}", err=True)
        sys.exit(BAD_USAGE)
