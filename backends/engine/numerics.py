"""Dtype and numerics class: what must be equal for bits to be equal (contract)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Final

import torch

from backends.engine.checkpoint import Checkpoint

FLOAT32_PARAMETERS: Final = 50_000_000
"""Below this, `auto` computes in float32 on a CPU: exact, and dispatch dominates anyway."""

DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

DEVICES: Final = ("auto", "cpu", "cuda")

STORED: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes by the name that safetensors gives them."""


def choose_device(name: str) -> torch.device:
    """Return the device that `--device` means. The engine runs on CPUs so far: `auto` is one, too.

    Raises:
        ValueError: no such device, or a GPU was asked for.
    """
    if name not in DEVICES:
        raise ValueError(f"unknown device {name!r}; known: {', '.join(DEVICES)}")
    if name == "cuda":
        raise ValueError("device cuda: the engine runs on CPUs so far; use --device cpu or auto")
    return torch.device("cpu")


def choose_dtype(name: str, directory: Path, device: str = "cpu") -> torch.dtype:
    """Return the dtype that `--dtype` means for a checkpoint on a device, `cpu` or `cuda`.

    `auto` is the dtype most of the checkpoint's weights have on a GPU; on a CPU float32 below
    `FLOAT32_PARAMETERS`, else bfloat16 where the processor multiplies it natively.

    Raises:
        ValueError: no such dtype, or none for this device.
        CheckpointError: the weights are missing or damaged.
    """
    if name == "auto":
        checkpoint = Checkpoint(directory)
        if device == "cuda":
            return _stored_dtype(checkpoint)
        small = checkpoint.num_parameters < FLOAT32_PARAMETERS
        native = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # noqa: SLF001 (no public one)
        return torch.float32 if small or not native else torch.bfloat16
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}; known: auto, {', '.join(DTYPES)}")
    if name == "float16" and device == "cpu":
        raise ValueError("dtype float16 needs a GPU; on a CPU use bfloat16 or float32")
    return DTYPES[name]


def _stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    num_bytes = Counter[str]()
    for stored in checkpoint.tensors.values():
        if stored.dtype in STORED:
            num_bytes[stored.dtype] += stored.num_bytes
    return STORED[num_bytes.most_common(1)[0][0]] if num_bytes else torch.float32


def numerics_class(checkpoint_hash: str, dtype: torch.dtype, operators: str, *, exact: bool) -> str:
    """Return the name of the class: checkpoint, dtype, device, libraries, threads, exactness.

    Texts are promised to be equal between workers of one class (contract). `exact`: a row's bits
    do not depend on what is computed with it, and the worker has checked that.

    Args:
        operators: the name of what computes between the products.
    """
    torch_name = f"torch-{torch.__version__}"
    parts = (
        checkpoint_hash,
        str(dtype).removeprefix("torch."),
        _cpu(),
        torch_name if operators == torch_name else f"{torch_name}-{operators}",
        f"threads-{torch.get_num_threads()}",
        "exact" if exact else "inexact",
    )
    return "/".join(parts)


def _cpu() -> str:
    """Return the processor's instruction set and make: libraries choose kernels by both."""
    parts = ["cpu", torch.backends.cpu.get_cpu_capability().lower()]
    if torch.cpu._is_avx512_bf16_supported():  # noqa: SLF001 (no public one)
        parts.append("bf16")
    if torch.cpu._is_amx_tile_supported():  # noqa: SLF001 (no public one)
        parts.append("amx")
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    fields = {name.strip(): value.strip() for name, _, value in (i.partition(":") for i in lines)}
    make = [fields[name] for name in ("vendor_id", "cpu family", "model") if name in fields]
    return "-".join([*parts, *make])
