"""The references of a step's decisions against the host's own: walks, budgets and look-ups."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.engine.kernels import accept_walk_ref, ngram_scan_ref, trim_drafts_ref
from draftgate.backends.engine.kernels.accept_walk_ref import NO_DRAFT
from draftgate.backends.engine.proposers.ngram import Place
from draftgate.backends.engine.proposers.ngram_index import Match
from tests.kernels.step_cases import (
    TrimCase,
    drafted_rows,
    never_stop,
    random_tree,
    trim_case,
    walk_case,
)

_TREES = st.tuples(st.integers(0, 12), st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 1 << 30))


@given(st.lists(st.none() | _TREES, max_size=5))
def test_batched_walk_equals_the_walk_of_each_draft(
    trees: list[tuple[int, float, int] | None],
) -> None:
    """A ragged batch is walked as the host walks each draft; padding emits nothing."""
    draws = random.Random(len(trees))
    sampled: list[list[int]] = []
    drafts, parents, paths = [], [], []
    for tree in trees:
        if tree is None:
            sampled.append([])
            paths.append(None)
            continue
        tokens, branching, seed = tree
        draft = random_tree(tokens, random.Random(seed), branching)
        own_drafts, own_parents = drafted_rows(draft)
        # Mostly tokens that some draft has, so that walks are long.
        sampled.append([draws.choice([*own_drafts[1:], 77]) for _ in own_drafts])
        drafts += own_drafts
        parents += own_parents
        paths.append(draft.accepted_places(sampled[-1], per_row=True))
    cu_rows = torch.tensor([0, *map(len, sampled)]).cumsum(0).to(torch.int32)
    walked = accept_walk_ref.accept_walk(
        torch.tensor([token for own in sampled for token in own], dtype=torch.int64),
        torch.tensor(drafts, dtype=torch.int64),
        torch.tensor(parents, dtype=torch.int32),
        cu_rows,
        never_stop(len(trees)),
        torch.zeros(len(trees), dtype=torch.int32),
        max_rows=13,
    )
    for index, (path, own) in enumerate(zip(paths, sampled, strict=True)):
        rows = [] if path is None else [0, *(place + 1 for place in path)]
        behind = [-1] * (len(own) - len(rows))
        place = slice(int(cu_rows[index]), int(cu_rows[index + 1]))
        assert walked.num_emitted[index] == len(rows)
        assert walked.emitted[place].tolist() == [own[row] for row in rows] + behind
        assert walked.kept_rows[place].tolist() == rows + behind
        assert walked.finished[index] == 0


@pytest.mark.parametrize("seed", range(4))
def test_walk_stops_at_the_first_rule(seed: int) -> None:
    """A walk is that without rules, cut behind the first eos that counts and at what remains."""
    case = walk_case(seed, branching=0.3, eos=range(0, 50, 5), budget=8)
    free = accept_walk_ref.accept_walk(
        *case.arguments()[:4],
        never_stop(len(case.seq_lens)),
        case.seq_lens.clone(),
        max_rows=case.max_rows,
    )
    walked = accept_walk_ref.accept_walk(
        *case.arguments()[:5], case.seq_lens.clone(), max_rows=case.max_rows
    )
    outcomes = set()
    for sequence, (begin, end) in enumerate(
        zip(case.cu_rows[:-1].tolist(), case.cu_rows[1:].tolist(), strict=True)
    ):
        text = free.emitted[begin:end][: free.num_emitted[sequence]].tolist()
        ends = [] if case.stop.ignore_eos[sequence] else [t % 5 == 0 for t in text]
        count = min([int(case.stop.remaining[sequence]), *(i + 1 for i, e in enumerate(ends) if e)])
        kept = text[:count]
        finished = begin < end and (count <= len(text))
        outcomes.add((finished, bool(kept)))
        assert walked.emitted[begin:end].tolist() == kept + [NO_DRAFT] * (end - begin - len(kept))
        assert walked.num_emitted[sequence] == len(kept)
        assert walked.finished[sequence] == finished
    assert len(outcomes) >= 3


def test_walk_extends_the_history() -> None:
    """Emitted tokens are appended to their sequence's row, and nothing else is written."""
    case = walk_case(5, branching=0.3)
    after = case.to("cpu")
    walked = accept_walk_ref.accept_walk(
        *after.arguments(), max_rows=case.max_rows, history=after.history
    )
    expected = case.history.tokens.clone()
    for sequence, count in enumerate(walked.num_emitted.tolist()):
        if count:
            begin, first = int(case.cu_rows[sequence]), int(case.seq_lens[sequence])
            row = expected[int(case.history.rows[sequence])]
            row[first : first + count] = walked.emitted[begin : begin + count]
    assert torch.equal(after.history.tokens, expected)
    assert torch.equal(after.seq_lens, case.seq_lens + walked.num_emitted)


def test_too_many_rows_are_refused() -> None:
    """A sequence with more rows than announced is an error, since the kernel would cut it."""
    case = walk_case(0, branching=0.0)
    with pytest.raises(ValueError, match="150 rows"):
        accept_walk_ref.accept_walk(*case.arguments(), max_rows=149)


def _ranked(case: TrimCase, sequence: int, slot: int) -> tuple[float, int, int]:
    """Returns what slots are ordered by, the best first."""
    return (-float(case.survivals[sequence, slot]), slot, sequence)


@given(
    st.integers(1, 9),
    st.integers(1, 7),
    st.integers(0, 1 << 30),
    st.sampled_from([0, 1, 3]),
    st.integers(-2, 40),
)
def test_trimmed_drafts_are_the_likeliest(
    sequences: int, max_slots: int, seed: int, levels: int, budget: int
) -> None:
    """Prefixes of existing slots use up the budget, and no dropped slot goes before a kept one."""
    case = trim_case(sequences, max_slots, seed, levels)
    trimmed = trim_drafts_ref.trim_drafts(*case.arguments(budget))
    kept, dropped = [], []
    for sequence, count in enumerate(trimmed.kept.tolist()):
        slots = int(case.valid[sequence]) if case.active[sequence] else 0
        slots = int((case.survivals[sequence, :slots] > 0).sum())
        assert 0 <= count <= slots
        kept += [_ranked(case, sequence, slot) for slot in range(count)]
        dropped += [_ranked(case, sequence, slot) for slot in range(count, slots)]
    assert len(kept) == min(max(budget, 0), case.slots())
    assert not kept or not dropped or max(kept) < min(dropped)


def test_rows_of_trimmed_drafts() -> None:
    """Each active sequence gets a row and one per kept slot, an inactive one none."""
    survivals = torch.tensor([[0.9, 0.5], [0.8, 0.7], [0.6, 0.5], [0.0, 0.0]])
    valid, active = torch.tensor([2, 2, 2, 2]), torch.tensor([True, False, True, True])
    trimmed = trim_drafts_ref.trim_drafts(survivals, valid, active, torch.tensor(3))
    assert trimmed.kept.tolist() == [2, 0, 1, 0]
    assert trimmed.cu_rows.tolist() == [0, 3, 3, 5, 6]


def _search(tokens: list[int], min_n: int, max_n: int) -> Match | None:
    """Looks for the longest, then the latest, n-gram of the end that ended before."""
    for n in range(max_n, min_n - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[len(tokens) - n :]:
                return Match(end, n)
    return None


@given(st.lists(st.lists(st.integers(0, 2), max_size=24), min_size=1, max_size=4), st.data())
def test_looked_up_drafts_are_those_of_the_host(
    texts: list[list[int]], data: st.DataObject
) -> None:
    """The longest, then latest, earlier n-gram goes on as the n-gram proposer's places do."""
    max_n = data.draw(st.integers(1, 8))
    min_n = data.draw(st.integers(1, max_n))
    num_drafts = data.draw(st.integers(1, 9))
    rows = data.draw(st.permutations(range(len(texts))))
    history = torch.full((len(texts), 24), 1, dtype=torch.int32)
    for row, text in zip(rows, texts, strict=True):
        history[row, : len(text)] = torch.tensor(text, dtype=torch.int32)
    found = ngram_scan_ref.ngram_scan(
        history,
        torch.tensor(rows),
        torch.tensor([len(text) for text in texts]),
        num_drafts=num_drafts,
        min_n=min_n,
        max_n=max_n,
    )
    for index, text in enumerate(texts):
        match = _search(text, min_n, max_n)
        length = match.length if match else 0
        draft = Place(text, match).continuation(num_drafts) if match else [NO_DRAFT] * num_drafts
        assert found.drafts[index].tolist() == list(draft)
        assert found.match_lens[index] == length
        assert found.valid[index] == (num_drafts if match else 0)


@pytest.mark.parametrize(
    ("num_drafts", "min_n", "max_n"), [(0, 1, 3), (2, 0, 3), (2, 4, 3), (2, 1, 9)]
)
def test_sizes_of_look_ups_are_checked(num_drafts: int, min_n: int, max_n: int) -> None:
    """Lengths that a look-up cannot have are refused."""
    with pytest.raises(ValueError, match="token"):
        ngram_scan_ref.check_sizes(num_drafts, min_n, max_n)
