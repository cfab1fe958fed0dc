"""Compare the metrics of load generators with the known behaviour of a mock server.

    draftgate bench tool-comparison --rivals DIR --json OUT

Each tool gets a new mock for each case of `cases.py`, at the same rate. The mock reports its own
actions. The table shows the metrics of each tool and of Draftgate.

The command also checks the dialects. `draftgate load --as TOOL` on Draftgate's run should equal the
metrics of the tool. Finally, `aiperf` and `draftgate load` measure two correct servers in turn and
must agree. `aiperf` uses the server's token counts. The servers are the mock, and a real server
with the shipped model on its own core.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.harness.processes import free_port, start, stop, wait_until_up
from bench.harness.provenance import bench_parser, simulated_provenance, write_results
from bench.tool_comparison.agreement import agreement
from bench.tool_comparison.cases import CASES
from bench.tool_comparison.dialects import dialect_metrics, differences
from bench.tool_comparison.mock import ResponseRecord
from bench.tool_comparison.rivals import PACKAGES
from bench.tool_comparison.table import table
from bench.tool_comparison.tool_process import CHAT_BODY, MOCK_COMMAND, run_tool
from bench.tool_comparison.tools import DRAFTGATE, Tool, tools
from bench.tool_comparison.truth import truth
from draftgate.gateway.cli.environment import collect_environment

PARTS: Final = ("cases", "agreement")


def measure_case(name: str, tool: Tool, folder: Path) -> dict[str, Any]:
    """Return the metrics of a tool for a case, and the true values.

    Raises:
        subprocess.SubprocessError: the tool failed, and `output.log` in the folder has its output.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = start((*MOCK_COMMAND, name, "--port", str(port)), None, folder / "mock.log", {})
    try:
        wait_until_up(process, f"{url}/v1/chat/completions", CHAT_BODY)
        began_s = time.monotonic()
        run_tool(tool, tool.command(CASES[name], url, folder), folder)
        with urllib.request.urlopen(f"{url}/truth") as got:  # noqa: S310 - our own server
            answers = [ResponseRecord(**one) for one in json.load(got)]
    finally:
        stop(process)
    # The first request only checked whether the mock is up.
    return {
        "case": name,
        "tool": tool.name,
        "seconds": time.monotonic() - began_s,
        "load_after": os.getloadavg()[0],
        "said": tool.read(folder),
        "truth": truth(answers[1:], CASES[name].requests),
    }


def measure_all(name: str, compared_tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the metrics of each tool for a case, Draftgate's first, and print failures."""
    rows = []
    dialects: dict[str, Any] = {}
    for tool in compared_tools:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            try:
                row = measure_case(name, tool, folder)
            except (subprocess.SubprocessError, OSError, KeyError) as error:
                log_text = (folder / "output.log").read_text(errors="replace")[-2000:]
                print(f"{name}: {tool.name} failed: {error!r}\n{log_text}", flush=True)
                rows.append({"case": name, "tool": tool.name, "failed": repr(error)})
                continue
            if tool.name == DRAFTGATE:
                dialects = dialect_metrics(folder / "events.jsonl")
        if tool.name in dialects:
            row["as"] = dialects[tool.name]
            row["as_differs"] = differences(row["said"], row["as"])
        rows.append(row)
        print(name, tool.name, json.dumps(row["said"]), flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench tool-comparison`."""
    parser = bench_parser("tool-comparison", __doc__)
    parser.add_argument(
        "--rivals",
        type=Path,
        help="folder with the environments of `python -m bench.tool_comparison.rivals`",
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument(
        "--rounds", type=int, default=5, help="number of rounds of the agreement check"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args(arguments)
    results: dict[str, Any] = {
        "format": "judges/1",
        **simulated_provenance("tool-comparison", arguments),
        "device": collect_environment()["cpu"],
        "load_before": os.getloadavg()[0],
        "tools": PACKAGES,
    }
    if "cases" in args.parts:
        results["cases"] = []
        for name in args.cases:
            results["cases"] += measure_all(name, tools(args.rivals))
            write_results(args, results, "Judges", ())
        print(table(results["cases"]))
    if "agreement" in args.parts and args.rivals is not None:
        results["agreement"] = agreement(args.rivals, args.rounds)
    write_results(args, results, "Judges", ())


if __name__ == "__main__":
    main()
