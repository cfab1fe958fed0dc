"""Plain-text help pages and error messages for commands."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

C = TypeVar("C", bound=Callable[..., Any])

_PLACEHOLDERS: Final = {"str": "TEXT", "list[str]": "TEXT", "path": "FILE"}
"""Placeholders for values in help pages, for each Python type that is not a number."""


def reason(error: BaseException) -> str:
    """Return an error message for users, never empty, without class name and error number."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) or ("timed out" if isinstance(error, TimeoutError) else repr(error))


class HelpCommand(TyperCommand):
    """A command whose help lists its options by their `rich_help_panel`.

    Rich would double the time to load a help page, and its output is not limited to ASCII.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
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


class HelpGroup(TyperGroup):
    """A group whose help shows the first line of each command in full."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        found = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        rows = [
            (name, (command.help or "").partition("\n")[0])
            for name, command in found.items()
            if command is not None and not command.hidden
        ]
        with formatter.section("Commands"):
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
            **{"cls": HelpGroup, **options},
            help=text,
            no_args_is_help=True,
            add_completion=False,
            pretty_exceptions_enable=False,
            rich_markup_mode=None,
        )

    def command(self, name: str | None = None, **options: Any) -> Callable[[C], C]:
        """Add a command, as `typer.Typer.command` does."""
        return super().command(name, **{"cls": HelpCommand, **options})
