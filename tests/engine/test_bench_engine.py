"""`draftgate bench engine`: equal work, and no figures beside others' work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from backends.engine.bench import engine as bench
from backends.engine.bench.loading import random_checkpoint

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def test_every_case_is_measured_against_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step has a row with our time, that of `transformers` and the share of the floor."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(bench, "ROUNDS", 2)
    directory = random_checkpoint(tmp_path, **SMALL)
    rows = bench.measure_model(directory, torch.float32, read_s=1e-10)
    assert [(row["name"], row["batch"]) for row in rows] == [
        (case.name, case.batch) for case in bench.cases()
    ]
    for row in rows:
        assert min(row["ms"], row["transformers_ms"], row["share_of_bandwidth"]) > 0
        assert row["tokens_per_s"] == pytest.approx(
            1e3 * row["batch"] * row["tokens"] / row["ms"], rel=0.01
        )


def test_equal_work_gives_equal_tokens(tmp_path: Path) -> None:
    """Behind the same prompt both choose the same token, so it is the same model that is timed."""
    transformers = pytest.importorskip("transformers")
    directory = random_checkpoint(tmp_path, **SMALL)
    ours = bench.Ours.load(directory, torch.float32)
    (case,) = (case for case in bench.cases() if case.name == "prefill")
    logits = ours.runner.logits(ours.plan(case))
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        ids = torch.arange(1, case.tokens + 1)[None] % SMALL["vocab_size"]
        expected = model(input_ids=ids).logits[0, -1]
    torch.testing.assert_close(logits[-1], expected, rtol=1e-4, atol=1e-4)


def test_a_busy_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others use the machine nothing is measured, unless that is asked for."""
    monkeypatch.setattr(bench, "provenance", lambda: {"disturbed": True, "busy_share_before": 0.4})
    with pytest.raises(SystemExit, match="others use 40% of this machine"):
        bench.measure(["float32"], allow_busy=False)
