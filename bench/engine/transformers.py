"""Steps of `transformers`, on the same weights as the engine."""

from __future__ import annotations

from typing import Any

import torch

from bench.engine.cases import Case
from bench.engine.device import elapsed_s
from bench.engine.models import Model


class TransformersSteps:
    """Single steps, each with a newly filled cache."""

    def __init__(self, model: Model) -> None:
        """Load the model.

        Raises:
            ImportError: `transformers` is not installed.
        """
        self._device, self._dtype = model.device, model.dtype
        self._model = model.transformers()

    @torch.inference_mode()
    def step_s(self, case: Case) -> float:
        """Run a forward pass with greedy tokens, and return its seconds."""
        cache = self._cache(case)
        ids = torch.ones(case.batch, case.tokens, dtype=torch.int64, device=self._device)
        first, end = case.context_tokens, case.context_tokens + case.tokens
        positions = torch.arange(first, end, device=self._device).expand(case.batch, -1)
        kept = 1 if case.name == "prefill" else 0

        def step() -> object:
            logits = self._model(
                input_ids=ids,
                position_ids=positions,
                past_key_values=cache,
                logits_to_keep=kept,
            ).logits
            return logits.argmax(-1).tolist()

        return elapsed_s(self._device, step)

    def _cache(self, case: Case) -> Any:
        from transformers import DynamicCache

        config = self._model.config
        cache = DynamicCache(config=config)
        if not case.context_tokens:
            return cache
        shape = (case.batch, config.num_key_value_heads, case.context_tokens, config.head_dim)
        for layer in range(config.num_hidden_layers):
            keys, values = (
                torch.randn(shape, dtype=self._dtype, device=self._device) for _ in range(2)
            )
            cache.update(keys, values, layer)
        return cache


def reason(error: Exception) -> str:
    """Return an error as a single line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
