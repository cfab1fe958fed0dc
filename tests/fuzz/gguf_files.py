"""Target: GGUF files, with mutations of their metadata and of the descriptions of tensors."""

from __future__ import annotations

import struct
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from draftgate.backends.engine.checkpoint import Checkpoint, TensorReader
from draftgate.backends.engine.config import read_model_config
from draftgate.backends.errors import CheckpointError
from draftgate.backends.generation_defaults import read_generation_defaults
from draftgate.backends.gguf.folder import settings_folder
from draftgate.backends.tokenizer import Tokenizer
from tests.fuzz.mutation import Form
from tests.fuzz.target import Target
from tests.gguf.files import ARRAY, NUMBERS, STRING, Pair, Tensor, header

MOST_VALUES = 1 << 18
"""Tensors up to this size are read."""


def read_model(data: bytes) -> None:
    """Read everything that serving reads."""
    with TemporaryDirectory() as name:
        path = Path(name) / "model.gguf"
        path.write_bytes(data)
        folder = settings_folder(path, Path(name) / "cache")
        read_model_config(folder)
        read_generation_defaults("auto", folder)
        tokenizer = Tokenizer(folder)
        tokenizer.decode(tokenizer.encode("ab <|end|> \U0001f600"))
        checkpoint = Checkpoint(folder)
        assert checkpoint.num_parameters >= 0
        with TensorReader(checkpoint, torch.float32, lambda _: None) as reader:
            for tensor, stored in checkpoint.tensors.items():
                if torch.Size(stored.shape).numel() <= MOST_VALUES:
                    assert reader.read([tensor]).shape == stored.shape


class _Tree:
    """Reads a sound file as a tree of pairs and tensors, without the checks of the product."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 4

    def unpack(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return value

    def text(self) -> str:
        length = self.unpack("<Q")
        self.at += length
        return self.data[self.at - length : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            element, count = self.unpack("<I"), self.unpack("<Q")
            return [element, [self.value(element) for _ in range(count)]]
        return self.unpack(NUMBERS[kind])

    def read(self) -> list[Any]:
        version, tensors, pairs = self.unpack("<I"), self.unpack("<Q"), self.unpack("<Q")
        metadata = []
        for _ in range(pairs):
            key, kind = self.text(), self.unpack("<I")
            metadata.append([key, kind, self.value(kind)])
        described = []
        for _ in range(tensors):
            name, count = self.text(), self.unpack("<I")
            sizes = [self.unpack("<Q") for _ in range(count)]
            described.append([name, sizes, self.unpack("<I"), self.unpack("<Q")])
        self.at += -self.at % 32
        return [version, metadata, described, self.data[self.at :].decode("latin-1")]


def _encoded(tree: list[Any]) -> bytes:
    version, metadata, described, rest = tree
    pairs, tensors = [Pair(*one) for one in metadata], [Tensor(*one) for one in described]
    return header(pairs, tensors, version=version) + rest.encode("latin-1")


GGUF = Form(lambda data: _Tree(data).read(), _encoded)

TARGETS = [Target("gguf", read_model, (CheckpointError,), GGUF)]
