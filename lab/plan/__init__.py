"""`draftgate plan`, which computes the machines that a workload needs.

The commands require the extra `plan`.
"""

from __future__ import annotations

from draftgate.lab.plan.deployment_search import placement, pools
from draftgate.lab.plan.mix import mix
from draftgate.loadgen.command_line import PlainTyper, with_groups

app = PlainTyper("Compute the machines that a workload needs.")


@app.callback()
def _plan() -> None:
    """Keep the questions subcommands even while there is only one."""


for question in (mix, placement, pools):
    app.command()(with_groups(question))
