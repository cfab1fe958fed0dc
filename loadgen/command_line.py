"""Plain-text help pages, error messages and groups of flags for commands."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from copy import copy
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from draftgate.loadgen.outputs import check_output_file, check_output_folder

C = TypeVar("C", bound=Callable[..., Any])
R = TypeVar("R")

_PLACEHOLDERS: Final = {"str": "TEXT", "list[str]": "TEXT", "path": "FILE"}
"""Placeholders for values in help pages, for each Python type that is not a number."""


def reason(error: BaseException) -> str:
    """Return an error message for users, never empty, without class name and error number."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) or ("timed out" if isinstance(error, TimeoutError) else repr(error))


def output_file(path: Path | None) -> Path | None:
    """Return the path of a file that a command writes at its end, as the callback of an option.

    The check comes before the work, so that a wrong path does not cost its result.

    Raises:
        BadParameter: the path is a folder, its folder does not exist, or it may not be written.
    """
    if path is not None:
        _check_output(check_output_file, path)
    return path


def output_folder(path: Path | None) -> Path | None:
    """Return the path of a folder that a command makes at its end, as the callback of an option.

    Raises:
        BadParameter: the path or one of its folders is a file, or may not be written.
    """
    if path is not None:
        _check_output(check_output_folder, path)
    return path


def _check_output(check: Callable[[Path], None], path: Path) -> None:
    try:
        check(path)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


class HelpCommand(TyperCommand):
    """A command whose help lists its options by their `rich_help_panel`.

    Rich would double the time to load a help page, and its output is not limited to ASCII.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and self.shows(ctx, parameter):
                name, text = record
                panel = getattr(parameter, "rich_help_panel", None) or "Options"
                if parameter.param_type_name == "argument":
                    panel, name = "Arguments", name.partition(" ")[0].upper()
                # Typer would show Python's types, such as <int range>.
                name = re.sub(r"<(.*)>", lambda match: _PLACEHOLDERS.get(match[1], "NUMBER"), name)
                panels.setdefault(panel, []).append((name, text))
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows)

    def shows(self, _ctx: Any, _parameter: Any) -> bool:
        """Return whether the help lists a parameter."""
        return True


class HelpGroup(TyperGroup):
    """A group whose help shows the first line of each command in full."""

    def heading(self, _name: str) -> str:
        """Return the heading under which the help lists a command."""
        return "Commands"

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                row = name, (command.help or "").partition("\n")[0]
                panels.setdefault(self.heading(name), []).append(row)
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows)


class PlainTyper(typer.Typer):
    """A group of commands with plain help pages."""

    def __init__(self, text: str, **options: Any) -> None:
        """Make an empty group.

        Args:
            text: the help text of the group.
            options: further options of Typer.
        """
        super().__init__(
            **{"cls": HelpGroup, "add_completion": False, **options},
            help=text,
            no_args_is_help=True,
            pretty_exceptions_enable=False,
            rich_markup_mode=None,
        )

    def command(self, name: str | None = None, **options: Any) -> Callable[[C], C]:
        """Add a command, as `typer.Typer.command` does."""
        return super().command(name, **{"cls": HelpCommand, **options})


def flag_values(group: Any) -> dict[str, Any]:
    """Return the flags of a group by their names."""
    return {field.name: getattr(group, field.name) for field in fields(group)}


def with_groups(command: Callable[..., R]) -> Callable[..., R]:
    """Replace each parameter of a command that is a group of flags (a dataclass) by its fields.

    The class variable `panel` of a group is its heading in the help.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters, groups = list[inspect.Parameter](), dict[str, type[Any]]()
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        if is_dataclass(hint) and isinstance(hint, type):
            groups[parameter.name] = hint
            parameters += _flags(hint)
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


def _flags(group: type[Any]) -> list[inspect.Parameter]:
    """Return the fields of a group as parameters."""
    hints = get_type_hints(group, include_extras=True)
    parameters = []
    for field in fields(group):
        # Several commands may share the option object.
        info = copy(hints[field.name].__metadata__[0])
        info.rich_help_panel = group.panel
        parameters.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.default is MISSING else field.default,
                annotation=Annotated[hints[field.name].__origin__, info],
            )
        )
    return parameters
