"""`draftgate plan`, which computes the machines that a workload needs.

The commands require the extra `plan`. Each question is a module of this package.
"""

from __future__ import annotations

from draftgate.lab.plan.mix import mix
from draftgate.lab.plan.placement import placement
from draftgate.lab.plan.pools import pools
from draftgate.loadgen.command_line import PlainTyper

app = PlainTyper("Compute the machines that a workload needs.")


@app.callback()
def _plan() -> None:
    """Keep the questions subcommands even while there is only one."""


app.command()(mix)
app.command()(placement)
app.command()(pools)
