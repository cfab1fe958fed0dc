"""The work list of attention in the interpreter."""

from __future__ import annotations

import pytest
import torch

from draftgate.backends.engine.kernels import attention_work_ref
from draftgate.backends.engine.kernels.attention_work import plan_work
from draftgate.backends.engine.kernels.paged_attention_ref import BlockTables, DraftTrees
from tests.examples import grid

_RANDOM = torch.Generator().manual_seed(1)


def _ragged(sequences: int, longest: int) -> list[tuple[int, int]]:
    """Return random query and context lengths of sequences."""
    tokens = torch.randint(0, 40, (sequences,), generator=_RANDOM)
    contexts = tokens + torch.randint(0, longest, (sequences,), generator=_RANDOM)
    return list(zip(tokens.tolist(), contexts.tolist(), strict=True))


_STEPS = {
    "one": [(1, 40_000)],
    "skewed": [(1, 1024)] * 63 + [(1, 32_768)],
    "even": [(1, 8192)] * 64,
    "ragged": _ragged(40, 20_000),
    "chunk": [(500, 9000), (0, 0), (1, 3)],
    "padding alone": [(0, 0)] * 3,
}


@pytest.mark.parametrize(
    ("step", "window", "is_limited"),
    grid(
        _STEPS,
        (None, 700),
        (False, True),
        quick=lambda step, window, limited: step == "ragged" or (window is None) == limited,
    ),
)
def test_list_equals_the_reference(step: str, window: int | None, *, is_limited: bool) -> None:
    """The kernel lists the same blocks, intervals and slots, also if slots limit the cuts."""
    query_lens, contexts = map(list, zip(*_STEPS[step], strict=True))
    tokens = sum(query_lens) + 5
    cu_query_lens = torch.tensor([0, *query_lens]).cumsum(0).int()
    context_lens = torch.tensor(contexts, dtype=torch.int32)
    draft_starts = context_lens - torch.tensor(query_lens, dtype=torch.int32) // 2
    slots = tokens * 8 if is_limited else None
    work = plan_work(
        torch.empty(tokens, 8, 16),
        torch.empty(4, 16, 16),
        cu_query_lens,
        context_lens,
        BlockTables(torch.empty(0), torch.empty(0), 4000),
        block_size=16,
        window=window,
        trees=DraftTrees(torch.empty(0), draft_starts, torch.empty(0)),
        programs=264,
        slots=slots,
    )
    expected = attention_work_ref.plan_work(
        cu_query_lens,
        context_lens,
        draft_starts,
        tokens=tokens,
        block_tokens=4,
        kv_heads=2,
        window=window,
        split_size=512,
        key_tile=64,
        programs=264,
        slots=work.slots,
    )
    for found, wanted in zip(work[:3], expected[:3], strict=True):
        assert torch.equal(found, wanted)
