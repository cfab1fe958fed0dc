"""Operators for CPUs in C (`attention.c`, `layers.c`), which use the full memory bandwidth.

Attention of a decode takes a fifth to an eighth of the time of `reference` (one thread of a Zen 4,
2026-11-21). torch multiplies few rows by many keys at a small part of the memory bandwidth.

With matrix tiles (AMX) and 3 heads of 64 per KV head, attention of a prompt takes 0.44 times as
long, and that of four tokens per sequence 0.7 times (one thread of a Xeon, busy, 2026-11-28).
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from draftgate.backends.engine.config import ModelConfig
from draftgate.backends.engine.inputs import AttentionSpans, StepInputs
from draftgate.backends.engine.kv_pool import KV_TILE
from draftgate.backends.engine.operators.base import RotaryTables
from draftgate.backends.engine.operators.compiler import compiled, library_name
from draftgate.backends.engine.operators.products import LANES, has_tiles
from draftgate.backends.engine.quantisation.fp8_kv import FP8
from draftgate.backends.engine.rope import Rope

MAX_ROWS: Final = 64
"""Maximum rows that read the keys of a KV head together, equal to MAX_ROWS of `attention.c`."""

MAX_HEAD_DIM: Final = 256

_SUPPORTED_DTYPES: Final = (torch.float32, torch.bfloat16)

_Pointer = ctypes.c_void_p
_Int = ctypes.c_int64


class _Attention(ctypes.Structure):
    """The struct `Step` of `layers.h`."""

    _fields_ = (
        ("out", _Pointer), ("query", _Pointer), ("kv", _Pointer),
        ("heads", _Int), ("kv_heads", _Int), ("strip", _Int), ("window", _Int),
        ("chunks", _Pointer), ("num_chunks", _Int), ("softcap", ctypes.c_float),
        ("e4m3", ctypes.c_int32), ("tiles", ctypes.c_int32),
    )  # fmt: skip


class _Rotation(ctypes.Structure):
    """The struct `Rotation` of `layers.h`."""

    _fields_ = (
        ("positions", _Pointer), ("slots", _Pointer), ("cosines", _Pointer), ("sines", _Pointer),
        ("rows", _Int), ("heads", _Int), ("kv_heads", _Int), ("head_dim", _Int), ("half", _Int),
        ("strip", _Int),
        ("scale", ctypes.c_float), ("eps", ctypes.c_float), ("e4m3", ctypes.c_int32),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class NativeStep:
    """A step in the format of the C code. The object owns the memory of its pointers.

    Attributes:
        chunks: 7 numbers for each `Chunk` of `layers.h`.
        tables: the page tables and tails of the chunks.
    """

    inputs: StepInputs
    chunks: array[int]
    tables: list[array[int]]
    attention: _Attention
    rotation: _Rotation
    threads: int


def native_operators(
    config: ModelConfig, tables: Mapping[Rope, RotaryTables], dtype: torch.dtype
) -> NativeOperators | None:
    """Return the model's operators in C, or None if C lacks its shapes or the compilation fails."""
    rotated = (2 * table.cosines.shape[1] for table in tables.values())
    inner = config.intermediate_size if config.experts is None else config.experts.width
    widths = (config.hidden_size, config.intermediate_size, inner, config.head_dim, *rotated)
    fits = not any(width % LANES for width in widths) and config.head_dim <= MAX_HEAD_DIM
    group = config.num_heads // config.num_kv_heads
    if not fits or dtype not in _SUPPORTED_DTYPES or group > MAX_ROWS:
        return None
    library = compiled(
        "attention.c",
        "decoder.c",
        "layers.c",
        HEAD_DIM=config.head_dim,
        BFLOAT16=int(dtype is torch.bfloat16),
        TILE=KV_TILE,
    )
    if library is None:
        return None
    return NativeOperators(config, tables, library, dtype is torch.bfloat16 and has_tiles())


class NativeOperators:
    """Implements `Operators`. All tensors are on the CPU and contiguous.

    Attributes:
        library: the compiled library.
        rotations: the addresses of the cosines and sines of each rotation, and their width.
    """

    def __init__(
        self,
        config: ModelConfig,
        tables: Mapping[Rope, RotaryTables],
        library: ctypes.CDLL,
        tiles: bool,
    ) -> None:
        """Store the tables, and declare the arguments of the functions.

        Args:
            tiles: whether attention may use matrix tiles.
        """
        self.name = library_name()
        self.library = library
        self._config = config
        self._tables = tables  # which own the memory of the pointers
        self.rotations = {
            rope: (cosines.data_ptr(), sines.data_ptr(), cosines.shape[1])
            for rope, (cosines, sines) in tables.items()
        }
        self._gelu = config.activation == "gelu"
        self._tiles = tiles
        self._rotation = self.rotations[config.rope]
        self._chunk_tokens = MAX_ROWS // (config.num_heads // config.num_kv_heads)
        self._add_norm = library.add_norm
        self._add_norm.argtypes = (*[_Pointer] * 4, _Int, _Int, ctypes.c_float, _Int)
        self._gate = library.gate
        self._gate.argtypes = (*[_Pointer] * 2, *[_Int] * 4)
        self._rotate_and_store = library.rotate_and_store
        self._rotate_and_store.argtypes = (*[_Pointer] * 5, _Int)
        self._attend = library.attend
        self._attend.argtypes = (_Pointer, _Int)
        for function in (self._add_norm, self._gate, self._rotate_and_store, self._attend):
            function.restype = None

    def begin(self, inputs: StepInputs) -> NativeStep:
        """Divide the step's spans into chunks."""
        config = self._config
        chunks, tables = chunks_of(inputs.spans, self._chunk_tokens)
        attention = _Attention(
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            chunks=chunks.buffer_info()[0],
            num_chunks=len(chunks) // 7,
            softcap=config.attention_softcap or 0.0,
            tiles=self._tiles,
        )
        rotation = _Rotation(
            positions=inputs.positions.data_ptr(),
            slots=inputs.slots.data_ptr(),
            rows=len(inputs.positions),
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.query_scale,
            eps=config.rms_norm_eps,
        )
        return NativeStep(inputs, chunks, tables, attention, rotation, torch.get_num_threads())

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """Add `delta` to `hidden` in place, and return the RMS norm of the sum."""
        normed, weight = torch.empty_like(hidden), _float32(weight)
        self._add_norm(
            hidden.data_ptr(),
            normed.data_ptr(),
            None if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            *hidden.shape,
            self._config.rms_norm_eps,
            torch.get_num_threads(),
        )
        return normed

    def rotate_and_store(
        self,
        step: NativeStep,
        fused: Tensor,
        layer_kv: Tensor,
        qk_norm: Tensor | None,
        rope: Rope | None = None,
    ) -> Tensor:
        """Rotate queries and keys by their positions, and write keys and values to the pool."""
        config = self._config
        queries = fused.new_empty(fused.shape[0], config.num_heads, config.head_dim)
        rotation, turns = step.rotation, self._rotation if rope is None else self.rotations[rope]
        rotation.cosines, rotation.sines, rotation.half = turns
        rotation.strip, rotation.e4m3 = layer_kv.stride(0), layer_kv.dtype is FP8
        qk_norm = None if qk_norm is None else _float32(qk_norm)
        self._rotate_and_store(
            queries.data_ptr(),
            layer_kv.data_ptr(),
            fused.data_ptr(),
            None if qk_norm is None else qk_norm.data_ptr(),
            ctypes.addressof(rotation),
            step.threads,
        )
        return queries

    def attend(
        self, step: NativeStep, queries: Tensor, layer_kv: Tensor, window: int | None
    ) -> Tensor:
        """Return softmax(q k^T) v for every row, [rows, num_heads * head_dim]."""
        # Later layers read rows that do not attend, so the output starts as finite zeros.
        rows, heads, width = queries.shape
        out = queries.new_zeros(rows, heads * width)
        attention = step.attention
        attention.out, attention.query = out.data_ptr(), queries.data_ptr()
        attention.kv, attention.strip = layer_kv.data_ptr(), layer_kv.stride(0)
        attention.window, attention.e4m3 = window or 0, layer_kv.dtype is FP8
        self._attend(ctypes.addressof(attention), step.threads)
        return out

    def gate(self, gate_up: Tensor) -> Tensor:
        """Return activation(gate) * up, [rows, width]."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        threads = torch.get_num_threads()
        self._gate(out.data_ptr(), gate_up.data_ptr(), rows, width, self._gelu, threads)
        return out


def _float32(weight: Tensor) -> Tensor:
    # Calls of torch that change nothing would cost a microsecond each.
    return weight if weight.dtype is torch.float32 else weight.float()


def chunks_of(spans: AttentionSpans, chunk_tokens: int) -> tuple[array[int], list[array[int]]]:
    """Return the chunks of a step, and the tables that they point to."""
    chunks: list[int] = []
    tables: list[array[int]] = []
    row = 0
    page_tokens, tails = spans.page_tokens, spans.tails
    columns = zip(spans.rows, spans.starts, spans.pages, strict=True)
    for index, (rows, start, pages) in enumerate(columns):
        table = pages if isinstance(pages, array) else array("q", pages)
        tables.append(table)
        address, end, border = table.buffer_info()[0], 0, start + rows
        if index in tails:
            border, tail = tails[index]
            slots = array("q", tail)
            tables.append(slots)
            end = slots.buffer_info()[0]
        if rows == 1:  # the common case: a decode
            chunks += (row, 1, start, address, page_tokens, border, end)
        else:
            for first in range(0, rows, chunk_tokens):
                count = min(chunk_tokens, rows - first)
                rows_and_start = (row + first, count, start + first)
                chunks += (*rows_and_start, address, page_tokens, border, end)
        row += rows
    return array("q", chunks), tables
