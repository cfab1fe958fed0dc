"""Steps and generation modes of `transformers`, on the same weights as the engine."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from typing import Any, Final

import torch

from bench.engine.cases import Case
from bench.engine.device import elapsed_s
from bench.engine.models import Model

LOOKUP_TOKENS: Final = 10
"""Number of candidate tokens of its prompt lookup, as in its documentation."""

PAGE_TOKENS: Final = 256
"""Page size of its continuous batching (its default)."""

BATCH_TOKENS: Final = 2048
"""Tokens per step of its continuous batching, equal to the limit of the engine."""

RESULT_TIMEOUT_S: Final = 1.0

Prompt = tuple[int, ...]


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


class TransformersGenerate:
    """Greedy `generate` for a single prompt at a time, always to the full length."""

    def __init__(self, model: Model, new_tokens: int, assistant: Model | None = None) -> None:
        """Load the model.

        Args:
            new_tokens: number of output tokens.
            assistant: draft model for `assisted`.

        Raises:
            ImportError: `transformers` is not installed.
        """
        self._device = model.device
        self._new_tokens = new_tokens
        self._model = _endless(model.transformers())
        self._assistant = None if assistant is None else _endless(assistant.transformers())

    def plain(self, prompts: Many[Prompt]) -> list[list[int]]:
        """Generate without drafts."""
        return [self._generate(prompt) for prompt in prompts]

    def assisted(self, prompts: Many[Prompt]) -> list[list[int]]:
        """Generate with drafts from the assistant."""
        return [self._generate(prompt, assistant_model=self._assistant) for prompt in prompts]

    def prompt_lookup(self, prompts: Many[Prompt]) -> list[list[int]]:
        """Generate with n-gram drafts from the preceding text."""
        return [
            self._generate(prompt, prompt_lookup_num_tokens=LOOKUP_TOKENS) for prompt in prompts
        ]

    @torch.inference_mode()
    def _generate(self, prompt: Prompt, **options: Any) -> list[int]:
        ids = torch.tensor([prompt], device=self._device)
        token_ids = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=self._new_tokens,
            **options,
        )
        output: list[int] = token_ids[0, len(prompt) :].tolist()
        return output


class ContinuousBatching:
    """Continuous batching of `transformers`, with the same memory for the batch as the engine."""

    def __init__(self, manager: Any, new_tokens: int) -> None:
        self._manager = manager
        self._new_tokens = new_tokens

    def generate(self, prompts: Many[Prompt]) -> list[list[int]]:
        """Generate for all prompts concurrently.

        Raises:
            RuntimeError: the thread of the manager died.
        """
        ids = self._manager.add_requests(
            inputs=[list(prompt) for prompt in prompts], max_new_tokens=self._new_tokens
        )
        outputs: dict[str, list[int]] = {}
        while len(outputs) < len(prompts):
            result = self._manager.get_result(timeout=RESULT_TIMEOUT_S)
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(f"continuous batching: {result.error}")
                outputs[result.request_id] = list(result.generated_tokens)
            elif result is None and not self._manager.is_running():
                raise RuntimeError("the thread of continuous batching died")
        return [outputs[request_id] for request_id in ids]


@contextmanager
def continuous_batching(
    model: Model, batch: int, longest: int, new_tokens: int
) -> Iterator[ContinuousBatching]:
    """Run the manager of continuous batching.

    Its memory is limited to the batch. By default the manager would take most of the memory, and on
    a CPU its steps would take seconds.

    Args:
        batch: number of concurrent prompts.
        longest: number of tokens of the longest sequence.
        new_tokens: number of output tokens.

    Raises:
        ImportError: `transformers` is not installed, or too old.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    # The manager changes the attention of its model, so the model is separate.
    loaded = _endless(model.transformers())
    greedy = GenerationConfig(do_sample=False, max_new_tokens=new_tokens, eos_token_id=-1)
    sizes = ContinuousBatchingConfig(
        page_size=PAGE_TOKENS,
        num_blocks=batch * (1 + -(-longest // PAGE_TOKENS)),
        max_batch_tokens=BATCH_TOKENS,
        allow_block_sharing=False,  # prompts repeat in every round and must not be cached
    )
    with loaded.continuous_batching_context_manager(
        generation_config=greedy, continuous_batching_config=sizes, block=True
    ) as manager:
        yield ContinuousBatching(manager, new_tokens)


def reason(error: Exception) -> str:
    """Return an error as a single line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _endless(loaded: Any) -> Any:
    """Return the model without end tokens, so that all outputs have equal length."""
    loaded.generation_config.eos_token_id = None
    loaded.generation_config.pad_token_id = 0
    return loaded
