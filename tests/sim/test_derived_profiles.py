"""Profiles derived from data sheets, against published measurements."""

from __future__ import annotations

import msgspec
import pytest

from draftgate.backends.sim.derived_profiles import GPUS, MODELS, READ_SHARE, derived_profile
from draftgate.backends.sim.profile import Profile, load_profile

DISTSERVE_PREFILL = [
    ("a100-13b", 512, 72.1),
    ("a100-13b", 2048, 256.7),
    ("a100x2-13b", 2048, 165.5),
    ("a100x4-13b", 2048, 92.2),
]
"""Milliseconds of a prompt of OPT-13B on A100 by DistServe's fit (arXiv 2401.09670, Apache-2.0)."""

DISTSERVE_DECODE = [
    ("a100-13b", 1, 20.3),
    ("a100-13b", 128, 65.4),
    ("a100x2-13b", 32, 20.9),
    ("a100x4-13b", 32, 14.4),
]
"""Milliseconds of a step of decodes with 512 tokens each, from the same source."""

SPLITWISE_PREFILL = [
    ("a100x4-70b", 1024, 230.1),
    ("a100x8-70b", 1024, 154.6),
    ("h100x4-70b", 1024, 106.3),
    ("h100x8-70b", 1024, 78.3),
]
"""Milliseconds of a prompt of Llama-2-70B, from the measurements of splitwise-sim (MIT)."""


def _prefill_ms(profile: Profile, tokens: int) -> float:
    pairs = tokens * tokens / 2
    return 1e3 * (profile.cost.seconds(tokens, tokens, 1) + profile.cost.pair_s * pairs)


def test_derived_step_of_an_h100_is_the_published_one() -> None:
    """The steps of `h100-8b` are reproduced within 1%, and its reads of KV within 20%."""
    published, derived = load_profile("h100-8b"), derived_profile("h100-8b")
    assert derived is not None
    assert derived["step_s"] == pytest.approx(published.cost.step_s, rel=0.01)
    assert derived["kv_token_s"] == pytest.approx(published.cost.kv_token_s, rel=0.2)
    assert derived["kv_bytes"] == pytest.approx(published.kv_bytes, rel=0.01)
    depth_s = published.draft["draft_model"].depths.step_s
    assert derived["draft"]["draft_model"]["depth_s"] == pytest.approx(depth_s, rel=0.02)


@pytest.mark.parametrize(("name", "tokens", "measured_ms"), DISTSERVE_PREFILL + SPLITWISE_PREFILL)
def test_prompts_agree_with_measurements(name: str, tokens: int, measured_ms: float) -> None:
    """Prompts take the measured time within 11%, with and without tensor parallelism."""
    assert _prefill_ms(load_profile(name), tokens) == pytest.approx(measured_ms, rel=0.11)


@pytest.mark.parametrize(("name", "sequences", "measured_ms"), DISTSERVE_DECODE)
def test_decodes_agree_with_measurements(name: str, sequences: int, measured_ms: float) -> None:
    """Decodes take at most the measured time, and at least 75% of it."""
    step_ms = 1e3 * load_profile(name).cost.seconds(sequences, 512 * sequences, sequences)
    assert 0.75 * measured_ms <= step_ms <= measured_ms


def test_larger_groups_are_faster_and_dearer() -> None:
    """A group of GPUs has the price of its GPUs, and takes less time than fewer GPUs."""
    profiles = [load_profile(f"a100{group}-8b") for group in ("", "x2", "x4", "x8")]
    assert [one.price_per_hour_usd for one in profiles] == [3.67, 7.34, 14.68, 29.36]
    times_s = [one.cost.seconds(64, 64_000, 64) for one in profiles]
    assert times_s == sorted(times_s, reverse=True)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("gpu", GPUS)
def test_every_gpu_serves_every_model(gpu: str, model: str) -> None:
    """A group of eight GPUs holds each model with 10,000 tokens, and states source and price."""
    profile = load_profile(f"{gpu}x8-{model}")
    assert profile.kv_bytes // profile.kv_token_bytes > 10_000
    assert "data sheet" in profile.source
    assert profile.price_per_hour_usd == 8 * GPUS[gpu].price_per_hour_usd


def test_tokens_of_a_mixture_read_further_experts() -> None:
    """A token reads 3.3 billion weights of Qwen3-30B-A3B, and many tokens read all weights.

    A further token of a small step therefore takes the time of several experts. In a large step, it
    takes only its arithmetic.
    """
    model = MODELS["30b-a3b"]
    active, embedding = 3.35e9, model.embedding
    assert model.token_weights == pytest.approx(active - embedding, rel=0.01)
    assert model.read_weights(1) == pytest.approx(model.token_weights)
    assert model.read_weights(1000) == pytest.approx(model.parameters - embedding)
    # The second token has each of its 8 experts anew with a probability of 15 / 16.
    second = model.read_weights(2) - model.read_weights(1)
    assert second == pytest.approx(7.5 * model.expert_weights)
    cost = load_profile("h100-30b-a3b").cost
    first_slot_s = cost.seconds(2) - cost.seconds(1)
    late_slot_s = (cost.seconds(512) - cost.seconds(496)) / 16
    assert first_slot_s > 20 * late_slot_s
    dense = load_profile("h100-8b").cost
    assert first_slot_s > 10 * (dense.seconds(2) - dense.seconds(1))


def test_a_group_that_is_too_small_names_the_smallest_one() -> None:
    """Two A100 do not hold 141 GB of weights, and the error names the group that does."""
    with pytest.raises(ValueError, match="use a100x4-70b"):
        load_profile("a100x2-70b")


def test_quantised_weights_take_their_bytes() -> None:
    """Quantised weights take their bytes of memory and of each step, and leave more for keys and
    values. Products in FP8 take half the time, and 4 bits save no arithmetic.
    """
    plain, fp8, int4 = (load_profile(f"l4-8b{form}") for form in ("", "-fp8", "-int4"))
    layers = MODELS["8b"].parameters - 2 * MODELS["8b"].embedding
    for quantised, weight_bytes in ((fp8, 1 + 4 / 128), (int4, 0.5 + 3 / 128)):
        saved = (2 - weight_bytes) * layers
        assert quantised.kv_bytes - plain.kv_bytes == pytest.approx(saved, rel=1e-6)
    reads = READ_SHARE * GPUS["l4"].read_bytes_s
    saved_s = plain.cost.seconds(1) - int4.cost.seconds(1)
    assert saved_s == pytest.approx((1.5 - 3 / 128) * layers / reads, rel=1e-3)

    def token_s(profile: Profile) -> float:
        return (profile.cost.seconds(512) - profile.cost.seconds(256)) / 256

    assert token_s(int4) == pytest.approx(token_s(plain))
    assert token_s(fp8) == pytest.approx(0.53 * token_s(plain), rel=0.01)
    with pytest.raises(ValueError, match="A100 80GB SXM does not multiply in FP8"):
        load_profile("a100-8b-fp8")
    with pytest.raises(ValueError, match="use a10gx4-70b-int4"):
        load_profile("a10gx2-70b-int4")


def test_derived_profile_is_a_file() -> None:
    """The derived content is JSON that can be written, changed and read as a file."""
    content = derived_profile("l4-8b")
    assert msgspec.json.decode(msgspec.json.encode(content))["device"] == "NVIDIA L4 24GB"
    assert derived_profile("l4x3-8b") is None
