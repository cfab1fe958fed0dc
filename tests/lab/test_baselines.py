"""The policies of other engines, as baselines in studies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftgate.lab.baselines import AdaptiveVerification, DecodeFirst, PrefillFirst, SmartSpec
from draftgate.policies.registry import batching_policy, speculation_policy
from draftgate.policies.speculation.auto import Auto
from draftgate.policies.types import BatchView, DraftCandidate, StepView
from tests.policies.test_speculation import H100_8B, batch, chain


@pytest.mark.parametrize("name", ["smartspec", "adaptive_verification"])
def test_speculation_policy_has_its_name(name: str) -> None:
    """A user selects the policy by its name, which takes no argument."""
    assert speculation_policy(name).name == name
    with pytest.raises(ValueError, match="takes no argument"):
        speculation_policy(f"{name}:4")


@pytest.mark.parametrize("name", ["prefill_first", "decode_first"])
def test_batching_policy_has_its_name(name: str) -> None:
    """A user selects the policy by its name, which takes no argument."""
    assert batching_policy(name).name == name
    with pytest.raises(ValueError, match="takes no argument"):
        batching_policy(f"{name}:4")


def test_smartspec_takes_the_length_of_the_best_goodput() -> None:
    """All sequences use the best length by the paper's formula, which falls with the batch."""
    chosen = []
    for size in (1, 64, 512):
        step = replace(batch(size, 0.5), acceptance=0.8)
        lengths = SmartSpec().draft_lengths(step, H100_8B)
        assert len(set(lengths)) == 1

        def goodput(k: int, size: int = size, step: StepView = step) -> float:
            expected = (1 - 0.8 ** (k + 1)) / (1 - 0.8)
            return size * expected / H100_8B.seconds(size * (k + 1), step.kv_tokens, size)

        assert lengths[0] == max(range(17), key=goodput)
        chosen.append(lengths[0])
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] > chosen[-1]


def test_adaptive_verification_drafts_everything_then_trims() -> None:
    """The policy computes drafts of full length, then verifies the likeliest slots."""
    expensive = DraftCandidate(chain(16, 0.5), depth_s=5e-3)
    step = StepView(64, 32_000, 64, 4096, (expensive,) * 64)
    policy = AdaptiveVerification()
    assert policy.draft_lengths(step, H100_8B) == [16] * 64
    drafted = replace(step, candidates=(DraftCandidate(chain(16, 0.5)),) * 64)
    trimmed = policy.draft_lengths(drafted, H100_8B)
    assert trimmed == Auto().draft_lengths(drafted, H100_8B)
    assert 0 < max(trimmed) < 16


def test_batching_policies_put_prefills_or_decodes_first() -> None:
    """One policy computes whole prompts first, and the other one waits for all decodes."""
    busy, idle = BatchView(100, 5000, 50, 3000), BatchView(0, 0, 0, 3000)
    assert PrefillFirst().prefill_tokens(busy, H100_8B) == 3000
    assert PrefillFirst().stalls_decodes
    assert DecodeFirst().prefill_tokens(busy, H100_8B) == 0
    assert DecodeFirst().prefill_tokens(idle, H100_8B) == 3000
