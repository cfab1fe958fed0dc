"""Recorded acceptance: the shipped recording and its use in a simulation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftgate.backends.sim.acceptance import (
    SHIPPED,
    RecordedDrafts,
    ReplayedAcceptance,
    load_recording,
)
from draftgate.backends.sim.assembly import SimEnvironment, proposer_names
from draftgate.backends.sim.backend import SimBackend
from draftgate.backends.sim.profile import load_profile
from draftgate.backends.sim.virtual_time import run_virtual
from draftgate.backends.token_ids import compact
from draftgate.backends.types import GenerationRequest, SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.types import SpeculationMode, SpeculationPlan


def request(task: str, seed: int, tokens: int, most: int, proposer: str = "ngram"):
    plan = SpeculationPlan("test", SpeculationMode.AUTO, proposer, most, "a test")
    sampling = SamplingParams(tokens, seed, 0.8, ignore_eos=True)
    return GenerationRequest(f"{task}/{seed}-0", compact((1, 2, 3)), sampling, plan)


def run_one(config: WorkerConfig, generation: GenerationRequest):
    """Return the deliveries and the last delta of a single request."""
    environment = SimEnvironment(belief_error=0.0)

    async def main():
        backend = SimBackend(config, build=environment.build_worker)
        await backend.start()
        *_, last = [delta async for delta in backend.generate(generation)]
        await backend.stop()
        return environment.log.pop(generation.request_id), last

    return run_virtual(main())


def test_shipped_recording_is_complete() -> None:
    """Every task has texts at both temperatures, and no agreement is longer than its draft."""
    recording = load_recording()
    assert set(recording.tasks) == {"completion", "rewrite", "long_context"}
    assert recording.proposers == ("draft_model", "ngram", "sparse_self")
    assert "backends.engine.bench.acceptance" in recording.source
    for task in recording.tasks:
        assert recording.texts(task, 0.0) != recording.texts(task, 1.0)
        for text in recording.texts(task, 0.0) + recording.texts(task, 1.0):
            assert text.length >= 24
            for drafts in text.drafts.values():
                assert all(
                    0 <= a <= p <= 16 for a, p in zip(drafts.agreed, drafts.proposed, strict=True)
                )


def test_recorded_acceptance_is_autocorrelated() -> None:
    """The correlation of the accepted lengths of neighbouring drafts is above 0.3."""
    pairs = [
        (drafts.agreed[place], drafts.agreed[place + 1])
        for text in load_recording().texts("completion", 0.8)
        for drafts in (text.drafts["ngram"],)
        for place in range(text.length - 1)
    ]
    mean = sum(a for a, _ in pairs) / len(pairs)
    covariance = sum((a - mean) * (b - mean) for a, b in pairs)
    assert covariance / sum((a - mean) ** 2 for a, _ in pairs) > 0.3


def tokens_per_step(drafts: RecordedDrafts, first: int, tokens: int, most: int) -> list[int]:
    """Return the tokens of each step of a sequence, computed from the record."""
    steps, done = [], 1  # The prompt step emits the first token.
    while done < tokens:
        place = (first + done) % len(drafts.agreed)
        allowed = min(most, tokens - done - 1, drafts.proposed[place])
        steps.append(min(allowed, drafts.agreed[place]) + 1)
        done += steps[-1]
    return steps


@pytest.mark.parametrize("most", [1, 4, 16])
def test_simulated_sequence_follows_its_record(most: int) -> None:
    """Each step accepts the recorded tokens of its position, regardless of earlier drafts."""
    generation = request("completion", 5, 200, most)
    deltas, last = run_one(WorkerConfig(speculation=f"fixed:{most}", profile="h100-8b"), generation)
    replay = ReplayedAcceptance(load_recording())
    sequence = type("S", (), {"request": generation, "choice": 0})()
    text, first = replay._chosen(sequence)
    assert list(deltas.tokens) == [1, *tokens_per_step(text.drafts["ngram"], first, 200, most)]
    assert last.outcome.num_accepted_tokens == 200 - len(deltas.tokens)


def test_all_proposers_replay_the_same_texts() -> None:
    """All proposers were recorded with the same texts, so comparisons use the same work."""
    counts = {}
    for proposer in ("ngram", "draft_model"):
        generation = request("rewrite", 3, 150, 8, proposer)
        config = WorkerConfig(speculation="fixed:8", profile="h100-8b", proposer=proposer)
        deltas, _ = run_one(config, generation)
        counts[proposer] = len(deltas.tokens)
    assert counts["draft_model"] < counts["ngram"] < 150


def test_unrecorded_proposer_proposes_nothing() -> None:
    """The simulator proposes no sparse drafts for a task without recorded sparse drafts."""
    config = WorkerConfig(speculation="fixed:4", profile="h100-8b", proposer="sparse_self")
    _, last = run_one(config, request("completion", 1, 30, 4, "sparse_self"))
    assert last.outcome.num_drafted_tokens == 0
    _, last = run_one(config, request("long_context", 1, 30, 4, "sparse_self"))
    assert last.outcome.num_accepted_tokens > 10


def test_unknown_task_or_proposer_is_rejected() -> None:
    """The error lists the known names."""
    with pytest.raises(ValueError, match="completion"):
        load_recording().texts("poetry", 0.0)
    with pytest.raises(ValueError, match="no proposer 'medusa'"):
        proposer_names("medusa", load_profile("h100-8b"))
    with pytest.raises(ValueError, match="no cost of drafting with 'draft_model'"):
        proposer_names("ngram,draft_model", load_profile("cpu-demo"))


def test_damaged_recording_is_rejected_by_name(tmp_path: Path) -> None:
    """The error names a file whose columns have different lengths."""
    content = json.loads(SHIPPED.read_text())
    content["texts"][0]["drafts"]["ngram"]["agreed"] += "0"
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"damaged recording .*bad\.json.* differ in length"):
        load_recording(path)
