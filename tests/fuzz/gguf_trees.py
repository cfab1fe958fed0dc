"""GGUF files as trees, and a sound model of each kind, from which fuzzers begin."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from typing import Any

from tests.fuzz.target import CORPUS
from tests.gguf.files import (
    ARRAY,
    F32,
    NUMBERS,
    STRING,
    U32,
    Pair,
    Tensor,
    tiny_model,
)

SIZES = {"<B": 1, "<b": 1, "<H": 2, "<h": 2, "<I": 4, "<i": 4, "<f": 4, "<?": 1}
SIZES |= {"<Q": 8, "<q": 8, "<d": 8}


@dataclass
class Model:
    """A file as a tree, which may be inconsistent."""

    pairs: list[Pair]
    tensors: list[Tensor]
    data: bytes
    version: int = 3
    alignment: int = 32


def packed(layout: str, value: Any) -> bytes:
    """Return a number in some layout. Of integers, high bits and fractions are cut off."""
    if layout == "<d":
        return struct.pack(layout, value)
    if layout == "<f":
        try:
            return struct.pack(layout, value)
        except OverflowError:
            return struct.pack(layout, float("inf"))
    size = SIZES[layout]
    value = value if math.isfinite(value) else 0
    return (int(value) % (1 << 8 * size)).to_bytes(size, "little")


@dataclass
class Encoded:
    """A file, with the places of its numbers."""

    data: bytearray = field(default_factory=lambda: bytearray(b"GGUF"))
    places: list[tuple[int, str]] = field(default_factory=list)  # of counts, lengths, types, ...

    def number(self, layout: str, value: Any) -> None:
        self.places.append((len(self.data), layout))
        self.data += packed(layout, value)

    def text(self, value: str | bytes) -> None:
        data = value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
        self.number("<Q", len(data))
        self.data += data

    def value(self, kind: int, value: Any) -> None:
        if kind == STRING:
            self.text(value)
        elif kind == ARRAY:
            element, values = value
            self.number("<I", element)
            self.number("<Q", len(values))
            if element in {STRING, ARRAY}:
                for one in values:
                    self.value(element, one)
            else:
                self.data += b"".join(packed(NUMBERS[element], one) for one in values)
        else:
            self.number(NUMBERS.get(kind, "<I"), value)

    def align(self, alignment: int) -> None:
        self.data += bytes(-len(self.data) % alignment)


def encoded(model: Model) -> Encoded:
    """Return a file."""
    out = Encoded()
    out.number("<I", model.version)
    out.number("<Q", len(model.tensors))
    out.number("<Q", len(model.pairs))
    for pair in model.pairs:
        out.text(pair.key)
        out.number("<I", pair.kind)
        out.value(pair.kind, pair.value)
    for one in model.tensors:
        out.text(one.name)
        out.number("<I", len(one.dimensions))
        for size in one.dimensions:
            out.number("<Q", size)
        out.number("<I", one.kind)
        out.number("<Q", one.offset)
    out.align(model.alignment)
    out.data += model.data
    return out


class _Parser:
    """Reads a sound file, without the checks of the product."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 4

    def number(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self.data, self.at)
        self.at += SIZES[layout]
        return value

    def text(self) -> str:
        length = self.number("<Q")
        self.at += length
        return self.data[self.at - length : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            element, count = self.number("<I"), self.number("<Q")
            return [element, [self.value(element) for _ in range(count)]]
        return self.number(NUMBERS[kind])

    def model(self) -> Model:
        version, tensors, pairs = self.number("<I"), self.number("<Q"), self.number("<Q")
        metadata = []
        for _ in range(pairs):
            key, kind = self.text(), self.number("<I")
            metadata.append(Pair(key, kind, self.value(kind)))
        described = []
        for _ in range(tensors):
            name, count = self.text(), self.number("<I")
            sizes = [self.number("<Q") for _ in range(count)]
            described.append(Tensor(name, sizes, self.number("<I"), self.number("<Q")))
        self.at += -self.at % 32
        return Model(metadata, described, self.data[self.at :], version)


def parsed(data: bytes) -> Model:
    """Return a sound file as a tree."""
    return _Parser(data).model()


def _renamed(data: bytes, architecture: str) -> Model:
    """Return the tiny model as one of another architecture, without its further tensors."""
    model = parsed(data)
    model.pairs = [
        Pair(one.key.replace("llama.", f"{architecture}."), one.kind, one.value)
        for one in model.pairs
    ]
    model.pairs[0] = Pair("general.architecture", STRING, architecture)
    return model


def _with_tensors(model: Model, tensors: dict[str, tuple[list[int], int]]) -> bytes:
    """Return a file with further tensors, by name: dimensions and type.

    Factors of the rotation are 1, and other values 0.
    """
    for name, (sizes, kind) in tensors.items():
        model.tensors.append(Tensor(f"{name}.weight", sizes, kind, len(model.data)))
        row = sizes[0] * 4 if kind == 0 else sizes[0] // 32 * 34
        size = row * math.prod(sizes[1:])
        values = struct.pack("<f", 1.0) * (size // 4) if "rope" in name else bytes(size)
        model.data += values + bytes(-size % 32)
    return bytes(encoded(model).data)


HEAD_NORMS = {f"blk.0.attn_{one}_norm": ([16], 0) for one in ("q", "k")}
GEMMA_NORMS = {f"blk.0.{one}": ([32], 0) for one in ("post_attention_norm", "post_ffw_norm")}


def _qwen2() -> bytes:
    """Return a Qwen2 with the biases of its attention."""
    model = _renamed(tiny_model(), "qwen2")
    rows = {"q": 32, "k": 16, "v": 16}
    biases = {f"blk.0.attn_{one}": ([size], 0) for one, size in rows.items()}
    model = parsed(_with_tensors(model, biases))
    model.tensors[-3:] = [
        one._replace(name=one.name.replace("weight", "bias")) for one in model.tensors[-3:]
    ]
    return bytes(encoded(model).data)


def _experts(architecture: str) -> bytes:
    """Return the tiny model with a mixture of two experts."""
    base = tiny_model(without=[f"blk.0.ffn_{name}.weight" for name in ("gate", "up", "down")])
    model = _renamed(base, architecture)
    counts = {"expert_count": 2, "expert_used_count": 1, "expert_feed_forward_length": 32}
    model.pairs += [Pair(f"{architecture}.{name}", U32, one) for name, one in counts.items()]
    stacks = {f"blk.0.ffn_{part}_exps": ([32, 32, 2], 8) for part in ("gate", "up", "down")}
    norms = HEAD_NORMS if architecture == "qwen3moe" else {}
    return _with_tensors(model, {"blk.0.ffn_gate_inp": ([32, 2], 0), **stacks, **norms})


def _phi3(factors: dict[str, tuple[list[int], int]]) -> bytes:
    """Return a Phi-3, whose matrices are fused."""
    gone = ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")
    base = tiny_model(without=[f"blk.0.{name}.weight" for name in gone])
    fused = {f"blk.0.{name}": ([32, 64], 8) for name in ("attn_qkv", "ffn_up")}
    return _with_tensors(_renamed(base, "phi3"), {**fused, **factors})


def sound_models() -> list[bytes]:
    """Return one sound file of each kind."""
    yarn = [
        Pair("llama.rope.scaling.type", STRING, "yarn"),
        Pair("llama.rope.scaling.factor", F32, 2.0),
        Pair("llama.rope.scaling.original_context_length", U32, 32),
    ]
    long = {f"rope_factors_{length}": ([8], 0) for length in ("long", "short")}
    return [
        tiny_model(),
        tiny_model(yarn),
        (CORPUS / "gguf" / "sentencepiece").read_bytes(),
        _with_tensors(parsed(tiny_model()), {"rope_freqs": ([8], 0)}),
        _qwen2(),
        _with_tensors(_renamed(tiny_model(), "qwen3"), HEAD_NORMS),
        _with_tensors(_renamed(tiny_model(), "gemma2"), GEMMA_NORMS),
        _with_tensors(_renamed(tiny_model(), "gemma3"), GEMMA_NORMS | HEAD_NORMS),
        _experts("llama"),
        _experts("qwen3moe"),
        _phi3({}),
        _phi3(long),
    ]
