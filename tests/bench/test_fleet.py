"""Tests of what the benchmark with real servers computes, without the servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.fleet import failures, prefixes, speculation
from bench.fleet.command import main
from bench.fleet.failures import Stream
from bench.fleet.prefixes import RoundResult
from bench.fleet.speculation import ARMS, Reply, Turn


def test_folder_without_servers_is_refused(tmp_path: Path) -> None:
    """The command names what the folder must have."""
    with pytest.raises(SystemExit, match="vllm/bin/vllm, smollm2/ and gemma3/"):
        main([str(tmp_path)])


def test_requests_depend_on_the_seed_only() -> None:
    """Half of the requests are of each kind, and none of a round occurs in the next one."""
    first, again, second = (speculation.bodies(6, seed) for seed in (1, 1, 2))
    assert first == again
    assert sorted(kind for kind, _ in first) == ["chat"] * 3 + ["code"] * 3
    assert not [body for body in first if body in second]


def test_speculation_is_compared_round_by_round() -> None:
    """The ratio of two arms is that of their rounds, and acceptance is that of all drafts."""

    def turn(arm: str, number: int, seconds: float) -> Turn:
        drafted = None if arm == "off" else 20
        accepted = None if arm == "off" else 15
        upstream = "plain" if arm == "off" else "drafting"
        replies = [
            Reply(kind, "id", upstream, "", 40, 0.1, 0.02, drafted, accepted)
            for kind in ("code", "chat")
        ]
        return Turn(arm, 1, number, seconds, replies)

    turns = [turn(arm, n, 2.0 + n if arm == "off" else 1.0 + n / 2) for n in (0, 1) for arm in ARMS]
    found = speculation.report(turns)
    relative = found["auto_relative_to"]["1"]
    assert relative["off"] == {"mean": 2.0, "low": 2.0, "high": 2.0}
    assert relative["on"]["mean"] == 1.0
    assert found["cells"]["1"]["auto"]["code"]["acceptance"] == 0.75
    assert found["cells"]["1"]["off"]["on_drafting_server"] == 0
    head, *rows = speculation.table(found)
    assert {len(row) for row in rows} == {len(head)}
    assert len(rows) == len(ARMS)


def test_table_of_prefixes_has_a_row_for_each_arm() -> None:
    """The hit rate is that of all rounds, and `events` is compared with every other arm."""
    rounds = [
        RoundResult([0.2, 0.4], 100.0, 40.0, 39.0),
        RoundResult([0.2, 0.2], 300.0, 160.0, 160),
    ]
    found = {f"{n} gateways": prefixes.report(dict.fromkeys(prefixes.ARMS, rounds)) for n in (1, 2)}
    head, *rows = prefixes.table(found)
    assert len(rows) == 2 * len(prefixes.ARMS)
    assert rows[0][head.index("hit rate")] == "0.500"
    assert rows[0][head.index("events / arm")] == "1.00 (1.00-1.00)"
    assert rows[3][head.index("events / arm")] == ""


def test_streams_that_end_otherwise_have_failed() -> None:
    """A stream with an error, another finish reason or a second id has failed."""
    whole = Stream("ids", 8, "a", 1, 1, 8, ["length"])
    aborted = Stream("ids", 8, "a", 1, 1, 4, ["abort"])
    moved = Stream("chat", 8, "a", 1, 1, 8, ["length"], metrics={"resumes": [{}]})
    found = failures.figures([whole, aborted, moved], [whole, whole, moved])
    assert (found["failed"], found["continued"], found["with_right_usage"]) == (1, 1, 2)
    head, row = failures.table({"stall_s": 10.0, "drained": found})
    assert dict(zip(head, row, strict=True))["equal texts"] == "2"
