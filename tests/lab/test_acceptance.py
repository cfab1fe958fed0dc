"""Recorded acceptance in a simulation."""

from __future__ import annotations

import pytest

from draftgate.backends.delta_reader import generate
from draftgate.backends.recording import Text
from draftgate.backends.sim.backend import SimBackend
from draftgate.backends.sim.profile import load_profile
from draftgate.backends.token_ids import compact
from draftgate.backends.types import GenerationRequest, SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from draftgate.lab.sim.environment import SimEnvironment, proposer_names
from draftgate.lab.sim.recording import ReplayedAcceptance, load_recording
from draftgate.lab.sim.virtual_time import run_virtual
from draftgate.policies.types import SpeculationMode, SpeculationPlan

DEMO = load_recording("draftgate-demo")


def request(task: str, seed: int, tokens: int, most: int, proposer: str = "ngram"):
    plan = SpeculationPlan("test", SpeculationMode.AUTO, proposer, most, "a test")
    sampling = SamplingParams(tokens, seed, 0.8, ignore_eos=True)
    return GenerationRequest(f"{task}/{seed}-0", compact((1, 2, 3)), sampling, plan)


def run_one(config: WorkerConfig, generation: GenerationRequest):
    """Return the deliveries and the last delta of a single request."""
    environment = SimEnvironment(belief_error=0.0, recording=DEMO)

    async def main():
        backend = SimBackend(config, build=environment.build_worker)
        await backend.start()
        *_, last = [delta async for delta in generate(backend, generation)]
        await backend.stop()
        return environment.log.pop(generation.request_id), last

    return run_virtual(main())


def tokens_per_step(text: Text, first: int, tokens: int, most: int) -> list[int]:
    """Return the tokens of each step of a sequence, computed from the recording."""
    steps, done = [], 1  # The prompt step emits the first token.
    while done < tokens:
        guess = text.guess("ngram", (first + done) % text.length)
        allowed = min(most, tokens - done - 1, guess.proposed)
        steps.append(min(allowed, guess.agreed) + 1)
        done += steps[-1]
    return steps


@pytest.mark.parametrize("most", [1, 4, 16])
def test_simulated_sequence_follows_its_record(most: int) -> None:
    """Each step accepts the recorded tokens of its position, regardless of earlier drafts."""
    generation = request("completion", 5, 200, most)
    deltas, last = run_one(WorkerConfig(speculation=f"fixed:{most}", profile="h100-8b"), generation)
    replay = ReplayedAcceptance(DEMO)
    sequence = type("S", (), {"request": generation, "choice": 0})()
    text, _, first = replay._chosen(sequence)
    assert list(deltas.tokens) == [1, *tokens_per_step(text, first, 200, most)]
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


def test_unknown_proposer_is_rejected() -> None:
    """The error names a proposer that was not recorded or that has no cost."""
    with pytest.raises(ValueError, match="no proposer 'medusa'"):
        proposer_names("medusa", load_profile("h100-8b"), DEMO)
    with pytest.raises(ValueError, match="no cost of drafting with 'sparse_self'"):
        proposer_names("ngram,sparse_self", load_profile("cpu-demo"), DEMO)
