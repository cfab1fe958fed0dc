"""Tests of `draftgate bench cpu`: its arms, turns, tables and servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from math import exp
from pathlib import Path

import pytest

from bench.cpu.arms import (
    Arm,
    Family,
    Serving,
    alternating,
    draftgate_arm,
    in_groups,
    plan_arms,
)
from bench.cpu.chats import chats
from bench.cpu.measure import Contender, Sessions, Turn, vllm_counters, windows
from bench.cpu.report import Cell, Run, summary, tables
from bench.cpu.servers import RunningServers
from bench.harness.processes import process_tree, start, stop
from bench.harness.servers import Server
from tests.loadgen.mock_server import Mock, serving

REFERENCE = "Draftgate off"
CELL = Cell(0.0, 2)

HEALTHY = (
    "import sys\nfrom http.server import BaseHTTPRequestHandler, HTTPServer\n"
    "class Handler(BaseHTTPRequestHandler):\n"
    "    def do_GET(self):\n"
    "        self.send_response(200)\n"
    "        self.end_headers()\n"
    "HTTPServer(('127.0.0.1', int(sys.argv[-1])), Handler).serve_forever()\n"
)
"""A server that is ready at once."""


class LossyMock(Mock):
    """A server whose texts differ from those of other mocks."""

    async def _stream(self, request, script, body):
        return await super()._stream(request, script, body | {"seed": body["seed"] + 1})


class ShortMock(Mock):
    """A server that generates a token less than requested."""

    async def _stream(self, request, script, body):
        return await super()._stream(request, replace(script, tokens=script.tokens - 1), body)


def common(folder: Path, **fields) -> Serving:
    """Return the settings that all servers share."""
    values = {"model": None, "gguf": folder / "model.gguf", "checkpoint": folder, "streams": 4}
    sizes = {"context_tokens": 512, "kv_bytes": 1 << 20, "core": 0, "cache": folder}
    values["dtype"] = "bfloat16"
    return Serving(**{**values, **sizes, **fields})


def executable(folder: Path, name: str) -> str:
    """Return the path of a program that does nothing."""
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def python_arm(family: Family, program: str) -> Arm:
    """Return an arm whose server is a Python program."""
    return Arm(family, "test", (sys.executable, "-c", program), "/health")


def run(arm: str, cpu_s: float, number: int = 0, group: int = 0, **fields) -> Run:
    """Return a run of 100 tokens."""
    values = {"ttft_s": [0.5], "tpot_s": [0.1, 0.3], "drafted": 0, "accepted": 0} | fields
    return Run(number, *CELL, arm, group, 100, 2.0, cpu_s, 0.0, **values)


def rivals(folder: Path) -> Path:
    """Return a folder with both rivals, which do nothing."""
    for path in ("vllm/bin", "llama"):
        (folder / path).mkdir(parents=True, exist_ok=True)
    executable(folder, "vllm/bin/vllm")
    executable(folder, "llama/llama-server")
    return folder


def test_arms_are_those_with_and_without_drafts(tmp_path) -> None:
    """Each program runs without drafts and with its usual drafts, and all have equal threads."""
    serving = common(tmp_path, threads=2, core=None)
    plan = plan_arms(serving, ["ngram"], rivals(tmp_path), full=False)
    assert [arm.name for arm in plan.arms] == [
        *("Draftgate auto", "vLLM off", "vLLM ngram", "llama.cpp none", "llama.cpp ngram-mod")
    ]
    assert not plan.skipped
    assert all(isinstance(word, str) for arm in plan.arms for word in arm.command)
    assert all(arm.variables["OMP_NUM_THREADS"] == "2" for arm in plan.arms)
    given = [arm.command[arm.command.index("--threads") + 1] for arm in plan.arms[::3]]
    assert given == ["2", "2"]
    assert len(plan.arms[1].variables["VLLM_CPU_OMP_THREADS_BIND"].split(",")) <= 2


def test_full_comparison_has_all_arms(tmp_path) -> None:
    """Each proposer has a fixed policy, and each rival has its three settings."""
    plan = plan_arms(common(tmp_path), ["ngram", "sparse_self"], rivals(tmp_path), full=True)
    assert [arm.name for arm in plan.arms] == [
        *("Draftgate auto", "Draftgate fixed:4 ngram", "Draftgate fixed:4 sparse_self"),
        *("vLLM off", "vLLM ngram", "vLLM suffix"),
        *("llama.cpp none", "llama.cpp ngram-simple", "llama.cpp ngram-mod"),
    ]
    ngram = json.loads(plan.arms[4].command[-1])
    assert (ngram["method"], ngram["num_speculative_tokens"]) == ("ngram", 4)


def test_instruction_set_limits_all_servers(tmp_path) -> None:
    """All servers of a comparison with AVX2 use it, and llama.cpp only if it was built for it."""
    serving = common(tmp_path, isa="avx2")
    plan = plan_arms(serving, [], rivals(tmp_path), full=False)
    assert {arm.family for arm in plan.arms} == {Family.DRAFTGATE, Family.VLLM}
    assert all(arm.variables["ONEDNN_MAX_CPU_ISA"] == "AVX2" for arm in plan.arms)
    assert "llama-avx2/llama-server" in plan.skipped["llama.cpp"]
    (tmp_path / "llama-avx2").mkdir()
    executable(tmp_path, "llama-avx2/llama-server")
    built = plan_arms(serving, [], tmp_path, full=False).arms[-1]
    assert built.command[0] == str(tmp_path / "llama-avx2/llama-server")


@pytest.mark.parametrize(
    ("present", "fields", "reasons"),
    [
        (None, {}, {"vLLM": "--rivals is not set", "llama.cpp": "--rivals is not set"}),
        (False, {}, {"vLLM": "vllm/bin/vllm", "llama.cpp": "llama/llama-server"}),
        (True, {"gguf": None}, {"llama.cpp": "--gguf"}),
        (True, {"checkpoint": None}, {"vLLM": "--checkpoint"}),
    ],
)
def test_absent_rivals_are_skipped_with_a_reason(present, fields, reasons, tmp_path) -> None:
    """A rival without its program or a model that it can read is named, and has no arms."""
    folder = rivals(tmp_path) if present else None if present is None else tmp_path / "none"
    plan = plan_arms(common(tmp_path, **fields), [], folder, full=False)
    assert plan.skipped.keys() == reasons.keys()
    assert all(reason in plan.skipped[name] for name, reason in reasons.items())
    assert not {arm.family.value for arm in plan.arms} & plan.skipped.keys()


def test_messages_are_different_and_of_all_kinds() -> None:
    """No message occurs twice, a seed gives the same ones, and six neighbours are of six kinds."""
    found = chats(120)
    assert len(set(found)) == 120
    assert found == chats(120)
    assert chats(120, 1) != found
    assert sum(text.startswith("Translate German") for text in found) == 20
    assert sum("cite them" in text for text in found) == 20


def test_timed_prompts_have_their_length_and_begin_differently() -> None:
    """Prompts of a length are made from shorter ones, so that servers cache none of them."""
    short = [tuple(range(start, start + 30)) for start in (0, 100, 200)]
    found = windows(short, 500, 3)
    assert [len(prompt) for prompt in found] == [500] * 3
    assert len({prompt[:16] for prompt in found}) == 3


async def test_a_cell_with_a_prompt_length_counts_prompt_tokens(tmp_path) -> None:
    """The rate of such a cell is that of prompts, and each run has the memory of its server."""
    turn = Turn(0, 0, Cell(0.0, 1, 3), [(1, 2, 3)], 1)
    async with AsyncExitStack() as stack:
        found = await contenders(stack, {"off": Mock()}, tmp_path)
        runs, _ = await turn.run(found, found[0], [])
    assert (runs[0].tokens, runs[0].cell) == (3, turn.cell)
    assert runs[0].resident_mb > 10


@pytest.mark.parametrize("at_once", [1, 2, 3, 4, 9])
def test_groups_hold_every_arm_once_and_spread_families(at_once, tmp_path) -> None:
    """No group is too large, and neighbours of a family are in different groups if possible."""
    names = ["ngram", "sparse_self"]
    arms = plan_arms(common(tmp_path), names, rivals(tmp_path), full=True).arms
    groups = in_groups(arms, at_once)
    assert sorted(arm.name for group in groups for arm in group) == sorted(a.name for a in arms)
    assert max(map(len, groups)) <= at_once
    if at_once == 3:
        assert all(len({arm.family for arm in group}) == 3 for group in groups)
    assert alternating(arms, 1) == alternating(arms, 0)[::-1] == arms[::-1]


async def contenders(stack: AsyncExitStack, mocks: dict[str, Mock], folder) -> list[Contender]:
    """Return contenders whose servers are mocks in this process."""
    sessions = await stack.enter_async_context(Sessions())
    found = []
    for policy, mock in mocks.items():
        url = await stack.enter_async_context(serving(mock))
        server = Server(os.getpid(), int(url.rpartition(":")[2]))
        arm = draftgate_arm(common(folder), policy)
        found.append((await sessions.contender(arm, server))[0])
    return found


async def test_all_servers_get_the_same_requests(tmp_path) -> None:
    """The prompts are token ids with fixed lengths, and equal texts are counted."""
    mocks = {"off": Mock(), "auto": Mock(), "fixed:2": LossyMock()}
    turn = Turn(0, 0, CELL, [(1, 2, 3), (4, 5, 6)], 8)
    async with AsyncExitStack() as stack:
        found = await contenders(stack, mocks, tmp_path)
        runs, failed = await turn.run(found, found[0], [one.server for one in found])
    assert not failed
    sent = [sorted((b["prompt"], b["seed"]) for b in mock.bodies) for mock in mocks.values()]
    assert sent == [[([1, 2, 3], 0), ([4, 5, 6], 1)]] * 3
    bodies = [body for mock in mocks.values() for body in mock.bodies]
    assert all(body["ignore_eos"] and body["max_tokens"] == 8 for body in bodies)
    assert [one.same_texts for one in runs] == [1.0, 1.0, 0.0]
    assert all((one.tokens, one.drafted, one.accepted) == (16, 16, 12) for one in runs)
    assert all(len(one.ttft_s) == len(one.tpot_s) == 2 for one in runs)


async def test_an_output_of_another_length_ends_the_run(tmp_path) -> None:
    """A server that generates fewer tokens raises an error instead of a rate."""
    turn = Turn(0, 0, CELL, [(1, 2, 3)], 8)
    async with AsyncExitStack() as stack:
        found = await contenders(stack, {"off": ShortMock()}, tmp_path)
        with pytest.raises(RuntimeError, match=r"counted \(3, 7\) tokens"):
            await turn.run(found, found[0], [])


async def test_a_rival_that_fails_is_named_and_the_others_go_on(tmp_path) -> None:
    """The error of a rival is its reason, and Draftgate's runs of the turn are kept."""
    turn = Turn(0, 0, CELL, [(1, 2, 3)], 8)
    async with AsyncExitStack() as stack:
        found = await contenders(stack, {"off": Mock(), "auto": ShortMock()}, tmp_path)
        found[1] = found[1]._replace(arm=python_arm(Family.LLAMA_CPP, ""))
        runs, failed = await turn.run(found[::-1], found[0], [])
    assert [one.arm for one in runs] == [REFERENCE]
    assert "(3, 7) tokens" in failed["llama.cpp test"]


def test_vllm_counters_are_summed_over_engines() -> None:
    """Lines of several engines count together, and other metrics and positions do not."""
    page = (
        "# TYPE vllm:spec_decode_num_draft_tokens_total counter\n"
        'vllm:spec_decode_num_draft_tokens_total{engine="0"} 12.0\n'
        'vllm:spec_decode_num_draft_tokens_total{engine="1"} 8.0\n'
        'vllm:spec_decode_num_accepted_tokens_total{engine="0"} 5.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 99.0\n'
    )
    assert vllm_counters(page) == (20, 5)
    assert vllm_counters("") == (0, 0)


def test_ratios_are_to_the_reference_of_the_same_round_and_group() -> None:
    """A slow phase of the machine changes both runs of a pair, and leaves their ratio."""
    runs = [
        *(run(REFERENCE, 1.0), run("rival", 2.0)),
        *(run(REFERENCE, 4.0, group=1), run("other", 2.0, group=1)),
        *(run(REFERENCE, 3.0, number=1), run("rival", 6.0, number=1)),
    ]
    rows = {row["arm"]: row for row in summary(runs, [REFERENCE, "rival", "other"], REFERENCE)}
    assert rows["rival"]["to_reference"] == [0.5, 0.5, 0.5]
    assert rows["other"]["to_reference"][0] == 2.0
    assert rows["rival"]["rounds"] == 2
    assert rows["rival"]["tokens_per_cpu_s"] == round(100 / exp((0.6931472 + 1.7917595) / 2), 2)
    assert (rows["rival"]["tpot_p50_ms"], rows["rival"]["ttft_p50_ms"]) == (200.0, 500.0)


def test_the_tables_mark_the_best_server_and_missing_values() -> None:
    """The best rate of a cell is bold, and unknown drafts and cells are not shown as zero."""
    runs = [
        run(REFERENCE, 1.0),
        run("rival", 0.5, drafted=None, accepted=None, same_texts=0.25),
        run("other", 4.0, drafted=10, accepted=4, nats_per_token=1.5),
        Run(0, 0.7, 1, 0, REFERENCE, 0, 100, 2.0, 1.0, 0.0, [0.1], [0.1], 0, 0, resident_mb=570.4),
    ]
    rows = summary(runs, [REFERENCE, "rival", "other"], REFERENCE)
    lines = list(tables(rows, REFERENCE))
    assert "| rival | **200.0** | - | 0 |" in lines
    assert f"| {REFERENCE} | 100.0 | **100.0** | 570 |" in lines
    assert any("not reported | 25% | -" in line for line in lines)
    assert any("4 of 10 | 100% | 1.50" in line for line in lines)


def test_servers_run_only_while_their_arms_are_kept(tmp_path) -> None:
    """A server starts once, ends when its arm is not kept, and the last ones end with the run."""
    first, second = python_arm(Family.VLLM, HEALTHY), python_arm(Family.LLAMA_CPP, HEALTHY)
    with RunningServers(tmp_path, None) as servers:
        one, other = servers.run(first), servers.run(second)
        assert one is not None
        assert other is not None
        assert servers.run(first) == one
        servers.keep([second])
        assert not Path(f"/proc/{one.pid}").exists()
        assert servers.servers == {second.name: other}
    assert not Path(f"/proc/{other.pid}").exists()


def test_a_rival_that_does_not_start_is_named(tmp_path) -> None:
    """The reason holds the error of its log, and the rival is not started again."""
    arm = python_arm(Family.VLLM, "raise SystemExit('Error: no such speculation')")
    with RunningServers(tmp_path, None) as servers:
        assert servers.run(arm) is None
        logs = len(list(tmp_path.iterdir()))
        assert servers.run(arm) is None
        assert "no such speculation" in servers.failed[arm.name]
        assert len(list(tmp_path.iterdir())) == logs


def test_draftgate_has_to_start(tmp_path) -> None:
    """An error of Draftgate ends the run with its log."""
    arm = python_arm(Family.DRAFTGATE, "raise SystemExit('bad flag')")
    with (
        RunningServers(tmp_path, None) as servers,
        pytest.raises(RuntimeError, match="bad flag"),
    ):
        servers.run(arm)


def test_stopping_a_server_ends_processes_that_ignore_it(tmp_path) -> None:
    """A descendant that ignores SIGTERM and outlives its parent is killed."""
    child = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('started', flush=True); signal.pause()"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    log = tmp_path / "log"
    os.mkfifo(log)
    reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    process = start([sys.executable, "-c", parent], None, log, {})
    os.set_blocking(reader, True)
    with os.fdopen(reader) as lines:
        assert lines.readline() == "started\n"
        stop(process)
        assert lines.read() == ""  # The last process with the log has ended.


def results_of(folder: Path, *options: str) -> dict:
    """Return the results of a short run of the command."""
    out = folder / "cpu.json"
    sizes = ("--streams", "1", "--tokens", "4", "--prompt-tokens", "64", "--rounds", "1")
    given = ("--prefill", "48", "--full", "--json", str(out))
    command = [sys.executable, "-m", "draftgate", "bench", "cpu", *sizes, *given]
    subprocess.run([*command, "--dtype", "float32", *options], check=True)
    return json.loads(out.read_text(encoding="utf-8"))


@pytest.mark.long
def test_the_command_measures_the_shipped_model(tmp_path) -> None:
    """Every proposer has a row, texts of a coupled seed are equal, and the rivals are named."""
    found = results_of(tmp_path, "--temperatures", "0.7")
    assert found["skipped"].keys() == {"vLLM", "llama.cpp"}
    rows = {row["arm"]: row for row in found["cells"] if not row["prompt_tokens"]}
    prompts = {row["arm"]: row for row in found["cells"] if row["prompt_tokens"] == 48}
    assert rows.keys() == prompts.keys() == found["servers"].keys()
    assert all(row["resident_mb"] > 100 for row in prompts.values())
    assert {"Draftgate off", "Draftgate auto", "Draftgate fixed:4 ngram"} <= rows.keys()
    assert all(row["same_texts"] == 1.0 and row["tokens_per_cpu_s"] > 0 for row in rows.values())
    assert all(row["nats_per_token"] > 0 for row in rows.values())
    assert rows["Draftgate off"]["drafted"] == 0 < rows["Draftgate fixed:4 ngram"]["drafted"]


@pytest.mark.long
@pytest.mark.skipif(
    not os.environ.keys() >= {"CPU_RIVALS", "FIELD_MODEL", "FIELD_GGUF"},
    reason="needs CPU_RIVALS with llama.cpp, and FIELD_MODEL and FIELD_GGUF with the same model",
)
def test_the_command_measures_llama_cpp(tmp_path) -> None:
    """llama.cpp's server generates as many tokens from the same ids of the same model."""
    given = ("--rivals", os.environ["CPU_RIVALS"], "--gguf", os.environ["FIELD_GGUF"])
    found = results_of(tmp_path, os.environ["FIELD_MODEL"], *given, "--temperatures", "0")
    assert "llama.cpp" not in found["skipped"]
    rows = {row["arm"]: row for row in found["cells"]}
    assert {f"llama.cpp {name}" for name in ("none", "ngram-simple", "ngram-mod")} <= rows.keys()
    assert found["servers"]["llama.cpp none"]["version"]


@pytest.mark.long
@pytest.mark.skipif("CPU_RIVALS" not in os.environ, reason="needs CPU_RIVALS with vLLM")
def test_the_command_measures_vllm(tmp_path) -> None:
    """vLLM generates as many tokens from the same ids of the shipped model."""
    found = results_of(tmp_path, "--rivals", os.environ["CPU_RIVALS"], "--temperatures", "0")
    rows = {row["arm"]: row for row in found["cells"]}
    assert rows["vLLM off"]["drafted"] == 0 < rows["vLLM ngram"]["drafted"]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_leaves_no_process(number, tmp_path) -> None:
    """Ctrl-C and SIGTERM end the servers, too."""
    command = [sys.executable, "-m", "draftgate", "bench", "cpu", "--dtype", "float32"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "is ready" in process.stdout.readline()
        tree = list(process_tree(process.pid))
        assert len(tree) > 1
        process.send_signal(number)
        process.stdout.read()
    assert process.returncode != 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in tree)
