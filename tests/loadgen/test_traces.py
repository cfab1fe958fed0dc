"""Tests of traces: the known formats, and replays at their timestamps."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import combinations, takewhile
from pathlib import Path
from typing import TypeVar

import pytest

from draftgate.loadgen.planning.plan import Load, make_plan
from draftgate.loadgen.planning.traces import TraceRow, at_rate, parse_trace, read_trace, scaled
from draftgate.loadgen.workloads.base import TokenEstimator

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
T = TypeVar("T")
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the recorded traces are not here")

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:03.9799600,4808,10
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,GPT-4,1087,230,1317,API log
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}
{"timestamp": 4000, "input_length": 700, "output_length": 6, "hash_ids": [7, 9]}
"""
SARATHI = """num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio
74,918,992,0.08
290,905,1195,0.32
"""
OWN = """{"at_s": 3, "prompt_tokens": 10, "output_tokens": 2, "class": "batch", "tenant": "a"}

{"at_s": 3.25, "prompt_tokens": 11, "output_tokens": 3, "hash_ids": [1], "block_tokens": 16}
"""


def _own(more: str) -> str:
    return f'{{"at_s": 4, "prompt_tokens": 1, "output_tokens": 1, {more}}}\n'


def common(one: Sequence[T], other: Sequence[T]) -> list[T]:
    pairs = zip(one, other, strict=False)
    return [mine for mine, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


def parse(text: str) -> tuple[TraceRow, ...]:
    return parse_trace(text.splitlines(keepends=True), "a trace")


def test_every_known_format_is_recognised() -> None:
    """The reader returns rows of all five formats in order from 0 s."""
    first, second = parse(AZURE)
    assert (first.at_s, first.prompt_tokens, first.output_tokens) == (0.0, 4808, 10)
    assert second.at_s == pytest.approx(0.052, abs=1e-6)
    assert parse(BURSTGPT) == (
        TraceRow(0.0, 472, 18, class_name="Conversation log"),
        TraceRow(40.5, 1087, 230, class_name="API log"),
    )
    assert parse(MOONCAKE) == (TraceRow(0.0, 600, 5, (7, 8)), TraceRow(3.0, 700, 6, (7, 9)))
    assert parse(SARATHI) == (TraceRow(0.0, 74, 918), TraceRow(0.0, 290, 905))
    assert parse(OWN) == (
        TraceRow(0.0, 10, 2, class_name="batch", tenant="a"),
        TraceRow(0.25, 11, 3, (1,), 16),
    )
    assert parse("") == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (AZURE + "yesterday,1,2\n", "line 4: .*yesterday"),
        (AZURE + "2023-11-16 18:17:05,x,2\n", "line 4: ContextTokens must be"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 1}\n', "line 3: 'output_length' is missing"),
        (MOONCAKE + "{\n", "line 3: not JSON"),
        (OWN + '{"at_s": 1e999, "prompt_tokens": 1, "output_tokens": 1}\n', "at_s must be finite"),
        (
            OWN + '{"at_s": 1, "prompt_tokens": -1, "output_tokens": 1}\n',
            "prompt_tokens .* least 0",
        ),
        (
            OWN + '{"at_s": 1, "prompt_tokens": 1e999, "output_tokens": 1}\n',
            "line 4: prompt_tokens",
        ),
        (OWN + '{"at_s": 1, "prompt_tokens": 1.5, "output_tokens": 1}\n', "line 4: prompt_tokens"),
        (OWN + _own('"hash_ids": "12"'), "line 4: hash_ids must be a list"),
        (OWN + _own('"hash_ids": [1.5]'), "line 4: hash_ids must be a list"),
        (OWN + _own('"hash_ids": [1], "block_tokens": 0'), "line 4: block_tokens .* least 1"),
        (BURSTGPT + '50,"GPT\n-4",1,2,3,API log\n', "line 4: not CSV"),
        (BURSTGPT + "50,GPT-4,1\n", "line 4: 'Response tokens' is missing"),
        (
            "a,b\n1,2\n",
            "unknown .* with the fields 'a', 'b': expected at_s .or timestamp_s",
        ),
    ],
)
def test_a_damaged_trace_names_line_and_field(text: str, words: str) -> None:
    """The error names file, line and fault."""
    with pytest.raises(ValueError, match=f"a trace.*{words}"):
        parse(text)


def test_fields_have_a_second_name() -> None:
    """Times and prompts may also be `timestamp_s` and `input_tokens`, in JSON lines and in CSV."""
    expected = (TraceRow(0.0, 7, 2), TraceRow(1.5, 9, 3))
    lines = [{"timestamp_s": 2.0 + row.at_s, "input_tokens": row.prompt_tokens} for row in expected]
    outputs = [row.output_tokens for row in expected]
    both = [line | {"output_tokens": n} for line, n in zip(lines, outputs, strict=True)]
    assert parse("\n".join(map(json.dumps, both))) == expected
    header = "timestamp_s,input_tokens,output_tokens\n"
    assert parse(header + "2.0,7,2\n3.5,9,3\n") == expected


def test_trace_arrives_by_another_process_at_a_rate(tmp_path: Path) -> None:
    """`--arrival` replaces the times of a trace, also of one without times, and keeps its order."""
    file = tmp_path / "trace.csv"
    file.write_text("num_prefill_tokens,num_decode_tokens\n" + "10,2\n20,3\n30,4\n")
    rows = read_trace(file)
    plan = make_plan(Load(trace=file, rate_rps=4.0, arrival="constant"), rows=rows)
    assert [(one.at_s, one.request.max_tokens) for one in plan.requests] == [
        (0.0, 2),
        (0.25, 3),
        (0.5, 4),
    ]
    with pytest.raises(ValueError, match=r"simultaneously.*give --arrival"):
        make_plan(Load(trace=file, rate_rps=4.0), rows=rows)


def test_null_fields_mean_defaults() -> None:
    """The reader uses the defaults for null fields of an exporter."""
    nulls = '"hash_ids": null, "block_tokens": null, "class": null, "tenant": null'
    assert parse(_own(nulls)) == (TraceRow(0.0, 1, 1),)


def test_time_zones_are_respected() -> None:
    """The reader converts a row with a time zone, as in Azure's trace of 2024."""
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 02:00:01.009930+02:00,1,2\n"
        "2024-05-10 00:00:00+00:00,3,4\n"
    )
    first, second = parse(text)
    assert first.prompt_tokens == 3
    assert second.at_s == pytest.approx(1.00993, abs=1e-7)


def test_a_file_may_begin_with_a_byte_order_mark_but_must_be_text(tmp_path: Path) -> None:
    """The reader skips a byte order mark, and rejects another encoding with the file's name."""
    path = tmp_path / "saved.csv"
    path.write_bytes(b"\xef\xbb\xbf" + AZURE.replace("\n", "\r\n").encode())
    assert read_trace(path) == parse(AZURE)
    path.write_text(AZURE, encoding="utf-16")
    with pytest.raises(ValueError, match=r"saved\.csv: not UTF-8"):
        read_trace(path)


def test_time_may_be_scaled_to_a_speed_or_a_rate() -> None:
    """Twice the speed halves every time, a rate sets the mean gap, and lengths are unchanged."""
    rows = parse(OWN)
    assert [row.at_s for row in scaled(rows, 2.0)] == [0.0, 0.125]
    assert [row.at_s for row in at_rate(rows, 0.5)] == [0.0, 2.0]
    assert at_rate(rows, 0.5)[1].prompt_tokens == 11
    with pytest.raises(ValueError, match="arrive simultaneously"):
        at_rate(rows[:1], 1.0)


@needs_data
@pytest.mark.parametrize(
    ("path", "count"),
    [
        ("azure_llm_2023/AzureLLMInferenceTrace_code.csv", 8819),
        ("azure_llm_2023/AzureLLMInferenceTrace_conv.csv", 19366),
        ("mooncake/conversation_trace.jsonl", 12031),
        ("mooncake/synthetic_trace.jsonl", 3993),
    ],
)
def test_the_published_traces_are_read_whole(path: str, count: int) -> None:
    """The reader returns every row in order, within the length of the recording."""
    rows = read_trace(DATA / path)
    assert len(rows) == count
    instants = [row.at_s for row in rows]
    assert instants == sorted(instants)
    assert instants[0] == 0.0
    assert 1000 < instants[-1] < 4000
    assert all(len(row.prefix_ids) * 512 >= row.prompt_tokens for row in rows if row.prefix_ids)


@needs_data
@pytest.mark.parametrize(
    "path", ["azure_llm_2023/AzureLLMInferenceTrace_code.csv", "mooncake/conversation_trace.jsonl"]
)
def test_replays_hit_their_timestamps(path: str) -> None:
    """Every row is due at its timestamp, in whole units of the file's clock."""
    with (DATA / path).open(encoding="utf-8") as file:
        if path.endswith(".csv"):
            stamps = [datetime.fromisoformat(row["TIMESTAMP"]) for row in csv.DictReader(file)]
            due = [(stamp - stamps[0]) // timedelta(microseconds=1) for stamp in stamps]
            unit_s = 1e-6
        else:
            due = [json.loads(line)["timestamp"] for line in file]
            unit_s = 1e-3
    found = [row.at_s for row in read_trace(DATA / path)]
    assert [round(at_s / unit_s) for at_s in found] == due
    assert max(abs(a - b * unit_s) for a, b in zip(found, due, strict=True)) < 1e-7


@needs_data
def test_shared_prefixes_are_preserved() -> None:
    """Mooncake's conversations share as many blocks as the file specifies."""
    path = DATA / "mooncake/conversation_trace.jsonl"
    with path.open(encoding="utf-8") as file:
        recorded = [tuple(json.loads(line)["hash_ids"]) for line in file]
    rows = read_trace(path)
    assert [row.prefix_ids for row in rows] == recorded
    assert {row.block_tokens for row in rows} == {512}
    blocks = [block for row in rows for block in row.prefix_ids]
    assert len(set(blocks)) < 0.7 * len(blocks)


@needs_data
def test_a_replayed_trace_shares_the_recorded_prefixes() -> None:
    """Requests keep times and lengths, and prompts agree through their common blocks."""
    path, counter = DATA / "mooncake/synthetic_trace.jsonl", TokenEstimator()
    rows = read_trace(path)
    planned = list(make_plan(Load(trace=path, requests=60), rows=rows, counter=counter).requests)
    assert [request.at_s for request in planned] == [row.at_s for row in rows[:60]]
    prompts = [request.request.prompt or "" for request in planned]
    for row, prompt in zip(rows, prompts, strict=False):
        assert abs(counter.count(prompt) - row.prompt_tokens) <= len(row.prefix_ids) + 1
    shared = 0
    for (row, prompt), (other, text) in combinations(zip(rows, prompts, strict=False), 2):
        agreed = len(common(row.prefix_ids, other.prefix_ids))
        same = counter.count("".join(common(prompt, text)))
        assert abs(same - agreed * row.block_tokens) <= agreed + 4
        shared += agreed
    assert shared > 0


@needs_data
def test_sarathi_lengths_equal_those_of_the_paper() -> None:
    """The ShareGPT trace of Sarathi-Serve has medians of 1,730 prompt and 415 output tokens."""
    rows = read_trace(DATA / "sarathi_serve" / "sharegpt_8k_filtered_stats_llama2_tokenizer.csv")
    middle = len(rows) // 2
    assert len(rows) == 30_731
    assert sorted(row.prompt_tokens for row in rows)[middle] == 1730
    assert sorted(row.output_tokens for row in rows)[middle] == 415
