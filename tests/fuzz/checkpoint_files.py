"""Targets: the files of checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from draftgate.backends.checkpoints import SHIPPED_DRAFT
from draftgate.backends.engine.checkpoint import Checkpoint, TensorReader
from draftgate.backends.engine.config import read_model_config
from draftgate.backends.engine.eagle.config import is_head, read_head_config
from draftgate.backends.engine.encoder.config import is_encoder, read_encoder_config
from draftgate.backends.engine.encoder.cross_encoder import find_head
from draftgate.backends.engine.encoder.sentence import read_prompts, read_sentence_modules
from draftgate.backends.engine.lora.weights import WEIGHTS_FILE, LoraCheckpoint
from draftgate.backends.engine.quantisation.scheme import quantises
from draftgate.backends.errors import CheckpointError
from draftgate.backends.tokenizer import Tokenizer
from tests.fuzz.mutation import JSON, SAFETENSORS, Form
from tests.fuzz.target import CORPUS, Target

MOST_BYTES = 1 << 20
"""Tensors up to this size are read."""

CONFIG = (SHIPPED_DRAFT / "config.json").read_bytes()
DRAFT = read_model_config(SHIPPED_DRAFT)
HEADER = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
SHARD = len(HEADER).to_bytes(8, "little") + HEADER + bytes(4)
WORDS = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "trim_offsets": True,
        "use_regex": True,
    },
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
}
ADAPTED = CORPUS / "adapter_weights" / "rank-1"
"""The weights of an adapter of rank 1, for a product of the shipped draft model."""

ADAPTER = {
    "peft_type": "LORA",
    "r": 1,
    "lora_alpha": 2,
    "target_modules": ["o_proj"],
    "layers_to_transform": [1],
}


class File:
    """A parser of one file of a directory, beside files that do not change."""

    def __init__(
        self, name: str, parse: Callable[[Path], object], beside: dict[str, bytes] | None = None
    ) -> None:
        self._name, self._parse, self._beside = name, parse, beside or {}

    def __call__(self, data: bytes) -> None:
        with TemporaryDirectory() as name:
            directory = Path(name)
            for path, content in {**self._beside, self._name: data}.items():
                (directory / path).parent.mkdir(exist_ok=True)
                (directory / path).write_bytes(content)
            self._parse(directory)


def read_tensors(directory: Path) -> None:
    """Read the headers, and the tensors of moderate size."""
    checkpoint = Checkpoint(directory)
    assert checkpoint.num_parameters >= 0
    with TensorReader(checkpoint, torch.float32, lambda _: None) as reader:
        for name, stored in checkpoint.tensors.items():
            if stored.num_bytes <= MOST_BYTES:
                reader.read_stored(name)


def read_decoder(directory: Path) -> None:
    """Read the shape of a language model, and which weights are quantised."""
    model = read_model_config(directory)
    quantises(model.quantisation, "model.layers.0.self_attn.q_proj")
    assert model.kv_bytes_per_token(2) > 0


def read_tokenizer(directory: Path) -> None:
    """Load a tokenizer, and use it."""
    tokenizer = Tokenizer(directory)
    ids = tokenizer.encode("ab <|x|> \U0001f600")
    tokenizer.decode(ids)
    tokenizer.least_tokens("ab")
    tokenizer.special_id("eos_token")
    assert tokenizer.template_variables is not None


def read_encoder(directory: Path) -> None:
    """Read the shape of an encoder, and the head of a cross-encoder."""
    is_encoder(directory)
    read_encoder_config(directory)
    find_head(directory)


def read_head(directory: Path) -> None:
    """Read the shape of an EAGLE-3 head."""
    is_head(directory)
    read_head_config(directory)


def read_modules(directory: Path) -> None:
    """Read the modules of an embedding model."""
    read_sentence_modules(directory, 64, torch.device("cpu"))


def read_adapter(directory: Path) -> None:
    """Check an adapter of the shipped draft model, and read it."""
    for _ in LoraCheckpoint(directory, DRAFT).read(torch.float32):
        pass


FILES: dict[str, tuple[File, Form]] = {
    "safetensors": (File("model.safetensors", read_tensors), SAFETENSORS),
    "safetensors_index": (
        File("model.safetensors.index.json", read_tensors, {"shard.safetensors": SHARD}),
        JSON,
    ),
    "model_config": (File("config.json", read_decoder), JSON),
    "generation_config": (
        File("generation_config.json", read_decoder, {"config.json": CONFIG}),
        JSON,
    ),
    "encoder_config": (File("config.json", read_encoder), JSON),
    "eagle_config": (File("config.json", read_head), JSON),
    "adapter_config": (
        File("adapter_config.json", read_adapter, {WEIGHTS_FILE: ADAPTED.read_bytes()}),
        JSON,
    ),
    "adapter_weights": (
        File(WEIGHTS_FILE, read_adapter, {"adapter_config.json": json.dumps(ADAPTER).encode()}),
        SAFETENSORS,
    ),
    "sentence_modules": (File("modules.json", read_modules), JSON),
    "pooling_config": (File("1_Pooling/config.json", read_modules, {"modules.json": b"[]"}), JSON),
    "prompts": (File("config_sentence_transformers.json", read_prompts), JSON),
    "tokenizer": (File("tokenizer.json", read_tokenizer), JSON),
    "tokenizer_config": (
        File(
            "tokenizer_config.json", read_tokenizer, {"tokenizer.json": json.dumps(WORDS).encode()}
        ),
        JSON,
    ),
}

TARGETS = [Target(name, file, (CheckpointError,), form) for name, (file, form) in FILES.items()]
