"""Bias, penalties, bad words and min_tokens compared with a slow reference."""

from __future__ import annotations

import random

import pytest
import torch

from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.core.steps import SequenceWork, StepPlan
from draftgate.backends.engine.logits import adjust
from draftgate.backends.token_ids import compact
from draftgate.backends.types import GenerationRequest, SamplingParams
from draftgate.policies.types import SpeculationMode, SpeculationPlan
from tests.engine.reference_logits import adjusted

VOCAB = 40
EOS_IDS = frozenset({3, 17})


def random_sampling(rng: random.Random) -> SamplingParams:
    """Return random parameters, each of which is set in about every second request."""

    def sometimes(values: list[float], neutral: float) -> float:
        return rng.choice(values) if rng.random() < 0.5 else neutral

    biased = sorted(rng.sample(range(VOCAB), rng.choice([0, 0, 1, 5])))
    return SamplingParams(
        max_tokens=100,
        seed=0,
        logit_bias=tuple((token, rng.uniform(-100, 100)) for token in biased),
        repetition_penalty=sometimes([0.5, 1.1, 2.0], 1.0),
        frequency_penalty=sometimes([-2.0, 0.3, 1.9], 0.0),
        presence_penalty=sometimes([-1.1, 0.7, 2.0], 0.0),
        min_tokens=rng.choice([0, 0, 3, 6, 50]),
        ignore_eos=rng.random() < 0.2,
        stop_token_ids=tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 2]))),
        bad_words=tuple(
            tuple(rng.randrange(VOCAB // 2) for _ in range(rng.choice([1, 2, 2, 3])))
            for _ in range(rng.choice([0, 0, 4, 40]))
        ),
    )


def random_sequence(rng: random.Random, key: int) -> Sequence:
    def tokens(most: int) -> list[int]:
        # Few different tokens, so that their counts grow.
        return [rng.randrange(VOCAB // 2) for _ in range(rng.randint(0, most))]

    prompt = [rng.randrange(VOCAB), *tokens(12)]
    plan = SpeculationPlan("test", SpeculationMode.AUTO, "ngram", 8, "a test")
    request = GenerationRequest(str(key), compact(prompt), random_sampling(rng), plan)
    return Sequence(key, request, 0, prompt + tokens(9))


def verifying(sequence: Sequence, draft: Draft) -> SequenceWork:
    start = len(sequence.token_ids) - 1
    return SequenceWork(sequence, start, (sequence.token_ids[-1],), True, draft.depth_first())


def random_draft(rng: random.Random, most: int) -> Draft:
    """Return a random draft, which is a tree in half of the cases and may have equal siblings."""
    count = rng.randint(0, most)
    tokens = tuple(rng.randrange(VOCAB // 2) for _ in range(count))
    if rng.random() < 0.5:
        return Draft(tokens)
    return Draft(tokens, tuple(rng.randrange(-1, place) for place in range(count)))


def before_rows(work: SequenceWork) -> list[list[int]]:
    """Return the draft tokens that precede each row of a verify step."""
    found: list[list[int]] = [[]]
    for place, token in enumerate(work.draft.token_ids):
        found.append([*found[work.draft.parent(place) + 1], token])
    return found


def random_plan(rng: random.Random, sequences: int) -> StepPlan:
    """Return verify steps, decodes and some prefill chunks that sample nothing."""
    work = []
    for key in range(sequences):
        sequence = random_sequence(rng, key)
        if rng.random() < 0.15:
            chunk = tuple(sequence.token_ids[:1])
            work.append(SequenceWork(sequence, 0, chunk, samples=False))
        else:
            work.append(verifying(sequence, random_draft(rng, 6)))
    return StepPlan(tuple(work))


def random_logits(rng: random.Random, plan: StepPlan) -> torch.Tensor:
    rows = sum(work.num_samples for work in plan.work)
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    logits = torch.randn(rows, VOCAB, generator=generator) * 4
    logits[torch.rand(rows, VOCAB, generator=generator) < 0.05] = -torch.inf
    return logits


def expected(plan: StepPlan, logits: torch.Tensor) -> torch.Tensor:
    rows, row = [], 0
    for work in plan.work:
        prompt = list(work.sequence.request.prompt_ids)
        output = work.sequence.token_ids[len(prompt) :]
        for drafts in before_rows(work) if work.samples else ():
            before = output + drafts
            sampling = work.sequence.request.sampling
            rows.append(adjusted(logits[row].tolist(), prompt, before, sampling, EOS_IDS))
            row += 1
    return torch.tensor(rows).reshape(-1, VOCAB)


@pytest.mark.parametrize("case", range(40))
def test_adjusted_rows_equal_the_reference(case: int) -> None:
    """Every row of a mixed step equals a token-by-token computation, with and without drafts."""
    rng = random.Random(case)
    plan = random_plan(rng, 8)
    logits = random_logits(rng, plan)
    wanted = expected(plan, logits)
    adjust(plan, logits, EOS_IDS)
    torch.testing.assert_close(logits, wanted, rtol=1e-6, atol=3e-5)


@pytest.mark.parametrize("case", range(10))
def test_row_after_drafts_has_the_bits_of_a_row_after_tokens(case: int) -> None:
    """A row has the same bits after draft tokens as after confirmed tokens, in any batch."""
    rng = random.Random(100 + case)
    plan = random_plan(rng, 6)
    logits = random_logits(rng, plan)
    rows = iter(logits.clone())
    adjust(plan, logits, EOS_IDS)
    together = iter(logits)
    for work in plan.work:
        known = work.sequence
        for drafts in before_rows(work) if work.samples else ():
            drawn = [*known.token_ids, *drafts]
            alone = next(rows)[None].clone()
            sequence = Sequence(0, known.request, 0, drawn)
            adjust(StepPlan((verifying(sequence, Draft()),)), alone, EOS_IDS)
            assert torch.equal(alone[0], next(together))


def test_tokens_without_bias_or_count_keep_their_bits() -> None:
    """Penalties change only tokens of prompt, output and drafts. Neutral penalties change
    no token."""
    plan = SpeculationPlan("test", SpeculationMode.AUTO, "ngram", 8, "a test")
    for penalty in (1.0, 1.7):
        sampling = SamplingParams(
            100, 0, repetition_penalty=penalty, frequency_penalty=penalty - 1, min_tokens=0
        )
        sequence = Sequence(
            0, GenerationRequest("a", compact((1, 2)), sampling, plan), 0, compact([1, 2, 5])
        )
        step = StepPlan((verifying(sequence, Draft((8, 9))),))
        logits = random_logits(random.Random(1), step)
        before = logits.clone()
        adjust(step, logits, EOS_IDS)
        changed = (logits != before).nonzero().tolist()
        touched = [{1, 2, 5}, {1, 2, 5, 8}, {1, 2, 5, 8, 9}]
        assert all(token in touched[row] for row, token in changed)
        assert bool(changed) == (penalty != 1.0)
