"""Check that `aiperf` and `draftgate load` agree on two correct servers."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.harness.processes import (
    Cores,
    free_port,
    on_core,
    start,
    stop,
    two_cores,
    wait_until_up,
)
from bench.tool_comparison.cases import CASES, RATE
from bench.tool_comparison.rivals import python_of
from bench.tool_comparison.tool_process import CHAT_BODY, MOCK_COMMAND, run_tool
from bench.tool_comparison.tools import (
    DRAFTGATE,
    Metrics,
    Tool,
    aiperf_command,
    read_aiperf,
    read_draftgate,
    tools,
)
from draftgate.backends.checkpoints import SHIPPED_MODEL_ID

GOAL: Final = 0.02
"""Maximum relative difference between the two tools."""

PAIRS: Final = {
    "ttft": ("ttft_p50_ms", "ttft_p50_ms"),
    "tpot": ("itl_p50_ms", "tpot_p50_ms"),
    "latency": ("latency_p50_ms", "latency_p50_ms"),
    "requests": ("requests_rps", "requests_rps"),
    "tokens": ("tokens_per_s", "tokens_per_s"),
}
"""The compared medians and rates, as pairs of aiperf's name and Draftgate's name. The ITL of aiperf
is the TPOT of Draftgate."""

PROMPT: Final = "import asyncio\n\nclass Server:\n    def __init__(self, host, port):\n"
TOKENS: Final = 64
REQUESTS: Final = 60
REAL_RATE: Final = 4.0
"""Requests per second that the shipped model sustains."""

_SERVE: Final = (sys.executable, "-m", "draftgate", "serve")


def agreement(environments: Path, rounds: int) -> list[dict[str, Any]]:
    """Measure both servers, and return the rounds and the median differences relative to aiperf."""
    if not python_of(environments, "aiperf").exists():
        return []
    cores = two_cores()
    return [
        _compared("mock", _mock_tools(environments), rounds, cores),
        _compared("draftgate serve", _real_tools(environments), rounds, cores),
    ]


def _mock_tools(environments: Path) -> list[Tool]:
    return [tool for tool in tools(environments) if tool.name in {DRAFTGATE, "aiperf"}]


def _real_tools(environments: Path) -> list[Tool]:
    """Return both tools with a single prompt at temperature 0, so that all responses are equal."""

    def draftgate_load(_: object, url: str, folder: Path) -> Sequence[str]:
        return [
            *(sys.executable, "-m", "draftgate.loadgen", url, "--completions", "--prompt", PROMPT),
            *("--max-tokens", str(TOKENS), "--temperature", "0", "--rate", f"{REAL_RATE:g}"),
            *("--arrival", "constant", "--requests", str(REQUESTS)),
            *("--json", str(folder / "draftgate.json")),
        ]

    def aiperf(_: object, url: str, folder: Path) -> Sequence[str]:
        questions = folder / "questions.jsonl"
        questions.write_text(json.dumps({"text": PROMPT}) + "\n", encoding="utf-8")
        return [
            *aiperf_command(environments, SHIPPED_MODEL_ID, url, folder),
            *("--endpoint-type", "completions", "--input-file", str(questions)),
            *("--custom-dataset-type", "single_turn", "--request-rate", f"{REAL_RATE:g}"),
            *("--arrival-pattern", "constant", "--request-count", str(REQUESTS)),
            *("--extra-inputs", f"max_tokens:{TOKENS}", "--extra-inputs", "temperature:0"),
        ]

    return [Tool(DRAFTGATE, draftgate_load, read_draftgate), Tool("aiperf", aiperf, read_aiperf)]


def _compared(server: str, pair: Sequence[Tool], rounds: int, cores: Cores) -> dict[str, Any]:
    rows = []
    with tempfile.TemporaryDirectory() as scratch, _server(server, Path(scratch), cores) as url:
        _measure_tool(
            pair[0], url, cores.clients
        )  # the first run warms the server up and is not compared
        for number in range(rounds):
            order = pair if number % 2 else pair[::-1]
            metrics = {tool.name: _measure_tool(tool, url, cores.clients) for tool in order}
            rows.append(metrics)
            print(server, json.dumps(differ(metrics["aiperf"], metrics[DRAFTGATE])), flush=True)
    found = [differ(metrics["aiperf"], metrics[DRAFTGATE]) for metrics in rows]
    differs = {name: median(one[name] for one in found) for name in PAIRS}
    return {
        "server": server,
        "rate_rps": RATE if server == "mock" else REAL_RATE,
        "differs": differs,
        "goal": GOAL,
        "met": all(abs(value) <= GOAL for value in differs.values()),
        "rounds": rows,
    }


def _measure_tool(tool: Tool, url: str, core: int | None) -> Metrics:
    with tempfile.TemporaryDirectory() as results, on_core(core):
        folder = Path(results)
        case = replace(CASES["plain"], requests=REQUESTS)
        run_tool(tool, tool.command(case, url, folder), folder)
        return tool.read(folder)


def differ(aiperf_metrics: Metrics, draftgate_metrics: Metrics) -> dict[str, float]:
    """Return the differences of Draftgate's metrics, relative to those of aiperf."""
    found = {}
    for name, (their_key, our_key) in PAIRS.items():
        their, our = aiperf_metrics[their_key], draftgate_metrics[our_key]
        if not their or our is None:
            raise RuntimeError(f"no {name} in {aiperf_metrics} or {draftgate_metrics}")
        found[name] = our / their - 1.0
    return found


@contextmanager
def _server(name: str, folder: Path, cores: Cores) -> Iterator[str]:
    """Run a server on the core for servers, and yield its URL."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command: Sequence[str] = (*MOCK_COMMAND, "plain")
    path, body = "/v1/chat/completions", CHAT_BODY
    if name != "mock":
        quiet = ("--speculation", "off", "--log-level", "error")
        command = (*_SERVE, "--device", "cpu", "--threads", "1", *quiet)
        path, body = "/v1/completions", json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    process: subprocess.Popen[bytes] = start(
        (*command, "--port", str(port)), cores.servers, folder / "server.log", {}
    )
    try:
        wait_until_up(process, url + path, body)
        yield url
    finally:
        stop(process)
