"""Checks the LoRA adapters of a worker at its start, and prepares their memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from draftgate.backends.adapter_card import AdapterCard
from draftgate.backends.checkpoints import find_checkpoint, named_checkpoints
from draftgate.backends.core.worker import WorkerCore
from draftgate.backends.engine.config import ModelConfig
from draftgate.backends.engine.lora.products import CpuAdapters
from draftgate.backends.engine.lora.service import AdapterService
from draftgate.backends.engine.lora.weights import LoraCheckpoint
from draftgate.backends.engine.model import Decoder
from draftgate.backends.engine.weights import Weights
from draftgate.backends.types import ModelCard
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.values import replace


@dataclass(frozen=True, slots=True)
class CheckedAdapters:
    """The checked adapters of a model.

    Attributes:
        cards: the adapters by name, in order.
        checkpoints: the adapters by digest.
        most: maximum number of adapters in memory.
    """

    model: ModelConfig
    cards: tuple[AdapterCard, ...]
    checkpoints: Mapping[str, LoraCheckpoint]
    most: int

    def described(self, card: ModelCard) -> ModelCard:
        """Return the card of the model with its adapters."""
        capabilities = replace(card.capabilities, adapters=self.cards)
        return replace(card, capabilities=capabilities)

    def decoder(
        self, weights: Weights, max_model_len: int, *, exact: bool
    ) -> tuple[Decoder, CpuAdapters | None]:
        """Return the decoder with its compiled products, and the memory of its adapters if any."""
        memory = CpuAdapters(weights, exact=exact) if self.cards else None
        decoder = Decoder(
            self.model, weights if memory is None else memory.weights, max_model_len, memory
        )
        if decoder.device.type == "cpu":
            decoder.compile_products()
        return decoder, memory

    def service(
        self, worker: WorkerCore, memory: CpuAdapters | None, dtype: torch.dtype, *, exact: bool
    ) -> AdapterService | None:
        """Return the service that loads the adapters, or None without any.

        Args:
            exact: whether the worker promises that texts do not depend on the batch.
        """
        if memory is None:
            return None
        return AdapterService(worker, memory, self.checkpoints, self.most, dtype, exact=exact)


def check_adapters(
    config: WorkerConfig, model: ModelConfig, device: torch.device
) -> CheckedAdapters:
    """Check the adapters of a worker, and download them if necessary.

    Raises:
        CheckpointError: an adapter is damaged, does not fit the model, or is not supported.
        ValueError: the device does not support adapters.
    """
    if config.loras and device.type != "cpu":
        raise ValueError("--lora is not supported on a GPU; use --device cpu, or start without it")
    cards, checkpoints = [], {}
    for name, root in named_checkpoints(config.loras):
        checkpoint = LoraCheckpoint(find_checkpoint(root), model)
        checkpoints[checkpoint.digest] = checkpoint
        cards.append(AdapterCard(name, checkpoint.digest, root))
    return CheckedAdapters(model, tuple(cards), checkpoints, config.max_loras)
