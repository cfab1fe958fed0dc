"""Tests of `draftgate bench engine`: equal work, correct shares, and rejection of busy machines."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from bench.engine import command, models, steps
from bench.engine.bench_engine import BenchEngine, most_kv_tokens, step_plan
from bench.engine.cases import Case, Grid, flops, weight_bytes
from bench.engine.command import GOALS, judged
from bench.engine.device import Rates
from bench.engine.exact import add_exact, measure_exact
from bench.engine.idle import idle_share
from bench.engine.models import StoredModel, make_model, random_checkpoint
from bench.engine.profile import profile_of, without_pairs
from bench.engine.random_model import SHAPES, RandomModel
from bench.engine.steps import Contender, measure_steps
from bench.harness import provenance as record
from draftgate.backends.engine.checkpoint import Checkpoint
from draftgate.backends.engine.config import read_model_config
from draftgate.backends.engine.weights import layer_shapes
from draftgate.backends.sim.profile import load_profile
from draftgate.policies.costs.step_cost import StepCost

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
CPU = torch.device("cpu")
GRID = Grid(batches=(1, 3), contexts=(20,), drafts=(0, 4), prefill_tokens=30)
RATES = Rates(bytes_per_s=1e9, flops_per_s=1e10)
FACTS = {
    "command": "a test",
    "commit": "none",
    "date": "2026-11-21",
    "torch": torch.__version__,
    "threads": 1,
    "device": "a processor",
    "disturbed": False,
}


def stored(tmp_path: Path, dtype: torch.dtype = torch.float32) -> StoredModel:
    return StoredModel("small", random_checkpoint(tmp_path, **SMALL), dtype, CPU)


def engine_of(model) -> BenchEngine:
    cases = list(GRID.cases())
    return BenchEngine.load(model, most_kv_tokens(cases), GRID.longest)


def test_every_case_is_measured_against_transformers(tmp_path: Path) -> None:
    """Each row has the times of the engine and of `transformers`, and the shares of the device."""
    pytest.importorskip("transformers")
    cases = list(GRID.cases())
    rows = measure_steps(engine_of(stored(tmp_path)), cases, RATES, rounds=2)
    assert [(row["name"], row["batch"]) for row in rows] == [(c.name, c.batch) for c in cases]
    for row in rows:
        assert min(row["ms"], row["transformers_ms"], row["share_of_bandwidth"]) > 0
        assert row["tokens_per_s"] == pytest.approx(
            1e3 * row["batch"] * row["tokens"] / row["ms"], rel=0.01
        )
        share = max(row["share_of_bandwidth"], row["share_of_matrix_rate"])
        assert share == pytest.approx(1 / row["over_roofline"], abs=6e-4)  # three decimals


def test_exact_steps_are_timed_only_if_they_differ(tmp_path: Path) -> None:
    """The benchmark times exact mode for bfloat16 but not for float32, which is always exact."""
    for dtype, timed in ((torch.bfloat16, True), (torch.float32, False)):
        folder = tmp_path / str(dtype)
        folder.mkdir()
        engine = engine_of(stored(folder, dtype))
        rows = measure_steps(engine, [Case("decode", 1, 1, 20)], RATES, 2)
        assert ("exact_over_plain" in rows[0]) is timed


@pytest.mark.long
def test_exact_steps_run_in_a_separate_process(tmp_path: Path) -> None:
    """A separate process runs the same cases without peers, and the rows receive the ratios."""
    model = stored(tmp_path)
    settings = argparse.Namespace(rounds=1, threads=1)
    exact = measure_exact(settings, GRID, str(model.path), "bfloat16", "cpu")
    cases = [Case(*(row[name] for name in Case._fields)) for row in exact]
    assert cases == list(GRID.cases())
    assert not any("transformers_ms" in row or "exact_over_plain" in row for row in exact)
    plain = [{**row, "ms": row["ms"] / 2} for row in exact]
    add_exact(plain, exact)
    assert all(row["exact_over_plain"] == pytest.approx(2.0, abs=0.01) for row in plain)


def test_exact_steps_are_compared_by_gpu_time() -> None:
    """The ratio uses GPU time if available, and a failed step has no ratio."""
    case = Case("decode", 8, 1, 512)._asdict()
    plain = [{**case, "ms": 3.0, "device_ms": 2.0}, {**case, "batch": 64, "failed": "no memory"}]
    add_exact(plain, [{**case, "ms": 9.0, "device_ms": 2.1}, {**case, "batch": 64, "ms": 1.0}])
    assert plain[0]["exact_over_plain"] == 1.05
    assert "exact_over_plain" not in plain[1]


def test_a_step_that_does_not_fit_reports_its_error() -> None:
    """The contender reports an out-of-memory error as the reason and does not repeat the step."""
    tried = []

    def too_large(case: Case) -> float:
        tried.append(case)
        raise torch.OutOfMemoryError

    contender, case = Contender(too_large), Case("decode", 64, 1, 8192)
    contender.run(case)
    contender.run(case)
    assert tried == [case]
    assert (contender.failed[case], contender.times(case)) == ("out of memory", [])


@pytest.mark.parametrize("at_load", [True, False])
def test_a_broken_peer_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_load: bool
) -> None:
    """Whatever `transformers` raises when it loads or runs, the engine is measured."""

    class Broken:
        def __init__(self, model: object) -> None:
            if at_load:
                raise RuntimeError("no kernel image")

        def step_s(self, case: Case) -> float:
            raise ValueError("another version")

    monkeypatch.setattr(steps, "TransformersSteps", Broken)
    (row,) = measure_steps(engine_of(stored(tmp_path)), [Case("decode", 1, 1, 20)], RATES, 1)
    assert row["ms"] > 0
    assert row.get("transformers_failed") == (None if at_load else "ValueError: another version")


def test_commit_is_unknown_without_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without git records the other facts."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert record.commit() == "unknown"


def test_equal_work_gives_equal_tokens(tmp_path: Path) -> None:
    """Both engines choose the same token after the same prompt."""
    transformers = pytest.importorskip("transformers")
    model = stored(tmp_path)
    ours, case = engine_of(model), Case("prefill", 1, 30, 0)
    logits = ours.runner.logits(step_plan([case], SMALL["vocab_size"]))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
    with torch.inference_mode():
        ids = torch.arange(1, case.tokens + 1)[None] % SMALL["vocab_size"]
        expected = theirs(input_ids=ids).logits[0, -1]
    torch.testing.assert_close(logits[-1], expected, rtol=1e-4, atol=1e-4)


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "head_dim": 16,
}


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": False}, EXPERTS], ids=["tied", "untied", "experts"]
)
def test_random_weights_are_the_same_in_both_engines(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    """`transformers` and the engine compute the same logits from random weights."""
    pytest.importorskip("transformers")
    shape = SMALL | changes
    model = RandomModel("small", tmp_path, shape, torch.float32, CPU)
    case = Case("prefill", 1, 30, 0)
    logits = engine_of(model).runner.logits(step_plan([case], SMALL["vocab_size"]))
    with torch.inference_mode():
        ids = torch.arange(1, case.tokens + 1)[None]
        expected = model.transformers()(input_ids=ids).logits[0, -1]
    torch.testing.assert_close(logits[-1], expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("tied", [True, False])
def test_random_weights_have_a_clear_greedy_token(tmp_path: Path, tied: bool) -> None:
    """The largest logit exceeds the next by so much that rounding cannot change the token."""
    shape = SMALL | {"tie_word_embeddings": tied}
    model = RandomModel("small", tmp_path, shape, torch.bfloat16, CPU)
    plan = step_plan([Case("verify", 1, 30, 0)], SMALL["vocab_size"])
    logits = engine_of(model).runner.logits(plan)
    best, second = logits.topk(2).values.unbind(1)
    assert ((best - second) / best > 0.1).all()
    fed = torch.tensor(plan.work[0].fed_ids)
    assert torch.equal(logits.argmax(1), fed if tied else (fed + 1) % SMALL["vocab_size"])


def test_random_weights_have_the_names_and_shapes_of_a_checkpoint(tmp_path: Path) -> None:
    """The random weights contain every layer with the shape of a real checkpoint."""
    model = RandomModel("small", tmp_path, SMALL, torch.float32, CPU)
    state = {name: tuple(weight.shape) for name, weight in model.state().items()}
    assert layer_shapes(model.config).items() <= state.items()


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("random-1b", 1.236e9), ("random-8b", 8.030e9), ("random-30b-a3b", 30.532e9)],
)
def test_shapes_have_their_published_sizes(tmp_path: Path, name: str, parameters: float) -> None:
    """Llama-3.2-1B has 1.24 billion weights, Llama-3.1-8B 8.03 and Qwen3-30B-A3B 30.5 billion."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[name]), encoding="utf-8")
    config = read_model_config(tmp_path)
    own_embedding = 0 if config.tied_embeddings else config.vocab_size * config.hidden_size
    # A step of many tokens reads all experts.
    assert weight_bytes(config, 1, 1000) + own_embedding == pytest.approx(parameters, rel=1e-3)


def test_a_token_of_a_mixture_reads_its_experts(tmp_path: Path) -> None:
    """A token of Qwen3-30B-A3B reads 3.0 billion weights without its embedding, and two tokens read
    nearly all experts of both."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["random-30b-a3b"]), encoding="utf-8")
    config = read_model_config(tmp_path)
    one, two = (weight_bytes(config, 1, tokens) for tokens in (1, 2))
    assert one == pytest.approx(3.04e9, rel=0.01)
    assert two - one == pytest.approx(7.5 * 48 * 3 * 2048 * 768)


@pytest.mark.parametrize(
    ("name", "layer_bytes"), [("random-8b-fp8", 1 + 4 / 128), ("random-8b-int4", 0.5 + 3 / 128)]
)
def test_a_step_of_a_quantised_model_reads_its_packed_weights(
    name: str, layer_bytes: float, tmp_path: Path
) -> None:
    """The weights of the layers have the bytes of their format, with scales and zeros, and the LM
    head those of its dtype."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[name]), encoding="utf-8")
    config = read_model_config(tmp_path)
    head = 128256 * 4096
    expected = 6.9793e9 * layer_bytes + 2 * head
    assert weight_bytes(config, 2) == pytest.approx(expected, rel=1e-4)


def test_a_step_reads_all_weights_of_a_tied_model(tmp_path: Path) -> None:
    """A step reads as many bytes as the file has without the norms."""
    model = stored(tmp_path)
    norms = (2 * SMALL["num_hidden_layers"] + 1) * SMALL["hidden_size"]
    expected = Checkpoint(model.path).num_parameters - norms
    assert weight_bytes(model.config, 4) == 4 * expected


def test_flops_equal_the_count_of_torch(tmp_path: Path) -> None:
    """The count of operations equals torch's count for `transformers`, including attention."""
    pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    model, case = stored(tmp_path), Case("verify", 2, 7, 0)
    ids = torch.ones(case.batch, case.tokens, dtype=torch.int64)
    theirs = model.transformers()
    theirs.set_attn_implementation("eager")
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        theirs(input_ids=ids)
    # `transformers` also computes the masked half of the attention square.
    square = case._replace(context_tokens=0).batch * case.tokens**2
    columns = model.config.num_layers * model.config.num_heads * model.config.head_dim
    masked = 4 * (square - case.pairs) * columns
    rotation = counter.get_total_flops() - flops(model.config, case) - masked
    assert 0 <= rotation < 0.001 * counter.get_total_flops()


def test_the_grid_has_every_combination_once() -> None:
    """The grid combines batches, contexts and draft slots, and ends with one prefill."""
    cases = list(GRID.cases())
    assert len(cases) == len(set(cases)) == 2 * 1 * 2 + 1
    assert cases[-1] == Case("prefill", 1, 30, 0)
    assert GRID.longest == 30


def test_a_busy_machine_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The benchmark rejects a busy machine unless `--allow-busy` is given."""
    busy = {"disturbed": True, "busy_share_before": 0.4}
    monkeypatch.setattr(command, "provenance", lambda device: busy)
    with pytest.raises(SystemExit, match="other processes use 40% of this machine"):
        command.main(["--json", str(tmp_path / "out.json")])
    assert not (tmp_path / "out.json").exists()


def test_an_unknown_model_is_refused(tmp_path: Path) -> None:
    """The error for an unknown model lists the known models."""
    with pytest.raises(SystemExit, match="shipped, random-82m, random-1b, random-8b"):
        make_model("random-9b", tmp_path, torch.float32, CPU)


def test_one_command_writes_result_and_profile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The command writes a result with goals, and a profile that the simulator loads."""
    monkeypatch.setattr(models, "SHAPE_82M", SMALL)
    monkeypatch.setattr(record, "busy_share", lambda: 0.5)
    out, profile = tmp_path / "out.json", tmp_path / "small.json"
    options = "--models random-82m --dtypes float32 --batches 1 --contexts 16 --drafts 0"
    options += " --prefill 16 --rounds 1 --parts steps --new-tokens 8 --lengths 2 --allow-busy"
    command.main([*options.split(), "--json", str(out), "--profile", str(profile)])
    result = json.loads(out.read_text(encoding="utf-8"))
    assert {"command", "commit", "device", "date", "rates"} <= result.keys()
    assert [row["name"] for row in result["steps"]] == ["decode", "prefill"]
    assert [goal["figure"] for goal in result["goals"]] == [goal.figure for goal in GOALS["cpu"]]
    assert load_profile(str(profile)).cost.seconds(4) > 0


def test_a_profile_charges_attention_within_a_prefill_once(tmp_path: Path) -> None:
    """The simulator predicts the measured times of the timed steps from the profile."""
    pair_s = 1e-7
    cost = StepCost((4, 64, 256), (1e-3, 2e-3, 9e-3), 2e-7, 1e-5, pair_s)
    content = profile_of(FACTS, stored(tmp_path), cost, {})
    path = tmp_path / "p.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    profile = load_profile(str(path))
    assert profile.cost.pair_s == pair_s
    for tokens, measured_s in zip(cost.token_buckets, cost.step_s, strict=True):
        pairs = tokens * (tokens + 1) // 2
        predicted_s = profile.cost.seconds(tokens) + profile.cost.pair_s * pairs
        assert predicted_s == pytest.approx(measured_s, abs=1e-7)


def test_a_table_without_pairs_is_monotone() -> None:
    """The table is monotone despite noise in the cost of pairs, as the simulator requires."""
    table = without_pairs(StepCost((4, 64, 256), (1e-3, 1.001e-3, 1.002e-3), pair_s=1e-6))
    assert table == sorted(table)
    assert min(table) >= 0


def test_idle_time_excludes_overlapping_kernels() -> None:
    """Idle time counts overlapping kernels once, and long gaps count as waiting for the host."""
    spans = [(0.0, 40e-6), (10e-6, 30e-6), (45e-6, 60e-6), (80e-6, 100e-6)]
    found = idle_share(spans)
    assert found.idle == pytest.approx(0.25)
    assert found.waiting == pytest.approx(0.20)
    with pytest.raises(ValueError, match="no kernels"):
        idle_share([])


def test_goals_are_judged_by_their_bounds() -> None:
    """A metric beyond its bound misses its goal, and an unmeasured metric is not judged."""
    place = {"model": "random-8b", "dtype": "bfloat16", "batch": 64, "context_tokens": 2048}
    step = {"name": "decode", **place, "over_roofline": 1.3, "exact_over_plain": 1.05}
    replays = [
        {"model": "random-8b", "batch": 1, "policy": "off", "share_of_bandwidth": 0.9},
        {"model": "random-8b", "batch": 1, "policy": "fixed:3", "speedup": 2.2},
        {"model": "random-8b", "batch": 1, "policy": "fixed:4", "speedup": 2.6},
    ]
    rows = judged("cuda", {"steps": [step], "replay": replays, "idle": [], "generation": []})
    verdicts = {row["figure"].split(",")[0]: row.get("met") for row in rows}
    assert verdicts == {
        "share of copy bandwidth": True,
        "step over roofline": False,
        "GPU idle": None,
        "replay speed-up": True,
        "share of matrix rate": None,
        "--exact over plain": True,
        "steps over transformers": None,
    }
