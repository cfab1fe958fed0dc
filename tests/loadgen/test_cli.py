"""Tests of the command line against a scripted server."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from draftgate.gateway import cli as gateway_cli
from draftgate.loadgen import cli
from draftgate.loadgen.cli.commands import exit_status, worst
from draftgate.loadgen.events import EventWriter, read_events
from draftgate.loadgen.planning.corpus import open_corpus
from draftgate.loadgen.sending.calibrate import CalibrationResult
from draftgate.loadgen.sending.client import open_session
from draftgate.loadgen.sending.target import inspect_server
from draftgate.loadgen.types import ClientHealth
from draftgate.loadgen.workloads.base import TokenEstimator
from tests.loadgen.known_records import a_run
from tests.loadgen.mock_server import Mock, Script, serving, serving_in_a_thread
from tests.loadgen.test_calibrate import a_probe

OVERLOADED = ClientHealth(max_lag_s=0.5, p99_lag_s=0.2, cpu_share=0.99, loop_stall_s=0.4)


def command(*arguments: object, app=cli.app):
    """Run the command line in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def has_intact_streams(result, summary: dict) -> bool:
    """Return whether every stream was intact, even if a busy machine made the run INVALID."""
    return result.exit_code == (0 if summary["valid"] else 3)


def respond_with(monkeypatch, **fields) -> None:
    """Make the server respond according to one script."""
    script = Script(**fields)
    original = Mock._stream

    async def stream(self, request, _, body):
        return await original(self, request, script, body)

    monkeypatch.setattr(Mock, "_stream", stream)


def test_a_closed_loop_prints_metrics_and_writes_the_summary(tmp_path) -> None:
    """A run prints a table with drafts and writes `summary/1`."""
    out, mock = tmp_path / "summary.json", Mock()
    with serving_in_a_thread(mock) as url:
        flags = ["--requests", 6, "--concurrency", 3, "--max-tokens", 8, "--json", out]
        result = command(url, *flags)
    summary = json.loads(out.read_text())
    assert has_intact_streams(result, summary), result.output
    assert "6 of 6" in result.output
    assert "48 drafted, 36 accepted (75.0%)" in result.output
    assert (summary["requests"], summary["errors"], summary["attainment"]) == (6, {}, 1.0)
    assert summary["goodput_rps"] > 0
    for name in ("ttft_s", "tpot_s", "latency_s"):
        assert set(summary[name]) == {"mean", "p50", "p90", "p99"}
    assert {body["max_tokens"] for body in mock.bodies} == {8}
    assert {body["prompt"] for body in mock.bodies} == {"def fibonacci(n):"}
    assert sorted(body["seed"] for body in mock.bodies) == list(range(6))


def test_an_open_loop_writes_all_its_reports(tmp_path) -> None:
    """Workload, rate, SLO and key reach the server, and three files agree.

    None of the files holds the key.
    """
    out, html, events = (tmp_path / name for name in ("s.json", "p.html", "e.jsonl"))
    mock = Mock()
    with serving_in_a_thread(mock) as url:
        flags = ["--workload", "code", "--rate", 100, "--requests", 10, "--max-tokens", 4]
        flags += ["--slo-ttft-ms", 5000, "--slo-tpot-ms", 1000, "--api-key", "sk-secret"]
        flags += ["--speculation", "ngram:2", "--temperature", 0, "--seed", 3]
        result = command(url, *flags, "--json", out, "--html", html, "--events", events)
    summary = json.loads(out.read_text())
    assert has_intact_streams(result, summary), result.output
    settings = summary["details"]["settings"]
    assert (settings["rate_rps"], settings["workload"], settings["url"]) == (100.0, "code", url)
    assert settings["prompt_lengths"] == "measured on 8 texts"
    assert settings["max_model_len"] == 8192
    again, _ = read_events(events)
    assert len(again.records) == 10
    assert "<title>Load of mock at" in html.read_text()
    for path in (out, html, events):
        assert "sk-secret" not in path.read_text()
    assert {h["x-slo-ttft-ms"] for h in mock.headers} == {"5000"}
    assert {h["Authorization"] for h in mock.headers} == {"Bearer sk-secret"}
    wanted = {"mode": "ngram", "max_draft_tokens": 2}
    assert all(body["speculation"] == wanted for body in mock.bodies)
    reported = tmp_path / "again.json"
    repeated = command("report", events, "--json", reported)
    assert reported.read_text() == out.read_text()
    assert repeated.exit_code == result.exit_code
    assert repeated.output == result.stdout


@pytest.mark.parametrize("fault", ["no_done", "reset"])
def test_a_broken_stream_fails_the_run(tmp_path, monkeypatch, fault: str) -> None:
    """The exit status is 1, and the output names the cause with an example."""
    respond_with(monkeypatch, fault=fault)
    out = tmp_path / "summary.json"
    with serving_in_a_thread(Mock()) as url:
        result = command(url, "--requests", 2, "--json", out)
    assert result.exit_code == 1
    assert "0 of 2" in result.output
    (cause,) = json.loads(out.read_text())["errors"]
    assert cause in {"no_done", "cut"}
    assert cause in result.output


def test_a_lossy_speculation_fails_the_run(tmp_path, monkeypatch) -> None:
    """The exit status is 1 if drafting changed a text, and summary and events record the change."""
    respond_with(monkeypatch, lossy=True)
    out, events = tmp_path / "s.json", tmp_path / "e.jsonl"
    with serving_in_a_thread(Mock()) as url:
        flags = ["--requests", 3, "--verify-lossless", 2, "--json", out, "--events", events]
        result = command(url, *flags)
    assert result.exit_code == 1
    lossless = json.loads(out.read_text())["details"]["lossless"]
    assert (lossless["compared"], len(lossless["differences"])) == (2, 2)
    assert command("report", events).exit_code == 1


def test_an_equal_text_passes(tmp_path) -> None:
    """A lossless check without differences leaves the exit status at 0."""
    out = tmp_path / "s.json"
    with serving_in_a_thread(Mock()) as url:
        result = command(url, "--requests", 3, "--verify-lossless", 2, "--json", out)
    summary = json.loads(out.read_text())
    assert has_intact_streams(result, summary)
    assert summary["details"]["lossless"]["passed"]
    assert "lossless: 2 responses compared" in result.output


@pytest.mark.parametrize(("health", "status"), [(OVERLOADED, 3), (a_run().health, 0)])
def test_an_invalid_run_has_its_own_exit_status(tmp_path, health, status: int) -> None:
    """The exit status is 3 if the generator did not keep up, although every stream was intact."""
    run = a_run([r for r in a_run().records if r.verdict == "ok"], health=health)
    path = tmp_path / "e.jsonl"
    with closing(EventWriter(path, run.settings)) as events:
        for record in run.records:
            events.record(record)
        events.end(run)
    result = command("report", path)
    assert result.exit_code == status
    assert ("INVALID" in result.output) is (status == 3)


def test_a_broken_stream_takes_precedence_over_an_invalid_run() -> None:
    """A broken stream gives status 1 even for an INVALID run, and an interruption gives 3."""
    broken = a_run(health=OVERLOADED)
    assert exit_status(broken, None) == 1
    stopped = a_run([r for r in broken.records if r.verdict == "ok"], interrupted=True)
    assert exit_status(stopped, None) == 3


def test_a_refusal_is_not_a_broken_stream() -> None:
    """Responses of 429 or 503 give status 4 if no worse failure occurred."""
    ok = [record for record in a_run().records if record.verdict == "ok"]
    refused = [replace(ok[0], verdict="http_status", status=status) for status in (429, 503)]
    assert exit_status(a_run([*ok, *refused]), None) == 4
    assert exit_status(a_run([*ok, *refused], health=OVERLOADED), None) == 3
    failed = replace(ok[0], verdict="http_status", status=500)
    assert exit_status(a_run([*ok, *refused, failed]), None) == 1
    assert [worst(statuses) for statuses in ([], [0, 4], [4, 3], [4, 1, 3])] == [0, 4, 3, 1]


@pytest.mark.parametrize(
    "arguments",
    [
        ["http://127.0.0.1:9"],
        ["http://127.0.0.1:9", "--model", "m"],
        ["http://127.0.0.1:9", "--arrival", "poisson"],
        ["http://127.0.0.1:9", "--trace", "/nowhere.csv"],
        ["http://127.0.0.1:9", "--requests", "0"],
        ["report", "/nowhere.jsonl"],
        ["http://127.0.0.1:9", "--no-such-flag"],
    ],
)
def test_wrong_usage_is_explained(arguments: list[str]) -> None:
    """The command prints a reason without a traceback and exits with status 2."""
    result = command(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert result.output.strip()


def test_chat_has_its_own_endpoint() -> None:
    """`--chat` sends the prompt as a user's message."""
    mock = Mock()
    with serving_in_a_thread(mock) as url:
        command(url, "--chat", "--requests", 1, "--prompt", "hello")
    assert mock.bodies[0]["messages"] == [{"role": "user", "content": "hello"}]


def test_the_gateway_has_the_same_command() -> None:
    """`draftgate load` takes the same flags and gives the same exit status."""
    with serving_in_a_thread(Mock()) as url:
        result = command("load", url, "--requests", 2, app=gateway_cli.app)
    assert result.exit_code in {0, 3}
    assert "2 of 2" in result.output
    shown = command("load", "--help", app=gateway_cli.app)
    assert "calibrate" in shown.output
    assert command("load", "report", "/nowhere", app=gateway_cli.app).exit_code == 2


def test_help_shows_the_flags_of_a_run_in_groups() -> None:
    """`load --help` needs no URL and lists the flags of `run` by group, and all commands."""
    shown = command("--help").output
    for group in ("Requests", "Schedule", "Server", "Results", "Commands"):
        assert f"\n{group}:\n" in shown
    for flag in ("--workload", "--rate", "--model", "--json", "--events", "calibrate"):
        assert flag in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_a_workload_may_be_a_file_of_requests(tmp_path) -> None:
    """A run sends the requests of a file in order with their extra fields, then repeats them."""
    path, out, mock = tmp_path / "mine.jsonl", tmp_path / "s.json", Mock()
    path.write_text(
        '{"prompt": "one", "max_tokens": 3, "temperature": 0.5, "class": "a"}\n\n'
        '{"messages": [{"role": "user", "content": "two"}], "tenant": "t"}\n'
    )
    with serving_in_a_thread(mock) as url:
        flags = ["--workload", path, "--requests", 3, "--concurrency", 1, "--json", out]
        result = command(url, *flags)
    summary = json.loads(out.read_text())
    assert has_intact_streams(result, summary), result.output
    assert summary["details"]["settings"]["workload"] == str(path)
    assert set(summary["details"]["classes"]) == {"a", "file"}
    first, second, third = mock.bodies
    assert (first["prompt"], first["max_tokens"], first["temperature"]) == ("one", 3, 0.5)
    assert second["messages"] == [{"role": "user", "content": "two"}]
    assert (third["prompt"], [body["seed"] for body in mock.bodies]) == ("one", [0, 1, 2])


def test_calibrate_prints_each_probe(monkeypatch) -> None:
    """The command prints each probe as it ends, and then the ceilings."""
    held, beyond = a_probe(100), a_probe(200, "CPU of the generator")

    async def ceilings(*, processes, probe_s, on_probe):
        assert (processes, probe_s) == (2, 0.5)
        for probe in (held, beyond):
            on_probe(probe)
        return CalibrationResult((held, beyond), (held,), processes)

    monkeypatch.setattr("draftgate.loadgen.cli.commands.find_ceilings", ceilings)
    result = command("calibrate", "--probe-s", 0.5, "--processes", 2)
    assert result.exit_code == 0
    assert "200/s, 400 open: not sustained: CPU of the generator" in result.output
    assert "Ceilings of this generator (2 processes)" in result.output


def test_a_run_can_be_reported_as_another_tool(tmp_path) -> None:
    """`--as` adds that tool's metrics after a run and to a report of its events."""
    events = tmp_path / "e.jsonl"
    with serving_in_a_thread(Mock()) as url:
        flags = ["--requests", 4, "--concurrency", 2, "--as", "vllm", "--events", events]
        result = command(url, *flags)
    assert "vllm bench serve" in result.output
    assert "Successful requests" in result.output
    result = command("report", events, "--as", "aiperf")
    assert "4 of 4" in result.output
    assert "Inter Token Latency" in result.output
    result = command("report", events, "--as", "locust")
    assert result.exit_code == 2
    assert "'locust' is not one of 'vllm'" in " ".join(result.output.split())


async def test_a_server_without_tokenize_gets_an_estimate() -> None:
    """The generator estimates prompt lengths if the server has no `/tokenize`."""
    async with serving(Mock()) as url, open_session() as session:
        found = await inspect_server(session, url, "", open_corpus())
        assert (found.model, found.max_model_len) == ("mock", 8192)
        assert found.counter.characters_per_token == pytest.approx(4.0, rel=0.01)
        assert (await inspect_server(session, url, "given")).model == "given"
        without_tokenize = await inspect_server(session, f"{url}/deeper", "given", open_corpus())
    assert without_tokenize.counter == TokenEstimator()
    assert without_tokenize.max_model_len is None


def test_heavy_libraries_are_not_imported() -> None:
    """The load generator imports no other Draftgate package.

    The gateway's command line does not import the load generator.
    """
    heavy = {"torch", "tokenizers", "transformers", "huggingface_hub", "gateway", "backends"}
    for module, never in (
        ("draftgate.loadgen.cli", {*heavy, "policies", "plotly"}),
        ("draftgate.gateway.cli", {"loadgen"}),
    ):
        program = (
            f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
        assert not never & set(done.stdout.decode().split())


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/"])
def test_address_may_end_with_the_path_of_the_api(path: str, tmp_path) -> None:
    """A load of `URL/v1` sends the same requests as a load of the URL."""
    out = tmp_path / "summary.json"
    with serving_in_a_thread(Mock()) as url:
        result = command(url + path, "--requests", 2, "--max-tokens", 2, "--json", out)
    summary = json.loads(out.read_text())
    assert has_intact_streams(result, summary), result.output
    assert summary["details"]["settings"]["url"] == url


@pytest.mark.parametrize("flag", ["--json", "--html", "--events"])
def test_a_file_that_cannot_be_written_is_refused_before_the_run(tmp_path, flag) -> None:
    """A run whose result could not be written sends nothing."""
    mock = Mock()
    with serving_in_a_thread(mock) as url:
        for path, why in ((tmp_path, "is a folder"), (tmp_path / "no" / "file", "does not exist")):
            result = command(url, "--requests", 1, flag, path)
            assert result.exit_code == 2
            assert why in " ".join(result.output.split())
    assert not mock.bodies


@pytest.mark.parametrize("flag", ["--slo-ttft-ms", "--slo-tpot-ms", "--slo-gap-ms"])
@pytest.mark.parametrize("limit", ["0", "-5", "nan"])
def test_a_limit_that_is_not_positive_is_refused(flag: str, limit: str) -> None:
    """No latency limit can be 0 or negative."""
    result = command("http://127.0.0.1:1", flag, limit)
    assert result.exit_code == 2
    assert "a latency limit must be positive" in result.output
