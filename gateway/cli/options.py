"""Command-line options made from `ServeConfig`, so that no flag is written twice."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from draftgate.gateway.config import EffectiveConfig, Setting, effective_config, settings

R = TypeVar("R")


def with_settings(*, gateway: bool = True) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Give a command one option per setting; it receives them as the dictionary `settings`.

    Values arrive as texts, as lists of them where a flag may be repeated, or as booleans for what
    is on or off, and as None where a flag was not given: `config_from` checks them.

    Args:
        gateway: with False, settings of the HTTP server are left out.
    """
    chosen = [setting for setting in settings() if gateway or not setting.server]

    def decorate(command: Callable[..., R]) -> Callable[..., R]:
        hints = get_type_hints(command, include_extras=True)
        own = [p for p in inspect.signature(command).parameters.values() if p.name != "settings"]
        own = [p.replace(annotation=hints[p.name]) for p in own]
        parameters = [*own, *map(_parameter, chosen), _config_file()]

        @wraps(command)
        def call(**values: Any) -> R:
            mine = {p.name: values.pop(p.name) for p in own}
            return command(**mine, settings=values)

        parameters.sort(key=lambda p: p.default is not inspect.Parameter.empty)
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in parameters}
        return call

    return decorate


def config_from(values: dict[str, Any]) -> EffectiveConfig:
    """Return the settings in force, given the options of a command.

    Raises:
        ConfigError: one of them is bad.
    """
    flags = {name: None if value == [] else value for name, value in values.items()}
    file = flags.pop("config", None)
    return effective_config(flags, os.environ, file)


def _parameter(setting: Setting) -> inspect.Parameter:
    info: Any
    if setting.name == "model":
        info = typer.Argument(help=setting.help, metavar="MODEL", show_default=False)
    elif setting.type is bool:
        # Both ways: a flag must be able to win over the environment and the file.
        both = f"{setting.flag}/--no-{setting.flag[2:]}"
        info = typer.Option(both, help=setting.help, show_default=False)
        return _keyword(setting.name, Annotated[bool | None, info])
    elif setting.kind == "urls":
        info = typer.Option(setting.flag, help=setting.help, metavar="URL", show_default=False)
        return _keyword(setting.name, Annotated[list[str] | None, info])
    else:
        info = typer.Option(
            setting.flag, help=_help(setting), metavar=metavar(setting), show_default=False
        )
    if setting.kind == "list":
        return _keyword(setting.name, Annotated[list[str] | None, info])
    return _keyword(setting.name, Annotated[str | None, info])


def _config_file() -> inspect.Parameter:
    help_text = "YAML file of settings; flags and DRAFTGATE_* variables win over it"
    info = typer.Option("--config", help=help_text, metavar="FILE", show_default=False)
    return _keyword("config", Annotated[str | None, info])


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=annotation)


def _help(setting: Setting) -> str:
    default = shown_default(setting)
    return f"{setting.help} (default: {default})" if default else setting.help


def shown_default(setting: Setting) -> str:
    """Return the default as a flag would have it; "" where there is none."""
    if setting.default in (None, ()):
        return ""
    if setting.kind == "bytes":
        return f"{setting.default >> 20}MiB"
    return setting.shown(setting.default)


def metavar(setting: Setting) -> str:
    """Return what stands for its value in help and documents."""
    if setting.choices:
        return "|".join(setting.choices)
    if setting.kind == "bytes":
        return "SIZE"
    if setting.kind == "indices":
        return "INDICES"
    if setting.kind == "list":
        return "TEXT ..."
    if setting.kind in {"url", "store"}:
        return "URL"
    if setting.kind in {"speculation", "batching", "ordering", "admission", "routing"}:
        return "POLICY"
    if setting.kind == "pool":
        return "NAME"
    return "NUMBER" if setting.type in {int, float} else "TEXT"
