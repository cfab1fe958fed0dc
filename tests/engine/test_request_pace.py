"""The pace of a slow reader does not change the tokens of its request."""

from __future__ import annotations

import random

import pytest

from draftgate.backends.core.pipeline import Pipeline
from draftgate.backends.types import Delta, Pace
from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.registry import speculation_policy
from draftgate.policies.speculation.baselines import Off
from tests.engine.harness import HostileProposer, Outcome, RandomSlots, Setup, add_delta, request
from tests.engine.tiny_model import (
    VOCAB,
    TinyEngine,
    cpu_engine,
    tiny_config,
    tiny_weights,
    tokens_of,
)
from tests.examples import grid

REQUESTS = 10
NEW_TOKENS = 32

BATCHINGS = {
    "large": {"max_num_seqs": 16, "max_step_tokens": 512, "num_blocks": 200},
    "few sequences": {"max_num_seqs": 3, "max_step_tokens": 40, "num_blocks": 200},
    "little memory": {"max_num_seqs": 8, "max_step_tokens": 24, "num_blocks": 16},
}


def requests(policy: SpeculationPolicy, temperature: float) -> list:
    """Create requests, half of which share a prefix that fills a block."""
    return [
        request(
            str(index),
            (*tokens_of(17, seed=index % 2), *tokens_of(3 + index, seed=index)),
            policy,
            temperature=temperature,
            seed=index,
            max_tokens=NEW_TOKENS,
        )
        for index in range(REQUESTS)
    ]


def engine(setup: Setup) -> TinyEngine:
    config = tiny_config()
    return cpu_engine(config, tiny_weights(config), setup)


class Disturbed:
    """A run in which a random request changes its pace before every second step."""

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        self.engine = engine(setup)
        self.rng = rng
        self.outcome = Outcome()
        self.resumed = 0  # number of sequences resumed after they ran
        self._paces: dict[str, Pace] = {}

    def run(self, requests_to_run: list) -> Outcome:
        worker, scheduler = self.engine.worker, self.engine.scheduler
        for each in requests_to_run:
            worker.submit(each)
        sequences = scheduler.waiting
        pipeline = Pipeline(worker, self.engine.runner, self._deliver)
        while worker.open_requests:
            if self.rng.random() < 0.5:
                self._change(self.rng.choice(worker.open_requests), self.rng.choice(list(Pace)))
            if not pipeline.step() and worker.open_requests:
                self._change(self.rng.choice(worker.open_requests), Pace.FULL)
        self.outcome.preemptions = sum(sequence.preemptions for sequence in sequences)
        self.outcome.leaked_blocks = scheduler.blocks.num_blocks - scheduler.blocks.num_free
        return self.outcome

    def _change(self, request_id: str, pace: Pace) -> None:
        before = self._paces.get(request_id, Pace.FULL)
        started = (request_id, 0) in self.outcome.tokens
        self.resumed += started and before is Pace.PAUSED and pace is not Pace.PAUSED
        self._paces[request_id] = pace
        self.engine.worker.set_pace(request_id, pace)

    def _deliver(self, batch: list[tuple[str, Delta]]) -> None:
        for request_id, delta in batch:
            add_delta(self.outcome, request_id, delta)


@pytest.mark.parametrize(
    ("batching", "temperature"),
    grid(
        BATCHINGS,
        (0.0, 0.9),
        quick=lambda batching, temperature: batching != "large" and temperature > 0,
    ),
)
def test_pace_does_not_change_tokens(
    batching: str, temperature: float, record_testsuite_property
) -> None:
    """Pauses and resumes at random steps, with drafts and preemptions, do not change tokens."""
    undisturbed = engine(Setup(Off(), max_num_seqs=1)).run(requests(Off(), temperature)).tokens
    resumed = preemptions = 0
    for seed, name in enumerate(("off", "fixed:4", "auto", "random", "random", "random")):
        rng = random.Random(seed)
        policy = RandomSlots(rng) if name == "random" else speculation_policy(name)
        setup = Setup(
            policy,
            lambda _, rng=rng: {"ngram": HostileProposer(VOCAB, rng)},
            **BATCHINGS[batching],
        )
        disturbed = Disturbed(setup, rng)
        outcome = disturbed.run(requests(policy, temperature))
        assert outcome.tokens == undisturbed
        assert outcome.leaked_blocks == 0
        resumed += disturbed.resumed
        preemptions += outcome.preemptions
    record_testsuite_property("resumed", resumed)
    assert resumed >= 20
    assert preemptions > 0 or batching != "little memory"
