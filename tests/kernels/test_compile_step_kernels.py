"""The kernels of a step's decisions compile for a Hopper GPU, on machines without one."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from backends.engine.kernels import accept_walk, ngram_scan, trim_drafts
from tests.kernels.compiling import compile_for_hopper

_HISTORY = {
    **dict.fromkeys(("history_ptr", "rows_ptr", "lengths_ptr"), "*i32"),
    **dict.fromkeys(("history_stride", "max_len"), "i32"),
    "best_ptr": "*i64",
}


@pytest.mark.parametrize("flags", ["*i8", "*i1"])
@pytest.mark.parametrize("num_eos", [0, 3])
@pytest.mark.parametrize("has_history", [False, True])
def test_accept_walk_kernel_compiles(flags: str, num_eos: int, has_history: bool) -> None:
    """The walk compiles for 64 drafts, with and without eos tokens and a history."""
    indices = (
        "num_emitted_ptr",
        "kept_rows_ptr",
        "draft_parents_ptr",
        "cu_rows_ptr",
        "remaining_ptr",
        "seq_lens_ptr",
    )
    types = {
        **dict.fromkeys(("emitted_ptr", "sampled_ptr", "draft_tokens_ptr", "eos_ptr"), "*i64"),
        **dict.fromkeys(indices, "*i32"),
        "finished_ptr": "*i8",
        "ignore_eos_ptr": flags,
        "history_stride": "i32",
    }
    constants: dict[str, Any] = {"NUM_EOS": num_eos, "ROWS": 128}
    history = ("history_ptr", "history_rows_ptr")
    if has_history:
        types |= dict.fromkeys(history, "*i32")
    else:
        constants |= dict.fromkeys(history)
    compile_for_hopper(accept_walk._accept_walk_kernel, types, constants, num_warps=1)


@pytest.mark.parametrize("flags", ["*i8", "*i1"])
@pytest.mark.parametrize(("sequences", "slots", "warps"), [(512, 64, 32), (64, 8, 1), (1, 1, 1)])
def test_trim_kernel_compiles(flags: str, sequences: int, slots: int, warps: int) -> None:
    """The trim compiles for the largest batch, a common one and the smallest."""
    types = {
        **dict.fromkeys(("kept_ptr", "cu_rows_ptr", "valid_ptr", "budget_ptr"), "*i32"),
        **dict.fromkeys(("row_stride", "num_sequences", "num_slots"), "i32"),
        "survivals_ptr": "*fp32",
        "active_ptr": flags,
    }
    constants = {"SEQUENCES": sequences, "SLOTS": slots}
    compile_for_hopper(trim_drafts._trim_drafts_kernel, types, constants, num_warps=warps)


@pytest.mark.parametrize(("min_n", "max_n"), [(1, 8), (2, 2)])
def test_scan_kernel_compiles(min_n: int, max_n: int) -> None:
    """The scan compiles for the shortest and the longest n-grams."""
    constants = {"MIN_N": min_n, "MAX_N": max_n, "TILE": 256}
    compile_for_hopper(ngram_scan._scan_kernel, _HISTORY, constants, num_warps=2)


@pytest.mark.parametrize(("num_drafts", "padded"), [(1, 1), (5, 8), (64, 64)])
def test_finalise_kernel_compiles(num_drafts: int, padded: int) -> None:
    """The copy of the draft compiles for chains of any length."""
    types = _HISTORY | {"drafts_ptr": "*i64", "match_lens_ptr": "*i32", "valid_ptr": "*i32"}
    constants = {"NUM_DRAFTS": num_drafts, "DRAFTS_PAD": padded}
    compile_for_hopper(ngram_scan._finalise_kernel, types, constants, num_warps=1)
