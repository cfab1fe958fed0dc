"""Dtype and numerics class: what must be equal for bits to be equal (contract)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from backends.engine.weights import checkpoint_hash, count_parameters

FLOAT32_PARAMETERS: Final = 50_000_000
"""Below this, `auto` computes in float32 on a CPU: exact, and dispatch dominates anyway."""

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def choose_dtype(name: str, directory: Path) -> torch.dtype:
    """Return the dtype that `--dtype` means for a checkpoint on a CPU.

    Raises:
        ValueError: no such dtype.
        CheckpointError: the weights are missing or damaged.
    """
    if name == "auto":
        small = count_parameters(directory) < FLOAT32_PARAMETERS
        native = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # noqa: SLF001 (no public one)
        return torch.float32 if small or not native else torch.bfloat16
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}; known: auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def numerics_class(directory: Path, dtype: torch.dtype, *, exact: bool) -> str:
    """Return the name of the class: checkpoint, dtype, device, library, threads, exactness."""
    parts = (
        checkpoint_hash(directory),
        str(dtype).removeprefix("torch."),
        f"cpu-{torch.backends.cpu.get_cpu_capability().lower()}",
        f"torch-{torch.__version__}",
        f"threads-{torch.get_num_threads()}",
        "exact" if exact else "inexact",
    )
    return "/".join(parts)
