"""Device, dtype and numerics class of a worker, and the limit of its instruction set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.engine import numerics
from draftgate.backends.engine.cpu_isa import ISAS, VARIABLE, march
from draftgate.backends.engine.numerics import (
    check_cpu_isa,
    choose_device,
    choose_dtype,
    choose_kv_dtype,
    numerics_class,
)
from draftgate.backends.engine.operators.compiler import library_name
from draftgate.backends.engine.quantisation.fp8_kv import FP8

REPORT = """
import json, torch
from draftgate.backends.engine.linear import ONEDNN_BFLOAT16
from draftgate.backends.engine.operators.products import USES_AMX
from draftgate.backends.engine.numerics import check_cpu_isa, numerics_class
from draftgate.backends.engine.operators.compiler import library_name

check_cpu_isa()
name = numerics_class("0123456789ab", torch.float32, library_name(), exact=True)
print(json.dumps([torch.backends.cpu.get_cpu_capability(), ONEDNN_BFLOAT16, USES_AMX, name]))
"""

on_x86_64 = pytest.mark.skipif(
    os.uname().machine != "x86_64" or not torch.cpu._is_avx2_supported(),
    reason="needs a processor with AVX2",
)


@on_x86_64
def test_the_variable_limits_torch_onednn_and_compiled_operators() -> None:
    """With the variable set to `avx2`, no operator uses AVX-512 or AMX, and the numerics class
    contains the limit."""
    environ = {**os.environ, VARIABLE: "avx2"}
    command = [sys.executable, "-c", REPORT]
    done = subprocess.run(command, env=environ, capture_output=True, check=True, timeout=60)
    aten, onednn_bfloat16, uses_amx, name = json.loads(done.stdout)
    assert (aten, uses_amx) == ("AVX2", False)
    assert not onednn_bfloat16 or "avx_ne_convert" in str(torch.cpu.get_capabilities())
    assert name.split("/")[2].startswith("cpu-avx2-onednn_avx2-")
    assert "-x86-64-v3-" in name.split("/")[3]


def test_compiled_operators_are_named_after_compiler_isa_and_sources() -> None:
    """The name contains the instruction set and a hash of the sources."""
    *_, sources = library_name().split("-")
    assert len(bytes.fromhex(sources)) == 4
    assert f"-{march()}-" in library_name()


def test_an_unknown_instruction_set_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the variable, its value and the known names."""
    monkeypatch.setenv(VARIABLE, "avx1024")
    with pytest.raises(ValueError, match=r"DRAFTGATE_CPU_ISA='avx1024' is unknown; known: sse4"):
        check_cpu_isa()


def test_an_unsupported_instruction_set_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A start with AVX-512 on a processor without AVX-512 raises an error."""
    monkeypatch.setenv(VARIABLE, "avx512")
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: False)
    with pytest.raises(ValueError, match="avx512 is not supported by this processor"):
        check_cpu_isa()


def test_a_limit_set_after_torch_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable raises an error if torch has already chosen its kernels."""
    used = torch.backends.cpu.get_cpu_capability().lower()
    other = next(name for name, isa in ISAS.items() if isa.aten != used)
    monkeypatch.setenv(VARIABLE, other)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: True)
    with pytest.raises(
        ValueError, match=f"{other} has no effect, because torch already uses {used}"
    ):
        check_cpu_isa()


def test_supported_dtypes_depend_on_the_device() -> None:
    """A GPU supports float16, and its dtype `auto` is the dtype of the checkpoint."""
    with pytest.raises(ValueError, match="float16 needs a GPU"):
        choose_dtype("float16", SHIPPED_MODEL)
    assert choose_dtype("float16", SHIPPED_MODEL, "cuda") is torch.float16
    assert choose_dtype("auto", SHIPPED_MODEL, "cuda") is torch.bfloat16
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="unknown device 'tpu'"):
        choose_device("tpu")


@pytest.mark.parametrize(
    ("onednn", "in_c", "expected"),
    [
        (True, False, torch.bfloat16),
        (False, True, torch.bfloat16),
        (False, False, torch.float32),
    ],
)
def test_a_large_model_uses_bfloat16_if_that_is_faster(
    onednn: bool, in_c: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The `auto` dtype on a CPU is bfloat16 for large models with fast bfloat16 products."""
    monkeypatch.setattr(numerics, "ONEDNN_BFLOAT16", onednn)
    monkeypatch.setattr(numerics, "multiplies_in_c", lambda width: in_c)
    assert choose_dtype("auto", SHIPPED_MODEL) is torch.float32
    monkeypatch.setattr(numerics, "FLOAT32_PARAMETERS", 0)
    assert choose_dtype("auto", SHIPPED_MODEL) is expected


def test_fp8_needs_a_gpu_that_converts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`fp8` is a cache in E4M3 on a CPU and on a Hopper GPU, and an error on an Ampere GPU."""
    bfloat16, gpu = torch.bfloat16, torch.device("cuda")
    assert choose_kv_dtype("auto", SHIPPED_MODEL, bfloat16) is bfloat16
    assert choose_kv_dtype("fp8", SHIPPED_MODEL, bfloat16) is FP8
    with pytest.raises(ValueError, match="unknown KV cache dtype 'int8'; known: auto, fp8"):
        choose_kv_dtype("int8", SHIPPED_MODEL, bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    assert choose_kv_dtype("fp8", SHIPPED_MODEL, bfloat16, gpu) is FP8
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
    assert choose_kv_dtype("auto", SHIPPED_MODEL, bfloat16, gpu) is bfloat16
    with pytest.raises(ValueError, match="--kv-cache-dtype fp8 needs a GPU with"):
        choose_kv_dtype("fp8", SHIPPED_MODEL, bfloat16, gpu)


def test_stored_scales_of_a_cache_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names a scale that the FP8 cache does not use, and `auto` reports nothing."""
    name = "model.layers.0.self_attn.k_scale"
    save_file({name: torch.ones(1)}, tmp_path / "model.safetensors")
    choose_kv_dtype("auto", tmp_path, torch.float32)
    assert not caplog.messages
    choose_kv_dtype("fp8", tmp_path, torch.float32)
    (message,) = caplog.messages
    assert name in message


def test_auto_chooses_a_gpu_if_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device `auto` is a GPU if the machine has a GPU, and a missing GPU raises an error."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(ValueError, match="GPU 0 was requested, but the number of GPUs is 0"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto", 1) == choose_device("cuda", 1) == torch.device("cuda", 1)
    assert choose_device("cpu", 1) == torch.device("cpu")
    for name in ("auto", "cuda"):
        with pytest.raises(ValueError, match="GPU 2 was requested, but the number of GPUs is 2"):
            choose_device(name, 2)


def test_the_numerics_class_has_all_its_parts() -> None:
    """The class contains checkpoint, dtype, processor, library, threads and exactness."""
    made_by = "gcc-12.2.0"
    parts = numerics_class("0123456789ab", torch.bfloat16, made_by, exact=False).split("/")
    assert len(parts) == 6
    assert parts[:2] == ["0123456789ab", "bfloat16"]
    assert parts[2].startswith("cpu-")
    assert parts[3] == f"torch-{torch.__version__}-gcc-12.2.0"
    assert parts[4:] == [f"threads-{torch.get_num_threads()}", "inexact"]
    fp8 = numerics_class("0", torch.bfloat16, made_by, exact=False, kv_dtype=FP8)
    assert fp8.split("/")[1] == "bfloat16-kv-float8_e4m3fn"
