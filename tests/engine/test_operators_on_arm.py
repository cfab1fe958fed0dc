"""The operators in C on a 64-bit Arm processor (NEON), compared with torch on this machine.

A cross compiler builds each source, and an emulator of user programs runs it.
"""

from __future__ import annotations

import shutil
import subprocess
from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from draftgate.backends.engine.config import ModelConfig
from draftgate.backends.engine.inputs import AttentionSpan, StepInputs
from draftgate.backends.engine.operators.base import rotary_tables
from draftgate.backends.engine.operators.compiler import FLAGS, FOLDER
from draftgate.backends.engine.operators.native import MAX_ROWS, chunks_of
from draftgate.backends.engine.operators.packed_ref import packed_product, unpack_blocks
from draftgate.backends.engine.operators.reference import TorchOperators
from draftgate.backends.engine.quantisation.fp8_kv import FP8, as_cells
from draftgate.backends.engine.rope import Rope
from tests.engine.packed_blocks import KINDS, random_rows
from tests.engine.test_attention_in_c import SPANS, TILE, memory_of, queries_of, shaped, step_of
from tests.engine.test_operators import DTYPES, random

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
CALLS = Path(__file__).parent / "arm_calls.c"
TIMEOUT_S = 120.0
HEADS = ((8, 4, 32), (2, 2, 80))

pytestmark = pytest.mark.skipif(
    shutil.which(COMPILER) is None or shutil.which(EMULATOR) is None,
    reason=f"needs {COMPILER} and {EMULATOR}",
)


def bytes_of(tensor: Tensor) -> bytes:
    """Return the memory of a contiguous tensor."""
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def call(
    folder: Path,
    source: str,
    function: str,
    dtype: torch.dtype,
    *arguments: bytes,
    march: str = "armv8-a",
    **defines: int,
) -> bytes:
    """Compile a source for Arm, call a function with these arguments, and return its outputs."""
    program = folder / f"{function}-{dtype}-{'-'.join(map(str, defines.values()))}"
    if not program.exists():
        values = {"BFLOAT16": int(dtype is torch.bfloat16), **defines}
        macros = [f"-D{name}={value}" for name, value in values.items()]
        macros += [f'-DOPERATORS="{FOLDER / source}"', f"-DCALL_{function.upper()}"]
        flags = [flag for flag in FLAGS if flag not in {"-shared", "-fPIC"}]
        flags.append(f"-march={march}")
        compilation = [COMPILER, *flags, "-static", *macros, str(CALLS), "-o", str(program), "-lm"]
        subprocess.run(compilation, check=True, timeout=TIMEOUT_S)
    sent = b"".join(len(part).to_bytes(8, "little") + part for part in arguments)
    done = subprocess.run(
        [EMULATOR, str(program)], input=sent, check=True, capture_output=True, timeout=TIMEOUT_S
    )
    return done.stdout


def integers(*values: int) -> bytes:
    """Return 64-bit integers."""
    return array("q", values).tobytes()


def tensor_of(data: bytes, like: Tensor) -> Tensor:
    """Return bytes as a tensor of the shape and dtype of another."""
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(like.dtype).view(like.shape)


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Check that tensors differ by at most a few units in the last place of the dtype."""
    tolerance = 1e-5 if expected.dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def attend(
    folder: Path, config: ModelConfig, inputs: StepInputs, queries: Tensor, memory: Tensor
) -> Tensor:
    """Return the attention of a step on Arm."""
    num_heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    chunks, tables = chunks_of(inputs.spans, MAX_ROWS * kv_heads // num_heads)
    offsets, position = {0: 0}, 0
    for table in tables:
        offsets[table.buffer_info()[0]] = position
        position += len(table)
    for index in range(0, len(chunks), 7):
        for field in (3, 6):  # addresses of this process become offsets
            chunks[index + field] = offsets[chunks[index + field]]
    out = torch.zeros_like(queries)
    found = call(
        folder, "attention.c", "attend", queries.dtype,
        integers(
            num_heads, kv_heads, memory.stride(0), 0, int(config.attention_softcap or 0),
            memory.dtype is FP8,
        ),
        bytes_of(out), bytes_of(queries), bytes_of(memory),
        chunks.tobytes(), b"".join(table.tobytes() for table in tables),
        HEAD_DIM=head_dim, TILE=TILE,
    )  # fmt: skip
    return tensor_of(found, out).flatten(1)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "softcap"), [*((heads, None) for heads in HEADS), (HEADS[0], 2.0)], ids=str
)
def test_attention_on_arm_equals_that_of_torch(
    heads: tuple[int, int, int],
    softcap: float | None,
    dtype: torch.dtype,
    fp8: bool,
    tmp_path: Path,
) -> None:
    """Attention is that of torch, and a row has the same bits alone and among the other rows."""
    config = replace(shaped(heads), windows=(None,), attention_softcap=softcap)
    inputs, memory = step_of(*SPANS), memory_of(config, FP8 if fp8 else dtype)
    queries = queries_of(config, len(inputs.positions), dtype)
    operators = TorchOperators(config, rotary_tables(config, 8, dtype))
    expected = operators.attend(operators.begin(inputs), queries, memory, None)
    found = attend(tmp_path, config, inputs, queries, memory)
    assert_close(found, expected)
    row = 33
    alone = step_of(AttentionSpan(1, SPANS[0].start + row, SPANS[0].pages))
    assert torch.equal(
        attend(tmp_path, config, alone, queries[row : row + 1], memory), found[row : row + 1]
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_and_gates_on_arm_equal_those_of_torch(dtype: torch.dtype, tmp_path: Path) -> None:
    """The residual sum, its norm and the gate are those of torch."""
    rows, width = 5, 96
    config = shaped((8, 4, 32))
    operators = TorchOperators(config, rotary_tables(config, 1, dtype))
    hidden, delta = random(rows, width, dtype=dtype), random(rows + 1, width, dtype=dtype)[:rows]
    weight, gate_up = random(width, dtype=torch.float32), random(rows, 2 * width, dtype=dtype)
    parts = (hidden, torch.empty_like(hidden), delta, weight)
    found = call(
        tmp_path, "layers.c", "add_norm", dtype, integers(rows, width), *map(bytes_of, parts)
    )
    summed, normed = (tensor_of(half, hidden) for half in halves(found))
    assert_close(normed, operators.add_norm(hidden, delta, weight))
    assert torch.equal(summed, hidden)
    parts = (torch.empty_like(hidden), gate_up)
    for gelu, activation in enumerate(("silu", "gelu")):
        numbers = integers(rows, width, gelu)
        found = call(tmp_path, "layers.c", "gate", dtype, numbers, *map(bytes_of, parts))
        gated = TorchOperators(
            replace(config, activation=activation), rotary_tables(config, 1, dtype)
        ).gate(gate_up)
        assert_close(tensor_of(found, hidden), gated)


def halves(data: bytes) -> tuple[bytes, bytes]:
    """Return the two outputs of equal size."""
    return data[: len(data) // 2], data[len(data) // 2 :]


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation_on_arm_equals_that_of_torch(
    dtype: torch.dtype, share: float, fp8: bool, tmp_path: Path
) -> None:
    """Heads are rotated in whole or in part and written to their slots as in torch, up to a unit in
    the last place for keys in FP8."""
    heads = num_heads, kv_heads, head_dim = 8, 4, 32
    rows, slots, positions = 6, 16, 40
    config = replace(shaped(heads), rope=Rope(1e4, share=share))
    tables = rotary_tables(config, positions, dtype)
    operators = TorchOperators(config, tables)
    inputs = replace(
        step_of(AttentionSpan(rows, 0, [0])),
        positions=torch.tensor([3, 39, 0, 7, 21, 5]),
        slots=torch.tensor([4, 15, 2, 9, 0, 7]),
    )
    fused = random(rows, (num_heads + 2 * kv_heads) * head_dim, dtype=dtype)
    queries = torch.zeros(rows, num_heads, head_dim, dtype=dtype)
    memory = torch.zeros(2 * kv_heads, slots, head_dim, dtype=FP8 if fp8 else dtype)
    places = torch.cat([inputs.positions, inputs.slots])
    cosines, sines = tables[config.rope]
    parts, half = (queries, memory, fused, places, cosines, sines), cosines.shape[1]
    numbers = integers(rows, num_heads, kv_heads, head_dim, half, memory.stride(0), fp8)
    found = call(tmp_path, "layers.c", "rotate_and_store", dtype, numbers, *map(bytes_of, parts))
    size = len(bytes_of(queries))
    step = operators.begin(inputs)
    expected = operators.rotate_and_store(step, fused.clone(), memory, None)
    # The program scales queries by 1.
    assert_close(tensor_of(found[:size], queries) * head_dim**-0.5, expected)
    written = tensor_of(found[size:], memory)
    if not fp8:
        assert_close(written, memory)
        return
    assert torch.equal(as_cells(written)[kv_heads:], as_cells(memory)[kv_heads:])
    torch.testing.assert_close(written.float(), memory.float(), rtol=0.125, atol=2.0**-9)
    assert (as_cells(written) == as_cells(memory)).float().mean() > 0.95


def test_products_on_arm_have_float32_precision(tmp_path: Path) -> None:
    """Products of bfloat16 matrices are float32 sums."""
    rows, outputs, width = 7, 131, 96
    x, weight = (random(n, width, dtype=torch.bfloat16) for n in (rows, outputs))
    out = torch.empty(rows, outputs)
    parts = (out, x, weight)
    found = call(
        tmp_path, "products.c", "multiply", torch.bfloat16, integers(rows, outputs, width),
        *map(bytes_of, parts),
    )  # fmt: skip
    expected = (x.double() @ weight.double().T).float()
    assert_close(tensor_of(found, out), expected)


@pytest.mark.parametrize("march", ["armv8-a", "armv8.2-a+dotprod"])
@pytest.mark.parametrize("name", ["Q4_1", "Q5_0", "Q6_K", "Q8_0", "IQ4_NL"])
def test_packed_products_on_arm_have_the_bits_of_the_reference(
    name: str, march: str, tmp_path: Path
) -> None:
    """Products with packed matrices have the same bits as on other processors, with and without
    the instruction for products of int8."""
    outputs, width = 11, 512
    packed = random_rows(KINDS[name], outputs, width)
    for rows in (1, 4, 7):
        x = random(rows, width, dtype=torch.float32)
        expected = packed_product(x, unpack_blocks(KINDS[name], packed))
        found = call(
            tmp_path, "packed.c", "multiply_packed", torch.float32, integers(rows, outputs, width),
            *map(bytes_of, (torch.empty_like(expected), x, packed)),
            march=march, TYPE=KINDS[name].number,
        )  # fmt: skip
        assert torch.equal(tensor_of(found, expected), expected)
