"""The studies that repeat published results."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simulation.distserve import MEANS, MOST_TOKENS, scaled
from bench.simulation.melange import DATASETS, PROFILES, lengths, rows
from bench.simulation.splitwise import A100, H100, Cluster, Times, nine_limits
from draftgate.lab.plan.machines import with_engine
from draftgate.loadgen.planning.traces import TraceRow
from draftgate.loadgen.types import PlannedRequest, Record, RequestSpec, Slo, TextChunk
from draftgate.policies.costs.step_cost import StepCost, StepSize

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
MEASURED = DATA / "splitwise_sim" / "perf_model.csv"


@pytest.mark.skipif(not MEASURED.exists(), reason="needs the measurements of splitwise-sim")
@pytest.mark.parametrize("kind", [H100, A100], ids=lambda kind: kind.name)
def test_fitted_step_times_are_those_measured(kind) -> None:
    """Decodes follow the batch within 8%, and prompts their tokens within 20%, also in chunks."""
    times = Times.read(MEASURED, kind)
    file = times.profile(kind)
    cost = StepCost(
        file["token_buckets"],
        tuple(file["step_s"]),
        file["kv_token_s"],
        file["sequence_s"],
        file["prefill_attention_s"],
    )
    for batch, seconds in times.decode_s.items():
        size = StepSize(batch, round(batch * times.decode_context), batch, 0)
        assert cost.size_s(size) == pytest.approx(seconds, rel=0.08)
    for tokens, seconds in times.prompt_s.items():
        found_s = sum(
            cost.size_s(StepSize(chunk, begin, 1, chunk * begin + chunk * chunk // 2))
            for begin in range(0, tokens, 2048)
            for chunk in [min(2048, tokens - begin)]
        )
        assert found_s == pytest.approx(seconds, rel=0.2)


@given(
    st.lists(
        st.tuples(st.integers(1, 8000), st.integers(1, 2000)), min_size=100, max_size=200
    ).filter(lambda lengths: len(set(lengths)) > 50)
)
@settings(max_examples=30, deadline=None)
def test_scaled_lengths_have_the_means_of_the_paper(lengths) -> None:
    """Requests that are cut to the context do not lower the means, whatever the trace."""
    rows = [TraceRow(0.0, prompt, output) for prompt, output in lengths]
    found = scaled(rows)
    assert all(one.prompt_tokens + one.output_tokens <= MOST_TOKENS for one in found)
    assert fmean(one.prompt_tokens for one in found) == pytest.approx(MEANS[0], rel=0.01)
    assert fmean(one.output_tokens for one in found) == pytest.approx(MEANS[1], rel=0.01)


def test_slowdowns_are_relative_to_an_idle_machine() -> None:
    """Requests as fast as on an idle A100 meet all nine limits, and far slower ones meet none."""
    idle = Times({100: 0.2}, {1: 0.05})

    def record(times: float) -> Record:
        spec = RequestSpec("", (), 11, 0, "trace", slo=Slo(ttft_s=0.6, tpot_s=0.075))
        chunks = [TextChunk(times * (0.2 + 0.05 * n), 1, 4) for n in range(11)]
        planned = PlannedRequest(0, 0.0, spec)
        return Record(
            planned,
            0.0,
            0.0,
            times * 0.7,
            "ok",
            chunks=chunks,
            usage={"completion_tokens": 11},
        )

    alike = nine_limits([record(1.0)] * 5, idle)
    assert all(one["met"] for by in alike.values() for one in by.values())
    slow = nine_limits([record(7.0)] * 5, idle)
    assert not any(one["met"] for by in slow.values() for one in by.values())
    assert slow["tbt"]["p50"]["slowdown"] == pytest.approx(7.0)


def test_clusters_are_read_with_their_batching() -> None:
    """Two types of machines divide the phases, and one type has both."""
    assert str(Cluster.parse("h100:3+a100:8").deployment) == "3 x h100 prefill + 8 x a100 decode"
    parsed = Cluster.parse("a100:14/prefill_first@11")
    assert (parsed.name, parsed.batching) == ("a100:14/prefill_first", "prefill_first")
    assert parsed.first_rps == 11
    with pytest.raises(ValueError, match="expected h100:8"):
        Cluster.parse("tpu:8")


def test_mixes_never_cost_more_than_one_type() -> None:
    """Each mix costs at most as much as the cheapest single type, for all lengths and targets."""
    pytest.importorskip("scipy")
    found = [one for one in rows("vllm-2024", [0]) if one["rate_rps"] <= 4]
    assert {one["dataset"] for one in found} == set(DATASETS)
    assert all(0.0 <= one["saved_to_best"] <= one["saved_to_dearest"] for one in found)
    assert all(set(one["counts"]) <= set(with_engine(PROFILES, "vllm-2024")) for one in found)
    means = [sum(one.prompt_tokens for one in lengths(name, 0)) / 4000 for name in DATASETS]
    assert means[0] < 100.0 < means[2] < 1000.0 < means[1]
