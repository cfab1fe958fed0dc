"""Builds a warm worker of an encoder from its configuration."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Final

import torch

from draftgate.backends.checkpoints import SHIPPED_MODEL_ID, checkpoint_id
from draftgate.backends.core.text_batcher import TextBatcher, TextLimits
from draftgate.backends.engine.checkpoint import checkpoint_hash
from draftgate.backends.engine.encoder.config import read_encoder_config
from draftgate.backends.engine.encoder.cross_encoder import find_head, read_head
from draftgate.backends.engine.encoder.model import Encoder
from draftgate.backends.engine.encoder.runner import EncoderRunner
from draftgate.backends.engine.encoder.sentence import read_prompts, read_sentence_modules
from draftgate.backends.engine.encoder.weights import load_encoder_weights
from draftgate.backends.engine.numerics import choose_dtype, is_exact, numerics_class
from draftgate.backends.errors import CheckpointError
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import Capabilities, ModelCard, Task
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.costs.step_cost import StepCost

BATCH_STEP_TOKENS: Final = 128
"""Maximum tokens of a step of batch texts, unless a single text is longer.

A query waits for at most one such step. With MiniLM (22 million weights, float32), a step of 128
tokens takes 46 to 50 ms. It embeds 2,500 to 2,800 tokens per second, and one of 1,024 tokens embeds
2,300 to 2,500. With 64 tokens, the rate is 2,000 to 2,200 (one thread of a Zen 3, 2026-11-26).
"""

MAX_SEQUENCES: Final = 1024
"""Maximum texts that the gateway sends to a worker at the same time: 16 requests with 64 texts in
flight each. A query then waits on the worker, which runs it next, and not in the gateway until a
document ends. (Chosen by that reasoning, not tuned, 2026-11-26.)"""

TIMED_TOKENS: Final = (16, 64, 256)
"""Token counts of the timed steps: a query, a passage, and a full step of documents."""

_TIMED_RUNS: Final = 3
"""Runs of each shape. The fastest run counts, because other processes only lengthen runs."""

PROBE_LENGTHS: Final = (1, 2, 3, 7, 16, 33, 61)
"""Lengths of the texts that test whether bits depend on the batch: below and above the least rows
of a product, and odd lengths, which end a vector register early."""

_PROBE_VOCABULARY: Final = 32
"""Upper bound on the token ids of timed and probed texts."""


def load_encoder(
    config: WorkerConfig,
    directory: Path,
    device: torch.device,
    progress: Callable[[float], None],
) -> tuple[TextBatcher, EncoderRunner, ModelCard]:
    """Load, warm up and measure an encoder.

    Args:
        progress: called with the completed share of reading the weights, 0 to 1.

    Raises:
        CheckpointError: the model cannot be loaded.
        ValueError: a setting is invalid.
    """
    shape, tokenizer = read_encoder_config(directory), Tokenizer(directory)
    if tokenizer.vocab_size > shape.vocab_size:
        raise CheckpointError(
            f"{directory / 'tokenizer.json'}: the tokenizer's largest id is "
            f"{tokenizer.vocab_size - 1}, but config.json has vocab_size {shape.vocab_size}"
        )
    dtype = choose_dtype(config.dtype, directory, device.type)
    head = find_head(directory)
    modules = (
        read_sentence_modules(directory, shape.hidden_size, device)
        if head is None
        else read_head(directory, head, shape.hidden_size, device)
    )
    task = Task.EMBED if head is None else Task.SCORE
    weights = load_encoder_weights(
        directory, shape, dtype, device, exact=config.exact, progress=progress
    )
    limits = (config.max_model_len, modules.max_tokens, shape.max_tokens)
    max_model_len = min(limit for limit in limits if limit is not None)
    runner = EncoderRunner(Encoder(shape, weights), modules)
    test = partial(rows_are_exact, runner.encoder, max_model_len)
    exact = is_exact(test, dtype, device, required=config.exact)
    step_tokens = config.step_limits(device.type).tokens
    worker = TextBatcher(
        TextLimits(
            max_model_len,
            step_tokens,
            min(BATCH_STEP_TOKENS, step_tokens),
            MAX_SEQUENCES,
        ),
        tokenizer,
        _measured_cost(runner, max_model_len),
        task,
    )
    digest = f"{checkpoint_hash(directory)}-{modules.digest}"
    library = f"torch-{torch.__version__}"
    card = ModelCard(
        config.model_id or checkpoint_id(config.model),
        config.model or SHIPPED_MODEL_ID,
        max_model_len,
        numerics_class(digest, dtype, library, device, exact=exact),
        int(time.time()),
        Capabilities(
            exact=exact,
            speculation=False,
            tasks=(task,),
            embedding_size=modules.size(shape.hidden_size) if task is Task.EMBED else 0,
        ),
        prompts=read_prompts(directory),
    )
    return worker, runner, card


@torch.inference_mode()
def rows_are_exact(encoder: Encoder, max_tokens: int) -> bool:
    """Return whether texts have bit-identical states alone and together, in any order.

    The modules after the encoder run for each text alone.
    """
    texts = [_text(min(length, max_tokens)) for length in PROBE_LENGTHS]
    alone = [encoder.hidden([text])[0] for text in texts]
    together, reverse = encoder.hidden(texts), encoder.hidden(texts[::-1])[::-1]
    return all(
        torch.equal(one, other)
        for found in (together, reverse)
        for one, other in zip(alone, found, strict=True)
    )


def _text(tokens: int) -> Sequence[int]:
    return [place * 7 % _PROBE_VOCABULARY for place in range(tokens)]


def _measured_cost(runner: EncoderRunner, max_tokens: int) -> StepCost:
    """Time steps with one text, and return the cost of steps."""
    buckets = [tokens for tokens in TIMED_TOKENS if tokens <= max_tokens] or [max_tokens]
    measured_s = []
    for tokens in buckets:
        text = [_text(tokens)]
        runner.pooled(text)  # the first run compiles kernels
        measured_s.append(min(_timed_s(runner, text) for _ in range(_TIMED_RUNS)))
    return StepCost(tuple(buckets), tuple(accumulate(measured_s, max)))


def _timed_s(runner: EncoderRunner, texts: list[Sequence[int]]) -> float:
    started_s = time.perf_counter()
    runner.pooled(texts)
    return time.perf_counter() - started_s
