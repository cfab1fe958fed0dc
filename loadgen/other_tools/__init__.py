"""What other load generators would say of the same run: their figures, names and definitions.

A file each, pure: from a run's records to an `Account`. Definitions were read in the sources of the
versions named, and held to what these tools print about a server of known truth
(`bench/tool_comparison`, docs/guide/load-testing.md). They are the tools' own, right or wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from draftgate.loadgen.other_tools import aiperf, guidellm, vllm
from draftgate.loadgen.other_tools.base import Account
from draftgate.loadgen.types import LoadRun

DIALECTS: Final[Mapping[str, Callable[[LoadRun], Account]]] = {
    "vllm": vllm.account,
    "guidellm": guidellm.account,
    "aiperf": aiperf.account,
}
"""By the names that `--as` takes."""
