"""The events of a run are sufficient to compute every metric again."""

from __future__ import annotations

import gzip
import json
from contextlib import closing
from dataclasses import replace
from hashlib import sha256

import pytest

from draftgate.loadgen.checking.lossless import Difference, LosslessCheck
from draftgate.loadgen.events import EventWriter, read_events
from draftgate.loadgen.measuring.summary import summarize
from draftgate.loadgen.types import ChatMessage, PlannedRequest, RequestSpec, Slo
from tests.loadgen.known_records import a_run, record

CHECK = LosslessCheck(3, 2, (Difference(1, 0, 5, "a", "b"),), ((2, "cut: gone"),), 1)


def write_events(path, run, check=None, *, ended=True):
    """Write a run as the command does."""
    with closing(EventWriter(path, run.settings)) as events:
        for one in run.records:
            events.record(one)
        if ended:
            events.end(run)
        if check is not None:
            events.lossless(check)
    return path


def test_the_summary_can_be_computed_again(tmp_path) -> None:
    """The summary and the lossless check from the file equal the originals."""
    run = a_run()
    again, check = read_events(write_events(tmp_path / "e.jsonl", run, CHECK))
    assert summarize(again, check) == summarize(run, CHECK)
    assert read_events(write_events(tmp_path / "f.jsonl", run))[1] is None


def test_everything_but_texts_is_restored(tmp_path) -> None:
    """The reader restores a record with every field, except for prompt and response."""
    question = RequestSpec(
        None,
        (ChatMessage("user", "hällo"),),
        32,
        2**63,
        "batch",
        "tenant-a",
        "session-1",
        Slo(0.5, None),
        2,
        (("speculation", {"mode": "off"}), ("temperature", 0.5)),
    )
    one = record(chunk_tokens=[1, None, 2, 3], detail="a\nb", connect_s=0.003, empty_s=(1.2,))
    one = replace(one, metrics={"seed": 1})
    one = replace(one, planned=PlannedRequest(7, 1.0, question))
    again, _ = read_events(write_events(tmp_path / "e.jsonl", a_run([one])))
    without = replace(question, prompt="", messages=())
    assert again.records == [replace(one, planned=PlannedRequest(7, 1.0, without), texts=())]


def test_texts_are_not_kept_but_can_be_compared(tmp_path) -> None:
    """The file holds no prompt or response, but equal texts have equal digests."""
    run = a_run([record(0), replace(record(1), texts=("secret",))])
    text = write_events(tmp_path / "e.jsonl", run).read_text()
    lines = [json.loads(line)["record"] for line in text.splitlines()[1:3]]
    assert "x = 1" not in text
    assert "secret" not in text
    assert lines[0]["asked_sha256"] == lines[1]["asked_sha256"]
    assert lines[1]["answers_sha256"] == [sha256(b'"secret"').hexdigest()]
    assert lines[0]["asked_characters"] == len("x = 1")


def test_a_crash_leaves_all_complete_records(tmp_path) -> None:
    """The file holds each record when its request ends.

    The reader drops an incomplete line, and the run is INVALID.
    """
    run, path = a_run(), tmp_path / "e.jsonl"
    with closing(EventWriter(path, run.settings)) as events:
        events.record(run.records[0])
        events.record(run.records[1])
        assert len(read_events(path)[0].records) == 2
    path.write_bytes(path.read_bytes() + b'{"record": {"ind')
    again, _ = read_events(path)
    assert [r.planned.index for r in again.records] == [0, 1]
    assert (again.interrupted, again.health) == (True, None)
    assert again.duration_s == max(r.end_s for r in run.records[:2])
    assert again.scheduled_duration_s == 0.5
    assert not summarize(again)["valid"]


def test_a_compressed_file_can_be_read(tmp_path) -> None:
    """The reader accepts a `.gz` file, and rejects a damaged file."""
    plain = write_events(tmp_path / "e.jsonl", a_run())
    packed = tmp_path / "e.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_events(packed) == read_events(plain)
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(ValueError, match="damaged"):
        read_events(packed)


def test_interruption_is_recorded(tmp_path) -> None:
    """The file holds the interruption and the generator's health."""
    again, _ = read_events(write_events(tmp_path / "e.jsonl", a_run(interrupted=True)))
    assert again.interrupted
    assert not summarize(again)["valid"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "line 1"),
        ("{}\n", "expected the format loadgen-events/1"),
        ('{"format": "loadgen-events/2", "settings": {}}\n', "loadgen-events/2"),
        ('{"format": "loadgen-events/1"}\n', "line 1"),
        ('{"format": "loadgen-events/1", "settings": {}}\n?\n', "line 2"),
        ('{"format": "loadgen-events/1", "settings": {}}\n{"record": {}}\n', "line 2.*index"),
    ],
)
def test_other_files_are_refused(tmp_path, content: str, complaint: str) -> None:
    """The reader rejects other files with an error that names file and line."""
    path = tmp_path / "other.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=complaint) as refused:
        read_events(path)
    assert str(path) in str(refused.value)
