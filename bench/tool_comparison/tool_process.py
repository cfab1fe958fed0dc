"""Functions to run a load tool, and the command of the mock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.tool_comparison.tools import DRAFTGATE, Tool

MOCK_COMMAND: Final = (sys.executable, "-m", "bench.tool_comparison.mock")
"""Command of the mock, without case and port."""

CHAT_BODY: Final = json.dumps(
    {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
).encode()
"""Body of the request that checks whether a server is up."""

TIMEOUT_S: Final = 240.0
"""Timeout in seconds. guidellm takes a minute to start on two cores."""

_HUB_OFFLINE: Final = "HF_HUB_OFFLINE"
"""Environment variable of the offline mode. aiperf rejects a local tokenizer folder if it is set.
All other tools use the hub if it is not set."""


def run_tool(tool: Tool, command: Sequence[str], folder: Path) -> None:
    """Run a tool to its end, and write its output to `output.log` in the folder.

    Raises:
        subprocess.SubprocessError: the tool failed or took too long. Broken streams and late
            sending are not errors, because the metrics of the tool report them.
    """
    accepted_codes = {0, 1, 3} if tool.name == DRAFTGATE else {0}
    kept = {name: value for name, value in os.environ.items() if name != _HUB_OFFLINE}
    variables = {**kept, "OMP_NUM_THREADS": "1", **tool.variables}
    with (folder / "output.log").open("wb") as log:
        done = subprocess.run(  # noqa: S603 - commands of this study
            command, stdout=log, stderr=log, env=variables, timeout=TIMEOUT_S, check=False
        )
    if done.returncode not in accepted_codes:
        raise subprocess.CalledProcessError(done.returncode, command[:2])
