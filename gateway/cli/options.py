"""Settings on the command line: as options, and as `config show` prints them."""

from __future__ import annotations

import inspect
import json
import os
from typing import Annotated, Any, Final, NoReturn

import typer

from draftgate.gateway.config import (
    ConfigError,
    EffectiveConfig,
    Setting,
    effective_config,
    settings,
)
from draftgate.loadgen.command_line import HelpCommand, reason

FAILED: Final = 1
BAD_USAGE: Final = 2


def fail(why: str | Exception, status: int = FAILED) -> NoReturn:
    """Exit with one line on stderr."""
    typer.echo(f"draftgate: {reason(why) if isinstance(why, Exception) else why}", err=True)
    raise typer.Exit(status)


class SettingsCommand(HelpCommand):
    """A command that takes every setting as an option.

    The options are made when they are needed: the list of commands is shown without them. What was
    given is in the context, for `config_from`.
    """

    server = True
    _complete = False

    def get_params(self, ctx: Any) -> list[Any]:
        if not self._complete:
            self._complete = True
            self.params += _setting_options(self.server)
        return super().get_params(ctx)

    def invoke(self, ctx: Any) -> Any:
        names = ("config", *(setting.name for setting in settings()))
        ctx.obj = {name: ctx.params.pop(name) for name in names if name in ctx.params}
        return super().invoke(ctx)


class ModelSettingsCommand(SettingsCommand):
    """The same, without the settings that concern only the server."""

    server = False


def config_from(context: typer.Context) -> EffectiveConfig:
    """Return the effective settings, given the options of a `SettingsCommand`.

    A bad setting ends the command.
    """
    # A repeatable option that is not given is an empty list or tuple, depending on Typer.
    flags = {name: None if value in ([], ()) else value for name, value in context.obj.items()}
    file = flags.pop("config", None)
    try:
        return effective_config(flags, os.environ, file)
    except ConfigError as error:
        fail(error, BAD_USAGE)


def _setting_options(server: bool) -> list[Any]:
    """Return the options of a command, which Typer makes from the signature of a function."""
    chosen = [setting for setting in settings() if server or not setting.server]
    parameters = [*map(_parameter, chosen), _config_file()]

    def command(**_values: object) -> None: ...

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    holder = typer.Typer(add_completion=False)
    holder.command()(command)
    return list(typer.main.get_command(holder).params)


def _parameter(setting: Setting) -> inspect.Parameter:
    """Return a setting as a parameter that is a text, a list of texts or a boolean, or None."""
    shared: dict[str, Any] = {
        "help": help_text(setting),
        "show_default": False,
        "rich_help_panel": setting.panel,
    }
    if setting.name == "model":
        info: Any = typer.Argument(**{**shared, "rich_help_panel": None}, metavar="MODEL")
        return _keyword(setting.name, Annotated[str | None, info])
    if setting.type is bool:
        # Both ways, because a flag must be able to override the environment and the file.
        bare = setting.flag.removeprefix("--")
        opposite = bare.removeprefix("no-") if bare.startswith("no-") else f"no-{bare}"
        info = typer.Option(f"{setting.flag}/--{opposite}", **shared)
        return _keyword(setting.name, Annotated[bool | None, info])
    several = setting.kind in {"list", "urls"}
    info = typer.Option(setting.flag, metavar=metavar(setting), **shared)
    return _keyword(setting.name, Annotated[list[str] | None if several else str | None, info])


def _config_file() -> inspect.Parameter:
    text = "YAML file of settings. Options and DRAFTGATE_* variables override it."
    info = typer.Option("--config", help=text, metavar="FILE", show_default=False)
    return _keyword("config", Annotated[str | None, info])


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=annotation)


def help_text(setting: Setting) -> str:
    """Return the help of an option, with its default."""
    default = shown_default(setting)
    return f"{setting.help} [default: {default}]" if default else setting.help


def shown_default(setting: Setting) -> str:
    """Return the default as a flag takes it; empty for none, and for a switch that is off."""
    if setting.default in (None, ()) or setting.default is False:
        return ""
    if setting.kind == "bytes":
        return f"{setting.default >> 20}MiB"
    return setting.shown(setting.default)


_METAVARS: Final = {
    "bytes": "SIZE",
    "indices": "INDICES",
    "list": "TEXT",
    "urls": "URL",
    "url": "URL",
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
    """Return a line for each setting: name, value and origin. Secrets are masked."""
    width = max(map(len, effective.origins))
    return "\n".join(
        f"{setting.name:{width}} = {setting.shown(getattr(effective.config, setting.name)):24} "
        f"({effective.origins[setting.name]})"
        for setting in settings()
    )


def config_as_json(effective: EffectiveConfig) -> str:
    """Return the same as JSON: `{NAME: {"value": ..., "origin": ...}}`."""
    found = {
        setting.name: {
            "value": setting.public(getattr(effective.config, setting.name)),
            "origin": effective.origins[setting.name],
        }
        for setting in settings()
    }
    return json.dumps(found, indent=2)
