"""Checks and reads the weights of a LoRA adapter in the format of PEFT.

An adapter adds `scale * B(A x)` to the product of a module, with A of [rank, inputs] and B of
[outputs, rank]. The modules of a fused product share one pair: their A are stacked, and their B,
multiplied by their scales, are the diagonal blocks of one matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from draftgate.backends.engine.checkpoint import (
    BASE_PREFIX,
    OTHER_PREFIXES,
    STORED_DTYPES,
    Checkpoint,
    TensorReader,
    files_hash,
)
from draftgate.backends.engine.config import ModelConfig
from draftgate.backends.engine.lora.config import CONFIG_FILE, LoraConfig, read_lora_config
from draftgate.backends.engine.stored_linear import FusedModules
from draftgate.backends.engine.weights import layer_prefix, layer_products
from draftgate.backends.errors import CheckpointError

WEIGHTS_FILE: Final = "adapter_model.safetensors"
PEFT_PREFIX: Final = "base_model.model."

RANK_MULTIPLE: Final = 16
"""Multiple to which zeros pad the rank of a pair, so that adapters share few shapes of kernels."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """The pair of matrices of a fused product.

    Attributes:
        down: [rank, inputs].
        up: [outputs, rank], which includes the scales.
    """

    down: Tensor
    up: Tensor


LayerPairs = tuple[LowRank | None, ...]
"""The pairs of the products of a layer, as `adapted_products` lists them."""


def adapted_products(config: ModelConfig, layer: int) -> tuple[FusedModules, ...]:
    """Return the products of a layer that adapters may change, with full names.

    These are all products but those of experts.
    """
    products = layer_products(config)
    if config.experts is not None and layer in config.experts.layers:
        return tuple(one.below(layer_prefix(layer)) for one in (products.qkv, products.output))
    return tuple(one.below(layer_prefix(layer)) for one in products)


class LoraCheckpoint:
    """A checked adapter of a model, whose weights are read when they are needed.

    Attributes:
        directory: its directory.
        digest: 12 hex digits that identify the content of its files.
    """

    def __init__(self, directory: Path, model: ModelConfig) -> None:
        """Read the config and the header of the weights, and check both against the model.

        Raises:
            CheckpointError: a file is missing or damaged, the adapter does not fit the model, or
                the engine does not support it.
        """
        self.directory = directory
        self._model = model
        self._config = read_lora_config(directory)
        if not (directory / WEIGHTS_FILE).is_file():
            raise CheckpointError(
                f"{directory / WEIGHTS_FILE} does not exist; an adapter needs its weights as "
                "safetensors"
            )
        self._checkpoint = Checkpoint(directory, _engine_name, WEIGHTS_FILE)
        self._check_targets()
        self._check_tensors()
        self.digest = self._hash()

    def read(self, dtype: torch.dtype) -> Iterator[LayerPairs]:
        """Yield the pairs of each layer in main memory.

        Raises:
            CheckpointError: the files have changed since they were checked.
        """
        if self._hash() != self.digest:
            raise CheckpointError(f"{self.directory}: the files have changed since the start")
        with TensorReader(self._checkpoint, torch.float32, lambda _bytes: None) as reader:
            for layer in range(self._model.num_layers):
                products = adapted_products(self._model, layer)
                yield tuple(self._pair(reader, product, layer, dtype) for product in products)

    def _hash(self) -> str:
        try:
            return files_hash([self.directory / CONFIG_FILE, self.directory / WEIGHTS_FILE])
        except OSError as error:
            raise CheckpointError(f"{self.directory}: cannot read the adapter: {error}") from error

    def _check_targets(self) -> None:
        """Check that the engine can adapt every listed module."""
        layers = range(self._model.num_layers)
        names = [n for i in layers for one in adapted_products(self._model, i) for n in one.names]
        if unmatched := self._config.unmatched(names):
            supported = dict.fromkeys(name.rpartition(".")[2] for name in names)
            raise CheckpointError(
                f"{self.directory / CONFIG_FILE}: target_modules {unmatched[0]!r} is not "
                f"supported; supported for this model: {', '.join(supported)}"
            )

    def _check_tensors(self) -> None:
        """Check that the file has the tensors of the targets in the right shapes, and no others."""
        expected = {
            name: shape
            for layer in range(self._model.num_layers)
            for product in adapted_products(self._model, layer)
            for module in product.each()
            if self._config.adapts(module.names[0], layer)
            for name, shape in _shapes(module, self._config).items()
        }
        path = self.directory / WEIGHTS_FILE
        for name, stored in self._checkpoint.tensors.items():
            if name not in expected:
                raise CheckpointError(
                    f"{path}: tensor {stored.stored_name} belongs to no module of the model that "
                    "target_modules names and the engine supports"
                )
        if not expected:
            raise CheckpointError(
                f"{self.directory / CONFIG_FILE}: target_modules names no module of the model"
            )
        for name, shape in expected.items():
            stored_ = self._checkpoint.tensors.get(name)
            if stored_ is None:
                raise CheckpointError(f"{path}: tensor {PEFT_PREFIX}{name} is missing")
            if stored_.shape != shape:
                raise CheckpointError(
                    f"{path}: tensor {stored_.stored_name} has shape {stored_.shape}, but the rank "
                    f"of the adapter and the base model require {shape}"
                )
            if stored_.dtype not in STORED_DTYPES:
                raise CheckpointError(
                    f"{path}: tensor {stored_.stored_name} has dtype {stored_.dtype}; "
                    f"supported: {', '.join(STORED_DTYPES)}"
                )

    def _pair(
        self, reader: TensorReader, product: FusedModules, layer: int, dtype: torch.dtype
    ) -> LowRank | None:
        adapted = [self._config.adapts(name, layer) for name in product.names]
        if not any(adapted):
            return None
        ranks = [self._config.rank_of(name) for name in product.names]
        total = sum(rank for rank, used in zip(ranks, adapted, strict=True) if used)
        width = -(-total // RANK_MULTIPLE) * RANK_MULTIPLE
        down, up = torch.zeros(width, product.inputs), torch.zeros(sum(product.outputs), width)
        first = row = 0
        for name, outputs, rank, used in zip(
            product.names, product.outputs, ranks, adapted, strict=True
        ):
            if used:
                down[first : first + rank] = reader.read([_tensor(name, "A")])
                block = reader.read([_tensor(name, "B")])
                up[row : row + outputs, first : first + rank] = block * self._config.scale_of(name)
                first += rank
            row += outputs
        return LowRank(down.to(dtype), up.to(dtype))


def _tensor(module: str, matrix: str) -> str:
    return f"{module}.lora_{matrix}.weight"


def _shapes(module: FusedModules, config: LoraConfig) -> dict[str, tuple[int, ...]]:
    (name,), (outputs,) = module.names, module.outputs
    rank = config.rank_of(name)
    return {_tensor(name, "A"): (rank, module.inputs), _tensor(name, "B"): (outputs, rank)}


def _engine_name(stored: str) -> str:
    """Return the engine's name of a tensor, or the stored name for a part that it does not know."""
    name = stored.removeprefix(PEFT_PREFIX)
    for prefix in (BASE_PREFIX, *OTHER_PREFIXES):
        if name.startswith(f"{prefix}layers."):
            return BASE_PREFIX + name.removeprefix(prefix)
    return stored
