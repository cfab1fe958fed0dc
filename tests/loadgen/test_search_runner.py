"""Tests of a search of a real server, from its warm-up to its report."""

from __future__ import annotations

import json

import pytest

from tests.loadgen.known_records import accept_any_health
from tests.loadgen.mock_server import Mock, serving_in_a_thread
from tests.loadgen.test_cli import command, respond_with


def search(url: str, path, *flags: object):
    """Search without a TTFT limit, so that the search needs no warm-up."""
    given = ("--rate", 200, "--max-rate", 400, "--slo-tpot-ms", 60_000, "--max-tokens", 8)
    return command("search", url, *given, "--json", path, *flags)


def test_a_search_reports_its_probes(tmp_path, monkeypatch) -> None:
    """A server that meets every SLO gives a lower bound, and cut probes are valid runs."""
    accept_any_health(monkeypatch)
    respond_with(monkeypatch)
    with serving_in_a_thread(Mock()) as url:
        result = search(url, tmp_path / "found.json")
    assert result.exit_code == 1, result.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["format"], found["stop"], found["rate_rps"]) == ("search/1", "max_rate", None)
    assert [probe["rate_rps"] for probe in found["probes"]] == [200.0, 400.0]
    low, high = found["interval"]
    assert (350.0 < low <= 410.0, high) == (True, None)
    for probe in found["probes"]:
        assert (probe["verdict"], probe["met"]) == ("holds", probe["counted"])
        assert probe["summary"]["errors"] == {}
        reasons = probe["summary"]["details"]["invalid_reasons"]
        assert not any("interrupted" in reason for reason in reasons)
    assert "the highest allowed rate holds" in result.output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--slo-tpot-ms", 0.0), "requires an SLO"),
        (("--share", 1.5), "share must be between"),
        (("--rate", 500), "starting rate must be above 0"),
        (("--trace", "some.jsonl"), "--trace"),
    ],
)
def test_impossible_searches_are_explained(tmp_path, monkeypatch, flags, message: str) -> None:
    """The command exits with status 2 and the reason before any probe."""
    respond_with(monkeypatch)
    with serving_in_a_thread(Mock()) as url:
        result = search(url, tmp_path / "found.json", *flags)
    assert (result.exit_code, message in " ".join(result.output.split())) == (2, True), (
        result.output
    )
    assert not (tmp_path / "found.json").exists()


def test_a_broken_server_is_not_searched(tmp_path, monkeypatch) -> None:
    """The command reports the fault of the warm-up."""
    respond_with(monkeypatch, fault="cut")
    with serving_in_a_thread(Mock()) as url:
        result = search(url, tmp_path / "found.json")
    assert result.exit_code == 2
    assert "before the search" in result.output
