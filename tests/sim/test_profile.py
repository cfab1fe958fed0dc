"""Device profiles."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from draftgate.backends.sim.engine_costs import ENGINES
from draftgate.backends.sim.profile import load_profile, profile_names
from draftgate.lab.sim.environment import slowed

GOOD = {
    "device": "d",
    "model": "m",
    "dtype": "float32",
    "source": "made up for a test",
    "token_buckets": [1, 8],
    "step_s": [0.001, 0.002],
    "kv_token_s": 1e-8,
    "sequence_s": 1e-5,
    "prefill_attention_s": 1e-9,
    "draft": {"draft_model": {"sequences": [1, 4], "depth_s": [1e-4, 2e-4], "call_s": 3e-4}},
}


def write(path: Path, **changes: object) -> str:
    content = {**GOOD, **changes}
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    return str(path)


@pytest.mark.parametrize("name", profile_names())
def test_shipped_profiles_are_valid_and_name_their_source(name: str) -> None:
    """Each shipped profile is well formed and names the source of its numbers."""
    profile = load_profile(name)
    assert profile.name == name
    assert len(profile.source) > 40
    assert profile.cost.seconds(1, 100, 1) > 0


def test_h100_profile_is_the_published_fit() -> None:
    """The profile equals the published fit within and beyond the table.

    The fit has 5.886 ms + 1.21 ms overhead + 21.0 us per token + 39.3 ns per KV token.
    """
    cost = load_profile("h100-8b").cost
    for tokens in (1, 64, 512, 2000):
        expected = 5.886e-3 + 1.21e-3 + 21.0e-6 * tokens + 39.3e-9 * 1000
        assert cost.seconds(tokens, 1000, 4) == pytest.approx(expected)


def test_h200_profile_scales_the_memory_reads_of_the_h100() -> None:
    """Memory reads take 3.35 / 4.8 of the H100's time, and arithmetic takes the same time."""
    h100, h200 = (load_profile(name).cost for name in ("h100-8b", "h200-8b"))
    assert h200.kv_token_s == pytest.approx(h100.kv_token_s * 3.35 / 4.8, rel=0.01)
    saved_s = 15.0e9 / 3.35e12 - 15.0e9 / 4.8e12
    for tokens in (1, 64, 512, 2000):
        assert h100.seconds(tokens) - h200.seconds(tokens) == pytest.approx(saved_s, rel=0.01)
    assert h200.pair_s == h100.pair_s


def test_profile_files_are_read_by_path(tmp_path: Path) -> None:
    """A profile file with measurements of a user loads like a shipped profile."""
    profile = load_profile(write(tmp_path / "mine.json", kv_token_bytes=512))
    assert (profile.name, profile.source) == ("mine", "made up for a test")
    assert profile.cost.seconds(3, 100, 2) == pytest.approx(0.002 + 1e-6 + 2e-5)
    assert (profile.cost.pair_s, profile.kv_token_bytes) == (1e-9, 512)
    assert profile.draft["draft_model"].depth_s(2) == 2e-4
    assert profile.draft["draft_model"].call_s == 3e-4


def test_second_form_adds_the_host_and_costs_per_sequence(tmp_path: Path) -> None:
    """A `profile/2` file has host times, and a `profile/1` file has none."""
    draft = {"ngram": {"call_s": 1e-6, "sequence_s": 2e-6}}
    host = {"step_s": 3e-4, "sequence_s": 4e-6}
    profile = load_profile(write(tmp_path / "new.json", format="profile/2", host=host, draft=draft))
    assert (profile.host.step_s, profile.host.sequence_s) == (3e-4, 4e-6)
    assert profile.draft["ngram"].sequence_s == 2e-6
    assert load_profile(write(tmp_path / "old.json")).host.step_s == 0.0
    assert slowed(profile, 2.0).host.sequence_s == 8e-6


def test_a_slower_device_scales_all_times() -> None:
    """The factor scales every term of a step and of drafting."""
    profile = load_profile("h100-8b")
    slow = slowed(profile, 2.0)
    for size in ((1, 100, 1, 0), (300, 9000, 30, 40), (4000, 4000, 2, 0)):
        assert slow.cost.seconds(*size) == pytest.approx(2 * profile.cost.seconds(*size))
    for name, cost in profile.draft.items():
        assert slow.draft[name].depth_s(7) == pytest.approx(2 * cost.depth_s(7))
        assert slow.draft[name].call_s == 2 * cost.call_s


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step_s": None}, "missing required field `step_s`"),
        ({"source": ""}, "source"),
        ({"step_s": [0.001]}, "equal length"),
        ({"step_s": [0.002, 0.001]}, "must not fall"),
        ({"step_s": [0.001, "fast"]}, r"\$.step_s\[1\]"),
        ({"token_buckets": [8, 1]}, "ascend"),
        ({"kv_token_s": -1.0}, "kv_token_s"),
        ({"kv_tokens_s": 1.0}, "kv_tokens_s"),
        ({"kv_copy_bytes_s": 0.0}, "kv_copy_bytes_s"),
        ({"format": "profile/9"}, "profile/9"),
    ],
)
def test_damaged_profile_names_file_and_field(tmp_path: Path, changes, words) -> None:
    """The error names the file, the field and the problem."""
    path = write(tmp_path / "bad.json", **changes)
    with pytest.raises(ValueError, match=words) as damaged:
        load_profile(path)
    assert path in str(damaged.value)


def test_copies_of_blocks_take_no_time_without_a_rate(tmp_path: Path) -> None:
    """The rate of copies is infinite unless the file has one."""
    assert load_profile(write(tmp_path / "p.json")).kv_copy_bytes_s == math.inf
    path = write(tmp_path / "q.json", kv_copy_bytes_s=2e9)
    assert load_profile(path).kv_copy_bytes_s == 2e9


def test_invalid_json_and_unknown_profiles_are_rejected(tmp_path: Path) -> None:
    """The error reports invalid JSON, or lists the shipped profiles for an unknown name."""
    path = tmp_path / "bad.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"damaged profile .*bad\.json"):
        load_profile(str(path))
    with pytest.raises(ValueError, match="cpu-demo, h100-8b, h200-8b"):
        load_profile("h100")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["h100-8b", "a10g-7b", "a100x2-13b"])
def test_engine_replaces_the_host_time_of_a_profile(name: str, engine: str) -> None:
    """The host time that a profile assumes is taken out of its steps, and an engine's is added."""
    usual, found = load_profile(name), load_profile(f"{name}@{engine}")
    assert found.host == ENGINES[engine].host
    assert ENGINES[engine].source in found.source
    assert found.name == f"{usual.name}@{engine}"
    assert usual.step_host_s == pytest.approx(1.21e-3)
    for before_s, after_s in zip(usual.cost.step_s, found.cost.step_s, strict=True):
        assert before_s - after_s == pytest.approx(1.21e-3)
    assert replace(found.cost, step_s=usual.cost.step_s) == usual.cost


def test_engine_needs_a_profile_that_states_its_host_time() -> None:
    """Host time is never charged twice, and the known engines are named."""
    with pytest.raises(ValueError, match="step_host_s"):
        load_profile("cpu-demo@vllm")
    with pytest.raises(ValueError, match="vllm-2024"):
        load_profile("a100-8b@fast")
