"""A replayed trace has the recorded lengths and shares the recorded blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, takewhile

import pytest

from draftgate.loadgen.planning.traces import TraceRow
from draftgate.loadgen.workloads.replay import Replay
from tests.loadgen.workload_requests import COUNTER, WordCounter, settings_of


def row_of(prompt_tokens: int, prefix_ids: tuple[int, ...] = (), **more) -> TraceRow:
    """Return a recorded request whose blocks have 64 tokens."""
    fields = {"output_tokens": 9, "block_tokens": 64} | more
    return TraceRow(0.0, prompt_tokens, prefix_ids=prefix_ids, **fields)


def common_length(first: Sequence, second: Sequence) -> int:
    """Return the number of equal leading items."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_a_replay_has_the_lengths_of_the_trace() -> None:
    """Prompts and responses have the lengths of the rows, with and without blocks."""
    rows = [
        row_of(10),
        row_of(500, output_tokens=77, class_name="batch", tenant="acme"),
        row_of(64 * 3, (1, 2, 3)),
        row_of(64 * 2 + 5, (1, 2, 9)),
        row_of(64 * 2 + 100, (1, 2)),
        row_of(40, (1, 2)),
    ]
    replayed = Replay(rows, settings_of(0))
    for index, one in enumerate(rows):
        question = replayed.request(index)
        assert COUNTER.count(question.prompt) == one.prompt_tokens
        assert question.max_tokens == one.output_tokens
    assert (replayed.request(1).class_name, replayed.request(1).tenant) == ("batch", "acme")
    with pytest.raises(IndexError):
        replayed.request(len(rows))


def test_replayed_prompts_share_exactly_the_blocks_of_equal_ids() -> None:
    """Two prompts share the blocks with equal leading ids, and then less than 4 tokens."""
    ids = [(0, 1, 2, 3), (0, 1, 2, 4), (0, 1, 5, 3), (6, 1, 2, 3), (0, 1), (), ()]
    rows = [row_of(256, one) for one in ids]
    replayed = Replay(rows, settings_of(0))
    prompts = [replayed.request(index).prompt for index in range(len(rows))]
    for i, first in enumerate(ids):
        for j, second in enumerate(ids[:i]):
            shared = common_length(first, second) * 64 * 4
            common = common_length(prompts[i], prompts[j])
            assert shared <= common < shared + 16


def test_a_replay_is_reproducible() -> None:
    """A second replay in reverse order has the same prompts."""
    rows = [row_of(100 + k, (k % 3, k)) for k in range(20)]
    first, again = (Replay(rows, settings_of(0)) for _ in range(2))
    forwards = [first.request(index) for index in range(20)]
    assert [again.request(index) for index in reversed(range(20))] == forwards[::-1]
    assert Replay(rows, settings_of(1)).request(0) != forwards[0]


def test_rows_without_blocks_share_nothing(tmp_path) -> None:
    """Prompts differ within their first words, even if the text has a single line."""
    (tmp_path / "line").write_text("the same again ")
    rows = [row_of(200)] * 10
    replayed = Replay(rows, settings_of(0, tmp_path / "line"))
    prompts = [replayed.request(index).prompt for index in range(10)]
    assert max(common_length(a, b) for a, b in pairwise(prompts)) < 16


def test_a_replay_fits_the_server_and_keeps_shared_prefixes() -> None:
    """Prompts that are too long lose their ends and keep the shared beginning."""
    rows = [row_of(5000, (*range(70), k), output_tokens=4000) for k in (100, 200)]
    replayed = Replay(rows, settings_of(0, max_model_len=1024))
    questions = [replayed.request(index) for index in range(2)]
    assert all(COUNTER.count(q.prompt) + q.max_tokens <= 1024 for q in questions)
    assert questions[0].prompt == questions[1].prompt


def test_an_exact_counter_gives_exact_lengths() -> None:
    """Passages have exactly the requested lengths if the counter is exact."""
    rows = [row_of(700), row_of(64 * 4, (1, 2, 3, 4))]
    replayed = Replay(rows, settings_of(0, counter=WordCounter()))
    assert WordCounter().count(replayed.request(0).prompt) == 700
    assert WordCounter().count(replayed.request(1).prompt) == pytest.approx(256, abs=4)
