"""The launches of attention in a step of several layers."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

pytest.importorskip("triton")

from draftgate.backends.engine.inputs import AttentionSpans, RaggedSpans, StepInputs
from draftgate.backends.engine.kernels.paged_attention_ref import BlockTables
from draftgate.backends.engine.operators.triton import TritonOperators
from tests.engine.tiny_model import tiny_config
from tests.kernels.compiling import launches_of, meta_tensor


def test_step_lists_its_work_once_for_each_window() -> None:
    """Layers add a kernel of attention and a merge, and only their first window adds a list."""
    config = tiny_config()
    operators = TritonOperators(config, {config.rope: (meta_tensor(1), meta_tensor(1))})
    rows, index = 64, torch.int32
    wide = meta_tensor(rows, dtype=torch.int64)
    ragged = RaggedSpans(
        meta_tensor(rows + 1, dtype=index),
        meta_tensor(rows, dtype=index),
        BlockTables(meta_tensor(8, dtype=index), meta_tensor(rows, dtype=index), 2048),
        wide,
        meta_tensor(rows, dtype=index),
        meta_tensor(rows, dtype=index),
        16,
    )
    inputs = StepInputs(wide, wide, wide, AttentionSpans(), wide, rows, ragged)
    queries = meta_tensor(rows, config.num_heads, config.head_dim)
    layer_kv = meta_tensor(2 * config.num_kv_heads, 1 << 16, config.head_dim)

    def launches(windows: list[int | None]) -> Counter[str]:
        def attend_all() -> None:
            step = operators.begin(inputs)
            for window in windows:
                operators.attend(step, queries, layer_kv, window)

        return Counter(launch.name for launch in launches_of(attend_all))

    one = {"_work_kernel": 1, "_attention_kernel": 1, "_merge_kernel": 1}
    assert launches([None]) == one
    assert launches([None] * 8) == {**dict.fromkeys(one, 8), "_work_kernel": 1}
    assert launches([None, 512] * 4) == {**dict.fromkeys(one, 8), "_work_kernel": 2}
