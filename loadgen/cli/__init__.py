"""The command line of `python -m draftgate.loadgen` and `draftgate load`, which are the same."""

from __future__ import annotations

from typing import Any

from draftgate.loadgen.cli import commands
from draftgate.loadgen.command_line import HelpGroup, PlainTyper, with_groups


class RunByDefault(HelpGroup):
    """A group whose default command is `run`, so that a URL may be the first argument."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, "--help"}:
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        super().format_options(ctx, formatter)
        self.commands["run"].format_options(ctx, formatter)


app = PlainTyper(
    "Send load to a server, and check and measure every stream.",
    cls=RunByDefault,
    subcommand_metavar="URL | COMMAND [ARGS]...",
)

for command in (
    commands.run,
    commands.report,
    commands.compare,
    commands.sweep,
    commands.search,
    commands.calibrate,
):
    app.command()(with_groups(command))
