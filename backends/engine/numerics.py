"""Chooses device and dtype, and names the numerics class, within which bits are equal."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from draftgate.backends.engine.checkpoint import Checkpoint
from draftgate.backends.engine.cpu_isa import ISAS, VARIABLE, requested_isa
from draftgate.backends.engine.linear import ONEDNN_BFLOAT16
from draftgate.backends.engine.operators.products import LANES, USES_AMX, multiplies_in_c
from draftgate.backends.engine.quantisation.fp8_kv import FP8

log = logging.getLogger(__name__)

FLOAT32_PARAMETERS: Final = 50_000_000
"""Number of weights below which `auto` is float32 on a CPU.

Float32 is exact, and dispatch dominates the time of small models.
"""

DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

KV_CACHE_DTYPES: Final = ("auto", "fp8")

DEVICES: Final = ("auto", "cpu", "cuda")

KV_SCALES: Final = (".k_scale", ".v_scale", ".kv_scale")
"""Ends of the names of stored scales for a KV cache, in checkpoints for vLLM."""

_FP8_CAPABILITY: Final = (8, 9)
"""Least compute capability of GPUs that convert FP8, for which Triton has the type."""

CPU: Final = torch.device("cpu")

STORED: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes by their names in safetensors."""


CUBLAS_WORKSPACES: Final = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
"""Workspaces that are too small for cuBLAS to split a sum.

The values are from vLLM's `batch_invariant.py` for Hopper. cuBLAS reads them at its first use.
"""


def choose_device(name: str, index: int = 0) -> torch.device:
    """Return the device for a value of `--device`. `auto` is a GPU if torch finds one.

    Args:
        name: the value of `--device`.
        index: index of the GPU.

    Raises:
        ValueError: the name is unknown, or the machine has no such device.
    """
    if name not in DEVICES:
        raise ValueError(f"unknown device {name!r}; known: {', '.join(DEVICES)}")
    found = torch.cuda.device_count() if name != "cpu" and torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not found):
        return torch.device("cpu")
    if index >= found:
        raise ValueError(
            f"device cuda: GPU {index} was requested, but the number of GPUs is {found}"
        )
    return torch.device("cuda", index)


def fix_sums() -> None:
    """Make cuBLAS add in a fixed order for products of one shape.

    Call this function before the first use of cuBLAS. A product with another number of rows may use
    another kernel (`linear.GPU_EXACT_ROWS`).
    """
    os.environ.update(CUBLAS_WORKSPACES)
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = False
    # Reduce in float32, without splitting a sum.
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    matmul.allow_fp16_reduced_precision_reduction = (False, False)


def choose_dtype(
    name: str, directory: Path, device: str = "cpu", *, packed: bool = False
) -> torch.dtype:
    """Return the dtype for a value of `--dtype`, a checkpoint, and a device, `cpu` or `cuda`.

    On a GPU, `auto` is the dtype of most weights in the checkpoint. On a CPU, `auto` is float32 for
    models with fewer than `FLOAT32_PARAMETERS` weights. For larger models, `auto` is bfloat16 if
    oneDNN or C multiplies it faster than float32. With packed weights, `auto` is float32, because
    their products round rows to int8 and take the same time for both.

    Raises:
        ValueError: the name is unknown, or the device does not support the dtype.
        CheckpointError: the weights are missing or damaged.
    """
    if name == "auto":
        checkpoint = Checkpoint(directory)
        if device == "cuda":
            return _stored_dtype(checkpoint)
        if packed:
            return torch.float32
        small = checkpoint.num_parameters < FLOAT32_PARAMETERS
        fast = ONEDNN_BFLOAT16 or multiplies_in_c(LANES)
        return torch.float32 if small or not fast else torch.bfloat16
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}; known: auto, {', '.join(DTYPES)}")
    if name == "float16" and device == "cpu":
        raise ValueError("dtype float16 needs a GPU; on a CPU use bfloat16 or float32")
    return DTYPES[name]


def choose_kv_dtype(
    name: str, directory: Path, dtype: torch.dtype, device: torch.device = CPU
) -> torch.dtype:
    """Return the dtype of keys and values for a value of `--kv-cache-dtype`.

    A log message reports scales for FP8 that the checkpoint stores, because the scale is always 1.

    Args:
        name: `auto` for the dtype of the weights, or `fp8`.
        directory: directory of the checkpoint.
        dtype: dtype of the weights.
        device: device of the KV cache.

    Raises:
        ValueError: the name is unknown, or the GPU does not convert FP8.
    """
    if name not in KV_CACHE_DTYPES:
        known = ", ".join(KV_CACHE_DTYPES)
        raise ValueError(f"unknown KV cache dtype {name!r}; known: {known}")
    if name == "auto":
        return dtype
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        raise ValueError(
            "--kv-cache-dtype fp8 needs a GPU with compute capability 8.9 (Ada, Hopper) or newer; "
            "use --kv-cache-dtype auto"
        )
    scales = [name for name in Checkpoint(directory).tensors if name.endswith(KV_SCALES)]
    if scales:
        log.warning("%s: --kv-cache-dtype fp8 ignores stored scales: %s", directory, scales[0])
    return FP8


def _stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    num_bytes = Counter[str]()
    for stored in checkpoint.tensors.values():
        if stored.dtype in STORED:
            num_bytes[stored.dtype] += stored.num_bytes
        elif stored.source is not None:  # blocks of a GGUF file
            num_bytes["BF16"] += stored.num_bytes
    return STORED[num_bytes.most_common(1)[0][0]] if num_bytes else torch.float32


def is_exact(
    test: Callable[[], bool],
    dtype: torch.dtype,
    device: torch.device = CPU,
    *,
    required: bool,
    packed: bool = False,
) -> bool:
    """Return whether a worker promises that its bits do not depend on the rest of a step.

    The worker promises exact bits in float32 on a CPU, with packed weights, or with `--exact`, if a
    test succeeds.

    Args:
        test: compares results alone and together. It runs only if the promise depends on it.
        required: whether the command line has `--exact`.
        packed: whether all weights are packed.

    Raises:
        ValueError: the test failed although the command line has `--exact`.
    """
    promised = packed or (dtype is torch.float32 and device.type == "cpu")
    if not required and not promised:
        return False
    exact = test()
    if required and not exact:
        raise ValueError(
            f"--exact is not possible in {_dtype_name(dtype)} on this machine: "
            "the bits of a result depend on the rest of its step. Use --dtype float32, or start "
            "without --exact."
        )
    return exact


def numerics_class(
    checkpoint_hash: str,
    dtype: torch.dtype,
    operators: str,
    device: torch.device = CPU,
    *,
    exact: bool,
    kv_dtype: torch.dtype | None = None,
) -> str:
    """Return the name of the class: checkpoint, dtypes, device, libraries, threads, exactness.

    Workers of one class produce equal texts. If `exact`, a test at start has shown that the bits of
    a row do not depend on the other rows of its step.

    Args:
        operators: name of the operators between the products.
        kv_dtype: dtype of keys and values if it differs from `dtype`.
    """
    kv = "" if kv_dtype in {None, dtype} else f"-kv-{_dtype_name(kv_dtype)}"
    torch_name = f"torch-{torch.__version__}"
    on_gpu = device.type == "cuda"
    parts = (
        checkpoint_hash,
        f"{_dtype_name(dtype)}{kv}",
        _gpu(device) if on_gpu else _cpu(),
        torch_name if operators == torch_name else f"{torch_name}-{operators}",
        # A GPU's bits do not depend on the threads of its host.
        "threads-any" if on_gpu else f"threads-{torch.get_num_threads()}",
        "exact" if exact else "inexact",
    )
    return "/".join(parts)


def _dtype_name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _gpu(device: torch.device) -> str:
    """Return the GPU's name, compute capability, and the versions of its driver and of CUDA."""
    name = torch.cuda.get_device_name(device).lower().replace(" ", "_").replace("/", "_")
    major, minor = torch.cuda.get_device_capability(device)
    # torch has no public function for the driver version, and the stubs of CPU builds lack the
    # private function.
    bindings: Any = torch._C  # noqa: SLF001
    driver = bindings._cuda_getDriverVersion()  # noqa: SLF001
    return f"cuda-{name}-sm{major}{minor}-driver-{driver}-cuda-{torch.version.cuda}"


def check_cpu_isa() -> None:
    """Check that torch and the processor comply with `DRAFTGATE_CPU_ISA`.

    Raises:
        ValueError: the name is unknown, the processor does not support the instruction set, or
            torch had started to compute before this process read the variable.
    """
    name = requested_isa()
    if name is None:
        return
    supported = {
        "avx512": torch.cpu._is_avx512_supported,  # noqa: SLF001 (no public ones)
        "avx2": torch.cpu._is_avx2_supported,  # noqa: SLF001
    }
    if name in supported and not supported[name]():
        raise ValueError(f"{VARIABLE}={name} is not supported by this processor")
    used = torch.backends.cpu.get_cpu_capability().lower()
    if used != ISAS[name].aten:
        raise ValueError(f"{VARIABLE}={name} has no effect, because torch already uses {used}")


def _cpu() -> str:
    """Return the processor's model and the instruction sets in use, which both select kernels."""
    parts = ["cpu", torch.backends.cpu.get_cpu_capability().lower()]
    if ONEDNN_BFLOAT16 and torch.cpu._is_avx512_bf16_supported():  # noqa: SLF001 (no public one)
        parts.append("bf16")
    if USES_AMX:
        parts.append("amx")
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA")
    if limit is not None:
        parts.append(f"onednn_{limit.lower()}")
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    fields = {name.strip(): value.strip() for name, _, value in (i.partition(":") for i in lines)}
    make = [fields[name] for name in ("vendor_id", "cpu family", "model") if name in fields]
    return "-".join([*parts, *make])
