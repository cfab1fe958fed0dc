"""Conformance checks for proposers, for use in the tests of Draftgate and of other packages."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Final

from draftgate.backends.core.drafts import ROOT, Draft
from draftgate.backends.core.pipeline import run_until_idle
from draftgate.backends.core.proposer import DraftRequest, Proposer
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.engine.load import load_engine
from draftgate.backends.token_ids import compact
from draftgate.backends.types import GenerationRequest, SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.types import SpeculationMode, SpeculationPlan

PROMPTS: Final = (
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n",
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n",
    "import os\nimport sys\nimport os\nimport ",
    "for i in range(10):\n    print(i)\nfor j in range(10):\n    ",
)
NEW_TOKENS: Final = 40
MAX_DRAFTS: Final = 5
KV_BYTES: Final = 8 << 20
"""Size of the KV cache in bytes, barely enough for the prompts. The target therefore takes draft
pages back."""


class CheckedProposer:
    """Wraps a proposer and checks every draft."""

    def __init__(self, proposer: Proposer, vocab_size: int) -> None:
        self._proposer = proposer
        self._vocab_size = vocab_size
        self.open: set[int] = set()
        self.drafts = 0

    def depth_s(self, sequences: int) -> float:
        depth_s = self._proposer.depth_s(sequences)
        assert depth_s >= 0.0, "depth_s must not be negative"
        return depth_s

    def catch_up_s(self, sequence: Sequence) -> float:
        catch_up_s = self._proposer.catch_up_s(sequence)
        assert catch_up_s >= 0.0, "catch_up_s must not be negative"
        return catch_up_s

    def propose(self, requests: Many[DraftRequest]) -> Many[Draft]:
        before = [request.sequence.token_ids[:] for request in requests]
        drafts = self._proposer.propose(requests)
        assert len(drafts) == len(requests), "propose returns one draft per request, possibly empty"
        for request, draft, tokens in zip(requests, drafts, before, strict=True):
            assert request.sequence.token_ids == tokens, "propose must not change a sequence"
            check_draft(draft, request.max_tokens, self._vocab_size)
            self.open.add(request.sequence.key)
            self.drafts += bool(draft)
        return drafts

    def forget(self, sequence: Sequence) -> None:
        self._proposer.forget(sequence)
        self._proposer.forget(sequence)  # a second call must have no effect
        self.open.discard(sequence.key)


def check_draft(draft: Draft, max_tokens: int, vocab_size: int) -> None:
    """Check that a draft is a valid chain or tree within its bounds.

    Raises:
        AssertionError: the draft is invalid. The message names the rule.
    """
    size = len(draft)
    assert size <= max_tokens, "a draft has at most max_tokens tokens"
    assert all(0 <= token < vocab_size for token in draft.token_ids), "tokens are in the vocabulary"
    assert len(draft.parents) in {0, size}, "parents are given for every token or for none"
    assert len(draft.shares) in {0, size}, "shares are given for every token or for none"
    assert all(ROOT <= parent < i for i, parent in enumerate(draft.parents)), "parents come first"
    children = [(draft.parent(place), draft.token_ids[place]) for place in range(size)]
    assert len(set(children)) == size, "the children of a parent are different"
    for parent in set(draft.parents):
        below = [draft.shares[i] for i in range(len(draft.shares)) if draft.parents[i] == parent]
        assert sum(below) <= 1.0 + 1e-9, "shares of siblings sum to at most 1"
    assert draft.distributions is None or draft.is_chain, "a draft with distributions is a chain"


def check_proposer(name: str, model: str | None = None) -> None:
    """Run a proposer on a model, and check the contract of `backends.core.proposer.Proposer`.

    The check compares greedy and sampled texts with and without drafts. Requests end normally or by
    cancellation, and scarce memory forces preemptions. The proposer must keep no state at the end.

    Args:
        name: name of the proposer. For a proposer of another package, the name of its entry point.
        model: directory of a checkpoint, or None for the shipped model.

    Raises:
        AssertionError: the proposer breaks the contract.
        ValueError: the name is unknown.
    """
    plain = _Run(WorkerConfig(model=model, speculation="off", kv_bytes=KV_BYTES), None)
    config = WorkerConfig(
        model=model, speculation=f"fixed:{MAX_DRAFTS}", proposer=name, kv_bytes=KV_BYTES
    )
    drafted = _Run(config, name)
    for temperature in (0.0, 0.8):
        expected = plain.texts(temperature)
        assert drafted.texts(temperature) == expected, "drafts must not change the text"
    drafted.cancel_midway()
    drafted.check_nothing_is_left()


class _Run:
    """A worker with one checked proposer. A worker without a proposer name does not speculate."""

    def __init__(self, config: WorkerConfig, name: str | None) -> None:
        self._engine = load_engine(config)
        self._mode = SpeculationMode.OFF if name is None else SpeculationMode.AUTO
        self._name = name
        self._checked: CheckedProposer | None = None
        if name is not None:
            proposers = self._engine.proposers
            vocab_size = self._engine.worker.tokenizer.vocab_size
            self._checked = proposers[name] = CheckedProposer(proposers[name], vocab_size)

    def texts(self, temperature: float) -> dict[str, list[int]]:
        """Return the tokens of two rounds of all prompts.

        The second round uses the prefix cache.
        """
        tokens: dict[str, list[int]] = {}
        for round_index in range(2):
            for request in self._requests(temperature, round_index):
                self._engine.worker.submit(request)
                tokens[request.request_id] = []
            for step in run_until_idle(self._engine.worker, self._engine.executor):
                for request_id, delta in step.deltas:
                    tokens[request_id].extend(delta.token_ids)
        return tokens

    def cancel_midway(self) -> None:
        """Cancel every request in the middle of its text."""
        requests = self._requests(0.8, 0)
        for request in requests:
            self._engine.worker.submit(request)
        for steps, _ in enumerate(run_until_idle(self._engine.worker, self._engine.executor)):
            if steps == NEW_TOKENS // 4:
                for request in requests:
                    self._engine.worker.cancel(request.request_id)

    def check_nothing_is_left(self) -> None:
        """Check that all memory is free, and that the proposer proposed at least one draft."""
        load = self._engine.worker.load()
        assert load.kv_blocks_free == load.kv_blocks_total, "a proposer must free its KV blocks"
        assert self._checked is not None
        assert not self._checked.open, "the scheduler must call forget for finished sequences"
        assert self._checked.drafts > 0, "the proposer proposed no draft"

    def _requests(self, temperature: float, round_index: int) -> list[GenerationRequest]:
        plan = SpeculationPlan(
            "check", self._mode, self._name, MAX_DRAFTS if self._name else 0, "a check"
        )
        tokenizer = self._engine.worker.tokenizer
        return [
            GenerationRequest(
                f"{round_index}-{index}",
                compact(tokenizer.encode(prompt)),
                SamplingParams(NEW_TOKENS, seed=index, temperature=temperature, ignore_eos=True),
                plan,
            )
            for index, prompt in enumerate(PROMPTS)
        ]
