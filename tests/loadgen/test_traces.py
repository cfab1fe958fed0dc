"""Recorded traffic: the forms that are read, and rows that hit their timestamps."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.traces import TraceRow, at_rate, parse_trace, read_trace, scaled

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
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
OWN = """{"at_s": 3, "prompt_tokens": 10, "output_tokens": 2, "class": "batch", "tenant": "a"}

{"at_s": 3.25, "prompt_tokens": 11, "output_tokens": 3, "hash_ids": [1], "block_tokens": 16}
"""


def parse(text: str) -> tuple[TraceRow, ...]:
    return parse_trace(text.splitlines(keepends=True), "a trace")


def test_every_known_form_is_told_by_its_fields() -> None:
    """Azure, BurstGPT, Mooncake and our own rows come out alike, the first at 0, in order."""
    first, second = parse(AZURE)
    assert (first.at_s, first.prompt_tokens, first.output_tokens) == (0.0, 4808, 10)
    assert second.at_s == pytest.approx(0.052, abs=1e-6)
    assert parse(BURSTGPT) == (
        TraceRow(0.0, 472, 18, class_name="Conversation log"),
        TraceRow(40.5, 1087, 230, class_name="API log"),
    )
    assert parse(MOONCAKE) == (TraceRow(0.0, 600, 5, (7, 8)), TraceRow(3.0, 700, 6, (7, 9)))
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
        (OWN + '{"at_s": 1, "prompt_tokens": -1, "output_tokens": 1}\n', "must not be negative"),
        ("a,b\n1,2\n", "no known trace"),
    ],
)
def test_a_damaged_trace_names_line_and_field(text: str, words: str) -> None:
    """The message has the file, the line and what was wrong there."""
    with pytest.raises(ValueError, match=f"a trace.*{words}"):
        parse(text)


def test_time_may_be_scaled_to_a_speed_or_a_rate() -> None:
    """Twice the speed halves every instant; a rate fixes the mean gap; lengths stay."""
    rows = parse(OWN)
    assert [row.at_s for row in scaled(rows, 2.0)] == [0.0, 0.125]
    assert [row.at_s for row in at_rate(rows, 0.5)] == [0.0, 2.0]
    assert at_rate(rows, 0.5)[1].prompt_tokens == 11
    with pytest.raises(ValueError, match="all came at once"):
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
    """Every row is there, in order, and within the length of the recording."""
    rows = read_trace(DATA / path)
    assert len(rows) == count
    instants = [row.at_s for row in rows]
    assert instants == sorted(instants)
    assert instants[0] == 0.0
    assert 1000 < instants[-1] < 4000
    assert all(len(row.prefix_ids) * 512 >= row.prompt_tokens for row in rows if row.prefix_ids)
