"""What commands print in plain text: help pages, and the reasons of errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

C = TypeVar("C", bound=Callable[..., Any])

_PLACEHOLDERS: Final = {"str": "TEXT", "list[str]": "TEXT", "path": "FILE"}
"""What stands for a value; all other types are numbers."""


def reason(error: BaseException) -> str:
    """Return what an error says to a user: no class name, no error number, never nothing."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) or ("timed out" if isinstance(error, TimeoutError) else repr(error))


class HelpCommand(TyperCommand):
    """A command whose help lists its options by their `rich_help_panel`.

    Rich would double the time that a page takes to load, and needs more than ASCII.
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
                # Typer shows the types of Python: <int range>.
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
            text: its help.
            options: of Typer.
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
        """Add a command, as Typer does."""
        return super().command(name, **{"cls": HelpCommand, **options})
