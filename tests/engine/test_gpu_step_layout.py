"""The layout of a step for a GPU: shapes, fields and masks, tested without a GPU."""

from __future__ import annotations

from random import Random

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from draftgate.backends.core.drafts import NO_DRAFT, ROOT, Draft
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.core.steps import SequenceWork, StepPlan
from draftgate.backends.engine.gpu.layout import HostFields, StepFields, StepLayout, StepShape
from draftgate.backends.engine.gpu.packing import PackedFeeds, pack_feeds
from draftgate.backends.engine.gpu.shapes import ROW_BUCKETS, Shapes
from draftgate.backends.engine.inputs import Feed, feed_of, lay_out
from draftgate.backends.engine.kv_pool import BLOCK_TOKENS
from draftgate.backends.engine.linear import Linear
from draftgate.backends.engine.operators.ragged import ragged_spans
from draftgate.backends.engine.sampler import SamplingColumns
from draftgate.backends.types import ResumedChoice
from draftgate.policies.speculation.baselines import Off
from tests.engine.harness import request
from tests.engine.step_logits import Table

CPU = torch.device("cpu")


@given(
    rows=st.integers(1, 600),
    sequences=st.integers(1, 80),
    context=st.integers(1, 40_000),
    max_sequences=st.integers(1, 80),
    page_tokens=st.sampled_from([16, 24, 128]),
)
def test_every_step_fits_its_shape(
    rows: int, sequences: int, context: int, max_sequences: int, page_tokens: int
) -> None:
    """Rows, sequences and pages fit the shape, and captured shapes are in the list."""
    shapes = Shapes(ROW_BUCKETS[-1], max_sequences, 40_000, page_tokens)
    sequences = min(sequences, rows, max_sequences)
    shape, captured = shapes.shape(rows, sequences, context)
    assert shape.rows >= rows
    assert shape.sequences >= sequences
    assert shape.pages * page_tokens >= context
    assert captured == (rows <= ROW_BUCKETS[-1])
    assert not captured or shape in set(shapes.captured())


def test_largest_shape_is_captured_first() -> None:
    """The engine captures the largest shape first, so that other shapes reuse its memory."""
    shapes = list(Shapes(ROW_BUCKETS[-1], 64, 30_000, BLOCK_TOKENS).captured())
    assert shapes == sorted(shapes, reverse=True)
    assert len(set(shapes)) == len(shapes) == 3 * len(ROW_BUCKETS)
    assert shapes[0] == StepShape(512, 64, 2048)
    assert not list(Shapes(0, 64, 30_000, BLOCK_TOKENS).captured())


@pytest.mark.parametrize("tokens", range(1, 9))
def test_verification_of_64_sequences_is_captured_without_much_padding(tokens: int) -> None:
    """Drafts of up to 7 tokens for 64 sequences run in a graph, with less than 32 rows of
    padding."""
    shapes = Shapes(ROW_BUCKETS[-1], 64, 30_000, BLOCK_TOKENS)
    for rows in range(64 * (tokens - 1) + 1, 64 * tokens + 1):
        shape, captured = shapes.shape(rows, min(rows, 64), 8192)
        assert captured
        assert shape.rows - rows < 32


def test_fields_written_on_the_host_are_read_on_the_device() -> None:
    """Fields are aligned, do not overlap, and have the requested padding."""
    layout = StepLayout(StepShape(rows=7, sequences=3, pages=5))
    memory = torch.full((layout.num_bytes,), 99, dtype=torch.uint8)
    host, fields = HostFields(layout, memory), layout.fields(memory)
    names = [name for name in fields if name != "tables"]
    for number, name in enumerate(names):
        host.write(name, [number, number], number + 100)
    host.tables[:] = 1000
    for number, name in enumerate(names):
        assert fields[name].tolist()[:2] == [number, number]
        assert set(fields[name].tolist()[2:]) == {number + 100}
        assert (fields[name].data_ptr() - memory.data_ptr()) % 64 == 0
    assert fields["tables"].tolist() == [1000] * 15
    assert layout.used_bytes(15) == layout.num_bytes


def test_sampling_parameters_are_those_of_the_step() -> None:
    """Rows have the parameters of their sequence and the position of their token, whatever the
    sequences of the last step were."""
    rng, columns = Random(0), SamplingColumns()
    sequences = [
        Sequence.for_choice(key, request(str(key), [1], Off(), **own), ResumedChoice(key % 2, ()))
        for key, own in enumerate(
            ({}, {"seed": 2}, {"seed": 2, "top_k": 3}, {"temperature": 0.5, "min_p": 0.25})
        )
    ]
    for _ in range(60):
        chosen = rng.choice((sequences[:2], sequences[1:], sequences[::2]))
        drafts = rng.choice((None, NO_DRAFT, Draft((4, 5)), Draft((4, 5, 6), (ROOT, 0, ROOT))))
        work = [
            SequenceWork(sequence, rng.randrange(9), (7,), drafts is not None, drafts or NO_DRAFT)
            for sequence in chosen
        ]
        work.append(SequenceWork(sequences[0], 3, (1, 2), rng.random() < 0.5))
        expected = [
            (part.sequence.request.sampling, part.sequence.choice, part.confirmed_end + depth)
            for part in work
            if part.samples
            for depth in (0, *part.draft.depths)
        ]
        found = columns.of_plan(StepPlan(tuple(work)))
        for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
            own = [getattr(sampling, name) for sampling, *_ in expected]
            assert found[name].tolist() == pytest.approx(own)
        assert found["choice"].tolist() == [choice for _, choice, _ in expected]
        assert found["position"].tolist() == [position for *_, position in expected]


@given(seed=st.integers(0, 10_000), confirmed=st.integers(1, 5), start=st.integers(0, 40))
def test_masks_hold_the_ancestors_of_each_row(seed: int, confirmed: int, start: int) -> None:
    """Each row's mask contains exactly its ancestors, for any tree in any blocks."""
    rng = Random(seed)
    size = rng.randrange(65)
    parents = tuple(rng.randrange(ROOT, place) if place else ROOT for place in range(size))
    draft = Draft(tuple(range(size)), parents).depth_first()
    blocks = rng.sample(range(50), 8)
    works = [
        SequenceWork(Table([60, 61]), 3, (1, 2), False),
        SequenceWork(Table(blocks), start, (5,) * confirmed, True, draft),
    ]
    packed = pack_feeds(map(feed_of, works))
    rows = confirmed + len(draft)
    assert packed.spans.query_starts == [0, 2, 2 + rows]
    assert packed.spans.context_lens == [5, start + rows]
    end = start + confirmed
    below = [end + depth - 1 for depth in draft.depths]
    assert packed.spans.positions[2:] == [*range(start, end), *below]
    own = packed.spans.ancestors[2:]
    if draft.is_chain:
        assert own == [0] * rows
        assert packed.spans.draft_starts == [5, start + rows]
        return
    assert packed.spans.draft_starts == [5, start + confirmed]
    assert own[:confirmed] == [0] * confirmed
    for place, mask in enumerate(own[confirmed:]):
        parent = draft.parent(place)
        before = own[confirmed + parent] if parent != ROOT else 0
        assert mask == before | 1 << place


def test_tree_larger_than_a_mask_is_rejected() -> None:
    """A tree of 64 tokens fits a mask, and a tree of 65 tokens is rejected."""

    def packed(tokens: int) -> PackedFeeds:
        star = Draft(tuple(range(tokens)), (ROOT,) * tokens)
        return pack_feeds([feed_of(SequenceWork(Table(list(range(8))), 0, (1,), True, star))])

    assert packed(64).spans.ancestors == [0, *(1 << place for place in range(64))]
    with pytest.raises(ValueError, match="a draft tree has 65 tokens, more than the maximum of 64"):
        packed(65)


def test_packed_spans_equal_separately_copied_spans() -> None:
    """Packed spans equal spans copied separately, and padding sequences have no rows."""
    tree = Draft((1, 2, 3, 4), (ROOT, 0, ROOT, 2))
    works = [
        SequenceWork(Table([3, 9, 4]), 30, (7, 8), True, tree),
        SequenceWork(Table([5]), 2, (6,), True),
    ]
    feeds = [feed_of(work) for work in works]
    packed = pack_feeds(feeds)
    layout = StepLayout(StepShape(rows=8, sequences=4, pages=16))
    memory = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    packed.write(HostFields(layout, memory), dump_slot=77)
    inputs = StepFields(layout, memory, BLOCK_TOKENS).inputs(len(packed.rows.sample_rows))
    found, direct = inputs.ragged, ragged_spans(lay_out(feeds).spans, CPU)
    assert found.query_starts.tolist() == [*direct.query_starts.tolist(), 7, 7]
    assert inputs.slots.tolist()[7:] == [77]
    assert inputs.sample_rows.tolist() == [1, 2, 3, 4, 5, 6]
    assert found.tables.blocks.tolist() == [3, 9, 4, 5] + [0] * 60
    assert found.tables.starts.tolist() == [0, 3, 0, 0]
    assert direct.tables.blocks.tolist() == [3, 9, 4, 5]
    assert direct.tables.starts.tolist() == [0, 3]
    assert direct.tables.longest == 3
    assert found.tables.longest == 16
    for name in ("ancestors", "positions"):
        assert torch.equal(getattr(found, name)[:7], getattr(direct, name))
    for name in ("context_lens", "draft_starts"):
        assert torch.equal(getattr(found, name)[:2], getattr(direct, name))
    assert found.page_tokens == direct.page_tokens == BLOCK_TOKENS


def test_step_copies_only_the_pages_of_its_contexts() -> None:
    """One long context among 255 short ones does not lengthen their page tables."""
    pages = list(range(8192))
    contexts = [131_072] + [1024] * 255
    packed = pack_feeds(Feed([1], context - 1, pages, 1) for context in contexts)
    assert packed.num_pages == 8192 + 255 * 64
    shape = Shapes(0, 256, 131_072, BLOCK_TOKENS).shape(256, 256, packed.longest_context)[0]
    layout = StepLayout(shape)
    assert layout.num_bytes - layout.used_bytes(0) == 8_388_608
    assert layout.used_bytes(packed.num_pages) - layout.used_bytes(0) == 98_048
    memory = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    packed.write(HostFields(layout, memory), dump_slot=0)
    tables = StepFields(layout, memory, BLOCK_TOKENS).inputs(256).ragged.tables
    for sequence, context in ((0, 131_072), (1, 1024), (255, 1024)):
        start = int(tables.starts[sequence])
        used = context // BLOCK_TOKENS
        assert tables.blocks[start : start + used].tolist() == pages[:used]


@pytest.mark.parametrize("wide", [False, True])
def test_tiled_product_gives_a_row_the_same_bits_in_any_batch(*, wide: bool) -> None:
    """A tiled product on a GPU multiplies a fixed shape for any number of rows."""
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(s, generator=generator) for s in ((48, 1000), (48,), (70, 1000)))
    linear = Linear(weight, bias, pack=False)
    linear._tile_rows = 16
    multiply = linear.float32 if wide else linear
    together = multiply(x)
    torch.testing.assert_close(together, x @ weight.T + bias, rtol=1e-4, atol=1e-4)
    for first, last in ((0, 1), (3, 20), (69, 70), (0, 64)):
        assert torch.equal(multiply(x[first:last]), together[first:last])
