"""The measured cost of a step includes the experts that its tokens read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftgate.backends.core.steps import SequenceWork, StepPlan
from draftgate.backends.engine.mlp import LoopedExperts
from draftgate.backends.engine.warmup import TIMED_SEQUENCES, measure_step_cost
from tests.engine.step_logits import runner_of
from tests.engine.test_model_families import EXPERTS, random_model_of

VOCABULARY = 300
BUCKETS = (4, 16, 64, 128)


def tokens_of(work: SequenceWork) -> list[int]:
    return [*work.token_ids, *work.draft.token_ids]


class OneSecondPerToken:
    """A runner whose step takes a second for each token id, however often it occurs."""

    def execute(self, plan: StepPlan) -> Any:
        tokens = {token for work in plan.work for token in tokens_of(work)}
        return SimpleNamespace(step_s=float(len(tokens)))


def test_timed_steps_have_different_tokens() -> None:
    """All tokens of a timed step differ, and a batch has the tokens of the step that it is compared
    with."""
    runner: Any = OneSecondPerToken()
    cost = measure_step_cost(runner, 1024, 64, BUCKETS, vocab_size=VOCABULARY)
    assert cost.step_s == BUCKETS
    assert cost.sequence_s == 0.0
    assert cost.kv_token_s == cost.pair_s == 0.0


def test_timed_steps_read_the_experts_of_a_text(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Timed steps read about as many experts as random tokens would, E (1 - (1 - k / E)^n)."""
    experts, per_row = 16, 2
    changes = {**EXPERTS, "num_experts": experts, "num_experts_per_tok": per_row}
    random_model_of("qwen3_moe", changes).save_pretrained(tmp_path)
    read: list[tuple[int, int]] = []
    results = LoopedExperts._results

    def count(self: LoopedExperts, x: torch.Tensor, chosen: torch.Tensor, gate: Any) -> Any:
        read.append((len(chosen), len(chosen.unique())))
        return results(self, x, chosen, gate)

    monkeypatch.setattr(LoopedExperts, "_results", count)
    measure_step_cost(runner_of(tmp_path), 1024, 64, BUCKETS, vocab_size=VOCABULARY)

    def most(tokens: int) -> int:
        return max(distinct for rows, distinct in read if rows == tokens)

    for tokens in (1, 4, TIMED_SEQUENCES):
        expected = experts * (1 - (1 - per_row / experts) ** tokens)
        assert most(tokens) >= 0.8 * expected
