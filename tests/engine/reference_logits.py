"""Slow reference implementations of changes to logits, in plain Python."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from draftgate.backends.types import SamplingParams


def adjusted(
    logits: Sequence[float],
    prompt: Sequence[int],
    output: Sequence[int],
    sampling: SamplingParams,
    eos_ids: Collection[int] = (),
) -> list[float]:
    """Apply all changes of `draftgate.backends.engine.logits.adjust` to a row of logits token by
    token, in double precision."""
    bias = dict(sampling.logit_bias)
    found = []
    for token, logit in enumerate(logits):
        value = logit + bias.get(token, 0.0)
        if token in prompt or token in output:
            factor = sampling.repetition_penalty
            value = value / factor if value > 0 else value * factor
        value -= sampling.frequency_penalty * output.count(token)
        value -= sampling.presence_penalty if token in output else 0.0
        if any(word == (*output, token)[-len(word) :] for word in sampling.bad_words):
            value -= 1e30
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_ids)}
        too_early = len(output) < sampling.min_tokens
        found.append(-math.inf if token in ends and too_early else value)
    return found


def logprobs(logits: Sequence[float]) -> list[float]:
    """Return the log-softmax of a row of logits, in double precision."""
    best = max(logits)
    log_sum = best + math.log(math.fsum(math.exp(value - best) for value in logits))
    return [value - log_sum for value in logits]
