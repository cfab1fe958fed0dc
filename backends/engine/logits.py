"""Changes to logits before temperature: grammars, bias, penalties, and forbidden early ends.

    z = -inf                                     tokens that are not allowed (grammars, clients)
    z = z + bias                                 OpenAI's logit_bias
    z = z / r if z > 0 else z * r                tokens of the prompt or the output
    z = z - (f * c + p * [c > 0])                c: occurrences of the token in the output
    z = z - 1e30                                 tokens that would complete a bad word
    z = -inf                                     tokens that would end before min_tokens

r is the repetition penalty (CTRL, arXiv 1909.05858), f and p are OpenAI's frequency and presence
penalties. In each row, the drafts that precede the row count as output. The row of a draft token
therefore has the same logits as a sequence without drafts after that token. Drafts do not change
the distribution.

Each step computes all changes from the tokens. The functions keep no state that preemption, resume
or a rejected draft could make stale. They read and write only tokens with a bias or a count, once
for all rows of a step. They work element by element, so bits do not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.core.steps import SequenceWork, StepPlan
from draftgate.backends.engine.kernels import token_mask_ref
from draftgate.backends.engine.transfer import to_device

_CACHED_PROMPTS: Final = 64
"""Number of prompts whose distinct tokens are cached, about the sequences of a batch."""

_AVOIDED: Final = 1e30
"""Penalty of a token that would complete a bad word. The penalty is finite, so that a grammar which
allows no other token still has a next token."""

_Tokens = npt.NDArray[np.int64]
_Values = npt.NDArray[np.float64]


class _Changes(NamedTuple):
    """Changes to the logits of one sequence.

    Attributes:
        tokens: [m] ascending, all different.
        bias: [rows, m], added first.
        repetition: [rows, m], divides positive logits and multiplies negative logits. 1 is off.
        penalty: [rows, m], subtracted last. Infinity forbids the token.
    """

    tokens: _Tokens
    bias: _Values
    repetition: _Values
    penalty: _Values


def adjust(plan: StepPlan, logits: Tensor, eos_ids: frozenset[int]) -> None:
    """Apply bias, penalties, bad words and min_tokens of every sequence to its rows, in place.

    Token ids of prompts, outputs and biases must be below the vocabulary's size.

    Args:
        plan: the work of each sequence.
        logits: float32 [rows, vocab_size], contiguous, with the rows of each sequence in order.
        eos_ids: tokens that end a sequence, all below the vocabulary's size.
    """
    places: list[_Tokens] = []  # indices into the flat logits
    values: list[_Values] = []
    first, vocab = 0, logits.shape[1]
    for work in plan.work:
        if work.samples and _changes_logits(work, eos_ids):
            changes = _changes(work, eos_ids)
            starts = np.arange(first, first + work.num_samples)[:, None] * vocab
            places.append((starts + changes.tokens).ravel())
            values.append(np.stack(changes[1:]).reshape(3, -1))
        first += work.num_samples
    if not places:
        return
    place = to_device(torch.from_numpy(np.concatenate(places)), logits.device)
    terms = torch.from_numpy(np.concatenate(values, axis=1).astype(np.float32))
    bias, repetition, penalty = to_device(terms, logits.device)
    flat = logits.view(-1)
    biased = flat[place] + bias
    repeated = torch.where(biased > 0, biased / repetition, biased * repetition)
    flat[place] = repeated - penalty


def forbid(plan: StepPlan, logits: Tensor) -> None:
    """Set the logits of tokens that a sequence may not sample to -inf, in place.

    Args:
        plan: the work of each sequence.
        logits: float32 [rows, vocab_size], contiguous, with the rows of each sequence in order.
    """
    rows: list[int] = []
    masks: list[bytes] = []
    first = 0
    for work in plan.work:
        if work.samples and (of_rows := row_masks(work.sequence, work.draft)):
            rows += range(first, first + work.num_samples)
            masks += of_rows
        first += work.num_samples
    forbid_rows(logits, rows, masks)


def row_masks(sequence: Sequence, draft: Draft) -> list[bytes]:
    """Return the mask of each row of a draft, or nothing if the sequence may sample any token."""
    if sequence.grammar is not None:
        return sequence.grammar.masks(draft)
    return [sequence.allowed] * (len(draft) + 1) if sequence.allowed else []


def forbid_rows(logits: Tensor, rows: Many[int], masks: Many[bytes]) -> None:
    """Set the logits of tokens that the masks do not allow to -inf, in place.

    The masks of a step reach a GPU in one copy, a bit for each token.

    Args:
        logits: float32 [rows, vocab_size], contiguous.
        rows: the row of each mask, all different.
        masks: masks from `row_masks`. A mask forbids all tokens beyond its end.
    """
    if not rows:
        return
    longest = max(map(len, masks))
    padded = b"".join([mask.ljust(longest, b"\0") for mask in masks])
    words = np.frombuffer(padded, dtype=np.int32).reshape(len(masks), -1)
    places = to_device(torch.tensor(rows), logits.device)
    packed = to_device(torch.from_numpy(words.copy()), logits.device)
    if logits.is_cuda:
        from draftgate.backends.engine.kernels import token_mask

        token_mask.forbid_tokens(logits, places, packed)
    else:
        token_mask_ref.forbid_tokens(logits, places, packed)


def in_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """Return the logits of a draft model in the target's vocabulary, contiguous.

    The vocabularies differ only by padding. Drafts contain only tokens of both vocabularies.

    Args:
        logits: float32 [rows, vocab_size of the draft model].
        vocab_size: vocabulary size of the target.
    """
    missing = vocab_size - logits.shape[1]
    if missing > 0:
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
    return logits[:, :vocab_size].contiguous()


def _changes_logits(work: SequenceWork, eos_ids: frozenset[int]) -> bool:
    sampling = work.sequence.request.sampling
    changes = sampling.logit_bias or sampling.bad_words or sampling.counts_tokens
    return bool(changes or _early_ends(work, eos_ids))


def _early_ends(work: SequenceWork, eos_ids: frozenset[int]) -> Iterable[int]:
    """Return the tokens that must not end the sequence before `min_tokens`."""
    sequence, sampling = work.sequence, work.sequence.request.sampling
    if sequence.output_tokens >= sampling.min_tokens or sequence.grammar is not None:
        return ()  # the grammar decides the end
    return (
        sampling.stop_token_ids if sampling.ignore_eos else eos_ids.union(sampling.stop_token_ids)
    )


def _changes(work: SequenceWork, eos_ids: frozenset[int]) -> _Changes:
    """Return the changes in time linear in the output, independent of the vocabulary."""
    sequence, sampling = work.sequence, work.sequence.request.sampling
    counts, repeats = sampling.counts_tokens, sampling.repetition_penalty != 1
    # A slice is a copy, so skip slices that no penalty uses.
    output = _ids(sequence.token_ids[sequence.prompt_tokens :] if counts else ())
    drafts = _ids(work.draft.token_ids if counts else ())
    prompt = _prompt_tokens(sequence.request.prompt_ids.tobytes()) if repeats else _ids(())
    biased = _ids(token for token, _ in sampling.logit_bias)
    ends = _ids(_early_ends(work, eos_ids))
    rows, word_ends = _bad_word_ends(work)
    tokens = _distinct(np.concatenate([prompt, output, drafts, biased, word_ends, ends]))

    count = _counts(tokens, output, work.draft if counts else Draft(), work.num_samples)
    seen = count > 0
    if repeats:
        seen[:, np.searchsorted(tokens, prompt)] = True
    bias = np.zeros(count.shape)
    bias[:, np.searchsorted(tokens, biased)] = [value for _, value in sampling.logit_bias]
    penalty = sampling.frequency_penalty * count + sampling.presence_penalty * (count > 0)
    penalty[rows, np.searchsorted(tokens, word_ends)] = _AVOIDED
    too_short = np.array([0, *work.draft.depths]) + sequence.output_tokens < sampling.min_tokens
    penalty[np.ix_(too_short, np.searchsorted(tokens, ends))] = np.inf
    return _Changes(tokens, bias, np.where(seen, sampling.repetition_penalty, 1.0), penalty)


def _counts(tokens: _Tokens, output: _Tokens, draft: Draft, rows: int) -> _Values:
    """Return the number of occurrences of each token before each row: [rows, m].

    The prompt does not count. Row 0 follows the output. Row i + 1 follows token i of the draft and
    its ancestors.
    """
    drawn = np.bincount(np.searchsorted(tokens, output), minlength=len(tokens))
    count = np.repeat(drawn[None].astype(np.float64), rows, axis=0)
    for place, column in enumerate(np.searchsorted(tokens, _ids(draft.token_ids))):
        count[place + 1] = count[draft.parent(place) + 1]
        count[place + 1, column] += 1
    return count


def _bad_word_ends(work: SequenceWork) -> tuple[_Tokens, _Tokens]:
    """Return the rows, and for each the token that would complete a bad word of the output."""
    sequence, words = work.sequence, work.sequence.request.sampling.bad_words
    pairs: list[tuple[int, int]] = []
    if words:
        ends, longest = _ends_by_beginning(words)
        # Contexts longer than the longest beginning are not needed.
        first = max(sequence.prompt_tokens, len(sequence.token_ids) - longest)
        before = [tuple(sequence.token_ids[first:])]
        for place, token in enumerate(work.draft.token_ids):
            before.append((*before[work.draft.parent(place) + 1], token))
        for row, context in enumerate(before):
            for length in range(min(longest, len(context)) + 1):
                tail = context[len(context) - length :]
                pairs += ((row, token) for token in ends.get(tail, ()))
    return _ids(row for row, _ in pairs), _ids(token for _, token in pairs)


@lru_cache(maxsize=_CACHED_PROMPTS)
def _ends_by_beginning(
    words: tuple[tuple[int, ...], ...],
) -> tuple[dict[tuple[int, ...], list[int]], int]:
    """Return the last tokens of words by their other tokens, and the length of the longest key."""
    ends: dict[tuple[int, ...], list[int]] = {}
    for word in words:
        ends.setdefault(word[:-1], []).append(word[-1])
    return ends, max(map(len, ends))


@lru_cache(maxsize=_CACHED_PROMPTS)
def _prompt_tokens(prompt_ids: bytes) -> _Tokens:
    """Return the distinct tokens of a prompt. The cache saves this work in later steps."""
    return _distinct(np.frombuffer(prompt_ids, dtype=np.int64))


def _ids(tokens: Iterable[int]) -> _Tokens:
    return np.fromiter(tokens, dtype=np.int64)


def _distinct(tokens: _Tokens) -> _Tokens:
    """Return the distinct tokens in ascending order."""
    # `np.unique` takes three times as long as this sort.
    ordered = np.sort(tokens)
    return ordered[np.diff(ordered, prepend=-1) > 0]
