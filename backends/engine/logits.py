"""What happens to logits before temperature: bias, penalties, and ends that are not due yet.

    z = l + bias                                 OpenAI's logit_bias
    z = z / r if z > 0 else z * r                for tokens of the prompt or the output
    z = z - (f * c + p * [c > 0])                c: how often the token stands in the output
    z = -inf                                     for end-of-sequence tokens before min_tokens

r is the repetition penalty (CTRL, arXiv 1909.05858), f and p are OpenAI's frequency and presence
penalties. Drafts before a row are output to it: the row behind draft i sees the logits that a
sequence without drafts would see once it had drawn drafts 1 to i, so drafts change no law.

All of it is a function of tokens, computed anew in each step: nothing is kept that preemption,
resume or a rejected draft could leave stale. Only tokens that carry a bias or a count are read and
written, once for all rows of a step, element by element: bits do not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from backends.core.steps import SequenceWork, StepPlan
from backends.types import SamplingParams

_KEPT_PROMPTS: Final = 64
"""Prompts whose distinct tokens are remembered: as many sequences as a batch often has."""

_Tokens = npt.NDArray[np.int64]
_Values = npt.NDArray[np.float64]


class _Changes(NamedTuple):
    """What changes in the logits of one sequence.

    Attributes:
        tokens: [m] ascending, all different.
        bias: [rows, m]; added first.
        repetition: [rows, m]; divides what is positive and multiplies what is negative; 1 is off.
        penalty: [rows, m]; subtracted last; inf forbids.
    """

    tokens: _Tokens
    bias: _Values
    repetition: _Values
    penalty: _Values


def adjust(plan: StepPlan, logits: Tensor, eos_ids: frozenset[int]) -> None:
    """Apply bias, penalties and min_tokens of every sequence to its rows, in place.

    Costs nothing where no sequence has any. Token ids of prompts, outputs and biases must be below
    the vocabulary's size.

    Args:
        logits: float32 [rows, vocab_size], contiguous; the rows of each part in order.
        eos_ids: tokens that end a sequence; all below the vocabulary's size.
    """
    places: list[_Tokens] = []  # in the flat logits
    values: list[_Values] = []
    first, vocab = 0, logits.shape[1]
    for work in plan.work:
        if work.samples and _changes_logits(work):
            changes = _changes(work, eos_ids)
            starts = np.arange(first, first + work.num_samples)[:, None] * vocab
            places.append((starts + changes.tokens).ravel())
            values.append(np.stack(changes[1:]).reshape(3, -1))
        first += work.num_samples
    if not places:
        return
    place = torch.from_numpy(np.concatenate(places)).to(logits.device)
    terms = torch.from_numpy(np.concatenate(values, axis=1).astype(np.float32))
    bias, repetition, penalty = terms.to(logits.device)
    flat = logits.view(-1)
    biased = flat[place] + bias
    repeated = torch.where(biased > 0, biased / repetition, biased * repetition)
    flat[place] = repeated - penalty


def _changes_logits(work: SequenceWork) -> bool:
    sampling = work.sequence.request.sampling
    return bool(sampling.logit_bias) or _counts_tokens(sampling) or _forbids_ends(work)


def _counts_tokens(sampling: SamplingParams) -> bool:
    return (
        sampling.repetition_penalty != 1
        or sampling.frequency_penalty != 0
        or sampling.presence_penalty != 0
    )


def _forbids_ends(work: SequenceWork) -> bool:
    sampling = work.sequence.request.sampling
    return not sampling.ignore_eos and work.sequence.output_tokens < sampling.min_tokens


def _changes(work: SequenceWork, eos_ids: frozenset[int]) -> _Changes:
    """Return what changes; the cost is that of a pass over the output, whatever the vocabulary."""
    sequence, sampling = work.sequence, work.sequence.request.sampling
    counts, repeats = _counts_tokens(sampling), sampling.repetition_penalty != 1
    # Slices copy: of what is not used, take nothing.
    output = _ids(sequence.token_ids[sequence.prompt_tokens :] if counts else ())
    drafts = _ids(work.draft_ids if counts else ())
    prompt = _distinct(sequence.request.prompt_ids) if repeats else _ids(())
    biased = _ids(token for token, _ in sampling.logit_bias)
    ends = _ids(eos_ids if _forbids_ends(work) else ())
    tokens = _different(np.concatenate([prompt, output, drafts, biased, ends]))

    count = _counts(tokens, output, drafts, work.num_samples)
    seen = count > 0
    if repeats:
        seen[:, np.searchsorted(tokens, prompt)] = True
    bias = np.zeros(count.shape)
    bias[:, np.searchsorted(tokens, biased)] = [value for _, value in sampling.logit_bias]
    penalty = sampling.frequency_penalty * count + sampling.presence_penalty * (count > 0)
    rows_before_min = max(sampling.min_tokens - sequence.output_tokens, 0)
    penalty[:rows_before_min, np.searchsorted(tokens, ends)] = np.inf
    return _Changes(tokens, bias, np.where(seen, sampling.repetition_penalty, 1.0), penalty)


def _counts(tokens: _Tokens, output: _Tokens, drafts: _Tokens, rows: int) -> _Values:
    """Return how often each token stands in the output and the drafts before each row: [rows, m].

    Row 0 has no drafts before it, each further row one more.
    """
    drawn = np.bincount(np.searchsorted(tokens, output), minlength=len(tokens))
    count = np.repeat(drawn[None].astype(np.float64), rows, axis=0)
    for before, column in enumerate(np.searchsorted(tokens, drafts)):
        count[before + 1 :, column] += 1
    return count


@lru_cache(maxsize=_KEPT_PROMPTS)
def _distinct(prompt_ids: tuple[int, ...]) -> _Tokens:
    """Return the different tokens of a prompt, which may be long and is the same in every step."""
    return _different(_ids(prompt_ids))


def _ids(tokens: Iterable[int]) -> _Tokens:
    return np.fromiter(tokens, dtype=np.int64)


def _different(tokens: _Tokens) -> _Tokens:
    """Return the different tokens, ascending; `np.unique` takes three times as long."""
    ordered = np.sort(tokens)
    return ordered[np.diff(ordered, prepend=-1) > 0]
