"""Signals to long commands in processes of their own, which keep the results so far."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.examples import grid
from tests.lab.test_plan_placement import write_profile
from tests.loadgen.mock_server import Mock, serving_in_a_thread
from tests.processes import child_pids

TARGETS = ("--slo-ttft-ms", "1000", "--slo-tpot-ms", "250")
WAIT_S = 120.0
"""Time until a command is ended that does not end by itself, so that the test fails."""


@dataclass(frozen=True)
class Long:
    """A command that would run for minutes.

    Attributes:
        words: its arguments. `URL`, `TRACE` and `PROFILES` stand for a server and files.
        begun: a pattern of the line after which the command has a part of its result.
        partial: returns whether a JSON result has that part and says that it is not complete.
        page: whether the command writes a page.
    """

    words: tuple[str, ...]
    begun: str
    partial: Callable[[dict[str, Any]], bool]
    page: bool = True


PLANNED = ("--trace", "TRACE", "--profiles", "PROFILES", *TARGETS)
COMMANDS = {
    "plan placement": Long(
        ("plan", "placement", *PLANNED, "--precision", "0.02"),
        "tested",
        lambda plan: plan["search"]["interrupted"] and len(plan["search"]["measured"]) > 0,
    ),
    "plan pools": Long(
        ("plan", "pools", *PLANNED, "--rate", "20"),
        "decided",
        lambda plan: plan["search"]["interrupted"] and len(plan["search"]["unmeasured"]) > 0,
    ),
    "plan mix": Long(
        (
            *("plan", "mix", "--workload", "chat", "--rate", "8", "--requests", "4000"),
            *("--profiles", "a100-8b,h100-8b", "--speculation", "off", *TARGETS),
        ),
        "simulated ",
        lambda plan: plan["interrupted"] and plan["simulated"]["requests"] > 0,
    ),
    "load search": Long(
        ("load", "search", "URL", "--rate", "50", "--slo-tpot-ms", "60000", "--max-tokens", "8"),
        "probe 2 at ",
        lambda found: found["stop"] == "interrupted" and len(found["probes"]) > 0,
    ),
    "simulate": Long(
        (
            "simulate",
            "--rate",
            "20",
            "--requests",
            "20",
            "--speculation",
            "off",
            "--repeat",
            "9999",
        ),
        "run 2 of 9999: off, seed 1",
        lambda found: found["interrupted"] and found["policies"]["off"]["requests"] > 0,
    ),
    "bench policies": Long(
        ("bench", "policies", "--workloads", "code", "--requests", "0.02", "--seeds", "50"),
        "code 0.02 best",
        lambda found: found["interrupted"] and len(found["cells"]) > 0,
        page=False,
    ),
    "bench melange": Long(
        ("bench", "melange", "--seeds", "1000"),
        "mixes",
        lambda found: found["interrupted"] and len(found["rows"]) > 0,
        page=False,
    ),
    "bench priors": Long(
        ("bench", "priors"),
        "ngram: ",
        lambda found: found["interrupted"] and set(found["effects"]) >= {"ngram"},
        page=False,
    ),
    "bench llumnix": Long(
        ("bench", "llumnix", "--instances", "1", "--requests", "40", "--seeds", "0,1,2,3,4,5,6,7"),
        "early at ",
        lambda found: found["interrupted"],
        page=False,
    ),
}


@contextmanager
def started(words: list[str], *, ignores_ctrl_c: bool = False) -> Iterator[subprocess.Popen[str]]:
    """Start a command with its outputs in one pipe, and end it with the block.

    Args:
        ignores_ctrl_c: start it as shells start commands in the background of a script.
    """
    disposition = signal.SIG_IGN if ignores_ctrl_c else signal.default_int_handler
    before = signal.signal(signal.SIGINT, disposition)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "draftgate", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
        )
    finally:
        signal.signal(signal.SIGINT, before)

    def end() -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    limit = threading.Timer(WAIT_S, end)
    limit.start()
    try:
        yield process
    finally:
        limit.cancel()
        end()
        process.communicate()


def interrupted(
    long: Long, folder: Path, url: str, number: int, *, ignores_ctrl_c: bool = False
) -> tuple[int, str]:
    """Send a signal to a command that has begun, and return its exit status and output."""
    trace = folder / "trace.csv"
    trace.write_text("num_prefill_tokens,num_decode_tokens\n" + "50,5\n60,4\n" * 10)
    profiles = (write_profile(folder, *one, 2.0) for one in (("fast", 0.05), ("slow", 0.2)))
    given = {"URL": url, "TRACE": str(trace), "PROFILES": ",".join(profiles)}
    words = [given.get(word, word) for word in long.words]
    words += ["--json", str(folder / "found.json")]
    words += ["--html", str(folder / "found.html")] if long.page else []
    with started(words, ignores_ctrl_c=ignores_ctrl_c) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if re.search(long.begun, line):
                process.send_signal(number)
                break
        lines.append(process.stdout.read())
        return process.wait(), "".join(lines)


@pytest.mark.parametrize(
    ("name", "number"),
    grid(
        COMMANDS,
        (signal.SIGTERM, signal.SIGINT),
        quick=lambda name, number: (
            (name == "load search") == (number == signal.SIGINT) and name != "bench policies"
        ),
    ),
)
def test_a_signal_leaves_the_results_so_far(tmp_path: Path, name: str, number: int) -> None:
    """Ctrl-C and SIGTERM write all files, end with 130 or 143, and leave no process."""
    before, long = child_pids(), COMMANDS[name]
    with serving_in_a_thread(Mock()) as url:
        status, output = interrupted(long, tmp_path, url, number)
    assert status == 128 + number, output
    assert long.partial(json.loads((tmp_path / "found.json").read_text()))
    if long.page:
        assert "interrupted" in (tmp_path / "found.html").read_text()
    assert "Traceback" not in output
    assert child_pids() <= before


@pytest.mark.parametrize("name", ["load search", "simulate"])
def test_sigterm_ends_a_command_that_ignores_ctrl_c(tmp_path: Path, name: str) -> None:
    """Scripts start commands in the background without Ctrl-C. SIGTERM has the same effect."""
    with serving_in_a_thread(Mock()) as url:
        status, output = interrupted(
            COMMANDS[name], tmp_path, url, signal.SIGTERM, ignores_ctrl_c=True
        )
    assert status == 143, output
    assert COMMANDS[name].partial(json.loads((tmp_path / "found.json").read_text()))


def test_a_signal_before_the_first_result_is_explained(tmp_path: Path) -> None:
    """A command without results says so in its last line, and writes no file."""
    long = Long(("simulate", "--rate", "50", "--requests", "100000"), "run 1 of 1", lambda _: False)
    status, output = interrupted(long, tmp_path, "", signal.SIGTERM)
    assert status == 143, output
    assert output.splitlines()[-1] == "draftgate: interrupted before the first run was complete"
    assert not (tmp_path / "found.json").exists()


def test_simulating_processes_end_with_a_killed_command(tmp_path: Path) -> None:
    """SIGKILL gives a search no time to end its processes, which then end by themselves."""
    trace = tmp_path / "trace.csv"
    trace.write_text("num_prefill_tokens,num_decode_tokens\n" + "50,5\n60,4\n" * 10)
    profile = write_profile(tmp_path, "one", 0.05, 2.0)
    words = ["plan", "placement", "--trace", str(trace), "--profiles", profile, *TARGETS]
    with started([*words, "--precision", "0.02"]) as process:
        assert process.stdout is not None
        assert any("tested" in line for line in process.stdout)
        ends = [os.pidfd_open(pid) for pid in child_pids(process.pid)]
        process.kill()
        for end in ends:
            assert select.select([end], [], [], WAIT_S / 4)[0], "a process is left"
            os.close(end)
    assert ends
