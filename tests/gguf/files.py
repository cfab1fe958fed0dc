"""Writes GGUF files of any content, also of content that no converter writes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?"}
NUMBERS |= {10: "<Q", 11: "<q", 12: "<d"}
U32, F32, BOOL, STRING, ARRAY = 4, 6, 7, 8, 9


class Pair(NamedTuple):
    """A pair of the metadata. The value of an array is a pair of a type and a list."""

    key: str
    kind: int
    value: Any


class Tensor(NamedTuple):
    """A description of a tensor, with its dimensions in the order of the file."""

    name: str
    dimensions: Sequence[int]
    kind: int
    offset: int


def text(value: str) -> bytes:
    """Return a text with its length."""
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def value_bytes(kind: int, value: Any) -> bytes:
    """Return a value of the metadata."""
    if kind == STRING:
        return text(value)
    if kind == ARRAY:
        element, values = value
        start = struct.pack("<IQ", element, len(values))
        return start + b"".join(value_bytes(element, one) for one in values)
    return struct.pack(NUMBERS[kind], value)


def header(
    pairs: Sequence[Pair],
    tensors: Sequence[Tensor],
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """Return everything before the data of the tensors.

    Args:
        counts: the stated numbers of tensors and pairs, or None for those that follow.
    """
    stated = counts or (len(tensors), len(pairs))
    data = b"GGUF" + struct.pack("<IQQ", version, *stated)
    data += b"".join(
        text(one.key) + struct.pack("<I", one.kind) + value_bytes(one.kind, one.value)
        for one in pairs
    )
    for one in tensors:
        shape = struct.pack(f"<I{len(one.dimensions)}Q", len(one.dimensions), *one.dimensions)
        data += text(one.name) + shape + struct.pack("<IQ", one.kind, one.offset)
    return data + bytes(-len(data) % alignment)


WIDTH, TOKENS = 32, ["a", "b", "ab", "<|end|>"]
SPARE = 1024
"""Bytes after the tensors of the tiny model."""

MATRIX = 34
"""Bytes of a row of 32 values in Q8_0."""


def tiny_pairs() -> list[Pair]:
    """Return the metadata of a llama model with one layer and four tokens."""
    shape = {"block_count": 1, "context_length": 64, "embedding_length": WIDTH}
    shape |= {"feed_forward_length": WIDTH, "attention.head_count": 2}
    shape |= {"attention.head_count_kv": 1}
    return [
        Pair("general.architecture", STRING, "llama"),
        *(Pair(f"llama.{name}", U32, value) for name, value in shape.items()),
        Pair("llama.attention.layer_norm_rms_epsilon", F32, 1e-5),
        Pair("tokenizer.ggml.model", STRING, "gpt2"),
        Pair("tokenizer.ggml.pre", STRING, "gpt-2"),
        Pair("tokenizer.ggml.tokens", ARRAY, (STRING, TOKENS)),
        Pair("tokenizer.ggml.token_type", ARRAY, (5, [1, 1, 1, 3])),
        Pair("tokenizer.ggml.merges", ARRAY, (STRING, ["a b"])),
        Pair("tokenizer.ggml.eos_token_id", U32, 3),
        Pair("tokenizer.chat_template", STRING, "{{ messages[0].content }}"),
    ]


def tiny_tensors() -> tuple[list[Tensor], int]:
    """Return the tensors of the model of `tiny_pairs`, and the bytes of their data."""
    q8, f32 = 8, 0
    shapes: dict[str, tuple[list[int], int]] = {
        "token_embd": ([WIDTH, len(TOKENS)], q8),
        "output_norm": ([WIDTH], f32),
        "blk.0.attn_norm": ([WIDTH], f32),
        "blk.0.ffn_norm": ([WIDTH], f32),
        "blk.0.attn_k": ([WIDTH, WIDTH // 2], q8),
        "blk.0.attn_v": ([WIDTH, WIDTH // 2], q8),
    }
    square = ("attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes |= {f"blk.0.{name}": ([WIDTH, WIDTH], q8) for name in square}
    tensors, end = [], 0
    for name, (dimensions, kind) in shapes.items():
        tensors.append(Tensor(f"{name}.weight", dimensions, kind, end))
        rows = dimensions[1] if len(dimensions) > 1 else 1
        end += -(-rows * (MATRIX if kind == q8 else 4 * WIDTH) // 32) * 32
    return tensors, end


def tiny_model(
    pairs: Sequence[Pair] = (), without: Sequence[str] = (), tensors: Sequence[Tensor] = ()
) -> bytes:
    """Return a llama model with one layer whose weights are 0.

    Args:
        pairs: metadata that replaces the pairs with the same keys.
        without: keys and names of tensors to leave out.
        tensors: descriptions that replace the tensors with the same names.
    """
    metadata = {one.key: one for one in [*tiny_pairs(), *pairs]}
    described, size = tiny_tensors()
    placed = {one.name: one for one in [*described, *tensors]}
    for name in without:
        metadata.pop(name, None)
        placed.pop(name, None)
    return header([*metadata.values()], [*placed.values()]) + bytes(size + SPARE)


def split_model(sizes: Sequence[int]) -> list[bytes]:
    """Return the tiny model in parts with these numbers of tensors."""
    tensors, size = tiny_tensors()
    parts, begin = [], 0
    for number, share in enumerate(sizes):
        own, begin = tensors[begin : begin + share], begin + share
        pairs = [
            Pair("split.no", 2, number),
            Pair("split.count", 2, len(sizes)),
            Pair("split.tensors.count", 5, len(tensors)),
        ]
        moved = [one._replace(offset=one.offset - own[0].offset) for one in own]
        metadata = [*tiny_pairs(), *pairs] if number == 0 else pairs
        parts.append(header(metadata, moved) + bytes(size))
    return parts
