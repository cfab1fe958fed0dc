"""Settings as command-line options and as the output of `config show`."""

from __future__ import annotations

import inspect
import json
import os
from typing import Annotated, Any, Final, NoReturn, get_origin

import typer

from draftgate.gateway.config import (
    ConfigError,
    EffectiveConfig,
    Setting,
    effective_config,
    settings,
)
from draftgate.loadgen.command_line import HelpCommand, reason

_NAMES: Final = "--served-model-name"

COMMON: Final = frozenset(
    {
        "model",
        "max_model_len",
        "exact",
        "models",
        "host",
        "port",
        "served_model_name",
        "api_keys_file",
        "speculation",
        "proposer",
        "max_num_seqs",
        "quantization",
        "kv_bytes",
        "threads",
        "join",
        "upstream",
        "config",
    }
)
"""Settings that `--help` shows. `--help-all` shows all of them."""

_SHOWS_ALL: Final = "draftgate.shows_all"

FAILED: Final = 1
BAD_USAGE: Final = 2
INTERRUPTED: Final = 130
"""Exit status after Ctrl-C, as in shells."""


def fail(why: str | Exception, status: int = FAILED) -> NoReturn:
    """Print one line to stderr and exit."""
    typer.echo(f"draftgate: {reason(why) if isinstance(why, Exception) else why}", err=True)
    raise typer.Exit(status)


class SettingsCommand(HelpCommand):
    """A command that accepts every setting as an option.

    Its help shows the `COMMON` settings, and that of `--help-all` shows all.
    The command creates its options on first use, because the list of commands does not show them.
    `invoke` moves their values to `ctx.obj`, where `config_from` reads them.
    """

    server = True
    _complete = False

    def get_params(self, ctx: Any) -> list[Any]:
        if not self._complete:
            self._complete = True
            # MODEL is the first argument, also of a command with further arguments.
            model, *options = _setting_options(self.server)
            self.params = [model, *self.params, *options]
        return super().get_params(ctx)

    def shows(self, ctx: Any, parameter: Any) -> bool:
        is_common = parameter.name in COMMON or parameter.name not in _names()
        return is_common or _SHOWS_ALL in ctx.meta

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        return super().parse_args(ctx, with_repeated_names(args))

    def invoke(self, ctx: Any) -> Any:
        ctx.obj = {name: ctx.params.pop(name) for name in _names() if name in ctx.params}
        return super().invoke(ctx)


class ModelSettingsCommand(SettingsCommand):
    """A `SettingsCommand` without the settings that concern only the server."""

    server = False


def with_repeated_names(args: list[str]) -> list[str]:
    """Return arguments in which `--served-model-name A B` is a repeated option, as vLLM has it.

    The arguments must begin with MODEL, so that no further name can be meant as MODEL.
    """
    if _NAMES not in args or not args or args[0].startswith("-"):
        return args
    found: list[str] = []
    in_names = False
    for argument in args:
        in_names = argument == _NAMES or (in_names and not argument.startswith("-"))
        if in_names and found and found[-2:-1] == [_NAMES] and argument != _NAMES:
            found.append(_NAMES)
        found.append(argument)
    return found


def config_from(context: typer.Context) -> EffectiveConfig:
    """Return the effective settings from the options of a `SettingsCommand`.

    The command exits with status 2 if a setting is invalid.
    """
    # The value of a repeatable option that was not given is an empty list or an empty tuple,
    # depending on the version of Typer.
    flags = {name: None if value in ([], ()) else value for name, value in context.obj.items()}
    file = flags.pop("config", None)
    try:
        return effective_config(flags, os.environ, file)
    except ConfigError as error:
        fail(error, BAD_USAGE)


def _names() -> list[str]:
    """Return the names of the options that `_setting_options` creates and the command receives."""
    return ["config", *(setting.name for setting in settings())]


def _setting_options(server: bool) -> list[Any]:
    """Return the options that Typer creates from the signature of a function."""
    chosen = [setting for setting in settings() if server or not setting.server]
    parameters = [*map(_parameter, chosen), _config_file(), _help_all()]

    def command(**_values: object) -> None: ...

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    holder = typer.Typer(add_completion=False)
    holder.command()(command)
    return list(typer.main.get_command(holder).params)


def _parameter(setting: Setting) -> inspect.Parameter:
    """Return a keyword parameter whose value is text, a list of texts, a boolean or None."""
    shared: dict[str, Any] = {
        "help": help_text(setting),
        "show_default": False,
        "rich_help_panel": setting.panel,
    }
    if setting.name == "model":
        info: Any = typer.Argument(**{**shared, "rich_help_panel": None}, metavar="MODEL")
        return _keyword(setting.name, Annotated[str | None, info])
    if setting.type is bool:
        # A flag needs both forms to override the environment and the file.
        bare = setting.flag.removeprefix("--")
        opposite = bare.removeprefix("no-") if bare.startswith("no-") else f"no-{bare}"
        info = typer.Option(f"{setting.flag}/--{opposite}", **shared)
        return _keyword(setting.name, Annotated[bool | None, info])
    several = get_origin(setting.type) is tuple
    info = typer.Option(setting.flag, metavar=metavar(setting), **shared)
    return _keyword(setting.name, Annotated[list[str] | None if several else str | None, info])


def _config_file() -> inspect.Parameter:
    text = "YAML file of settings. Options and DRAFTGATE_* variables override it."
    info = typer.Option("--config", help=text, metavar="FILE", show_default=False)
    return _keyword("config", Annotated[str | None, info])


def _help_all() -> inspect.Parameter:
    text = "Show all options with this message, and exit."
    info = typer.Option(
        "--help-all", help=text, is_eager=True, callback=_print_all, expose_value=False
    )
    return _keyword("help_all", Annotated[bool, info]).replace(default=False)


def _print_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        ctx.meta[_SHOWS_ALL] = True
        typer.echo(ctx.command.get_help(ctx))
        raise typer.Exit


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=annotation)


def help_text(setting: Setting) -> str:
    """Return the help text of an option with its default value."""
    default = shown_default(setting)
    return f"{setting.help} [default: {default}]" if default else setting.help


def shown_default(setting: Setting) -> str:
    """Return the default value as flag text. None, False and empty values give an empty string."""
    if setting.default in (None, ()) or setting.default is False:
        return ""
    if setting.kind == "bytes":
        return f"{setting.default >> 20}MiB"
    return setting.shown(setting.default)


_METAVARS: Final = {
    "bytes": "SIZE",
    "hosts": "NAME",
    "indices": "INDICES",
    "list": "TEXT",
    "models": "[NAME=]CHECKPOINT",
    "fallbacks": "MODEL=FALLBACK",
    "shares": "NAME=SHARE",
    "origins": "ORIGIN",
    "upstreams": "[NAME=]URL",
    "urls": "URL",
    "url": "URL",
    "collector": "URL",
    "variable": "NAME",
    "store": "URL",
    "pool": "NAME",
    "backend": "NAME",
}


def metavar(setting: Setting) -> str:
    """Return the placeholder of a value in help pages."""
    if setting.choices:
        return "|".join(setting.choices)
    if setting.kind in _METAVARS:
        return _METAVARS[setting.kind]
    if setting.kind:
        return "POLICY"
    return "NUMBER" if setting.type in {int, float} else "TEXT"


def config_as_text(effective: EffectiveConfig) -> str:
    """Return one line per setting with its name, value and origin.

    Secrets are masked.
    """
    width = max(map(len, effective.origins))
    return "\n".join(
        f"{setting.name:{width}} = {setting.shown(getattr(effective.config, setting.name)):24} "
        f"({effective.origins[setting.name]})"
        for setting in settings()
    )


def config_as_json(effective: EffectiveConfig) -> str:
    """Return the effective settings as JSON, `{NAME: {"value": ..., "origin": ...}}`."""
    found = {
        setting.name: {
            "value": setting.public(getattr(effective.config, setting.name)),
            "origin": effective.origins[setting.name],
        }
        for setting in settings()
    }
    return json.dumps(found, indent=2)
