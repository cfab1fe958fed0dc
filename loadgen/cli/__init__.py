"""The commands of the load generator, a file each.

`python -m loadgen URL` and `draftgate load URL` are the same.
"""

from __future__ import annotations

from typing import Any, Final

from draftgate.loadgen.cli import calibrate, compare, run, search, sweep
from draftgate.loadgen.cli.flags import with_groups
from draftgate.loadgen.command_line import HelpGroup, PlainTyper


class UrlFirst(HelpGroup):
    """A group in which `run` is the default command, so that a URL may come first."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, "--help"}:
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        super().format_options(ctx, formatter)
        self.commands["run"].format_options(ctx, formatter)


app = PlainTyper(
    "Send load to a server, and check and measure every stream.",
    cls=UrlFirst,
    subcommand_metavar="URL | COMMAND [ARGS]...",
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
