"""The commands of the load generator, a file each.

`python -m loadgen URL` and `draftgate load URL` are the same.
"""

from __future__ import annotations

from typing import Any, Final

import typer
from typer.core import TyperGroup

from draftgate.loadgen.cli import calibrate, compare, run, search, sweep
from draftgate.loadgen.cli.flags import with_groups


class UrlFirst(TyperGroup):
    """Without the name of a command, what is said is said to `run`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, "--help"}:
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=UrlFirst,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Send load to a server: give its URL. `run --help` lists the flags.",
)

COMMANDS: Final = (
    run.run,
    run.report,
    compare.compare,
    sweep.sweep,
    search.search,
    calibrate.calibrate,
)

for command in COMMANDS:
    app.command()(with_groups(command))
