"""The scheduler against a fake device: budgets, blocks, fairness, and exactly the true tokens."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backends.core.kv_blocks import KvBlocks
from backends.core.scheduler import Scheduler, SchedulerConfig
from backends.core.sequence import Sequence, SequenceState
from backends.core.steps import SequenceWork, StepPlan
from backends.types import FinishReason
from policies.registry import speculation_policy
from policies.step_cost import StepCost
from tests.core.fakes import FakeExecutor, FakeProposer, hashed_token, request

BLOCK = 4
COST = StepCost((1, 4, 8, 16, 32), (1e-3, 1.1e-3, 1.2e-3, 1.8e-3, 3e-3), 1e-7, 1e-5)
EOS = 0


class RandomPicker:
    """A policy that picks any legal lengths: no choice of slots may break anything."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)

    def decide(self, request, load):
        raise NotImplementedError

    def draft_lengths(self, step, cost):
        left, lengths = step.slot_budget, []
        for candidate in step.candidates:
            lengths.append(self._random.randint(0, min(candidate.max_draft_tokens, max(left, 0))))
            left -= lengths[-1]
        return lengths


class WatchedScheduler(Scheduler):
    """Checks that drafts preempt nobody."""

    def _plan_drafts(self, step):
        running = self.running
        super()._plan_drafts(step)
        assert self.running == running


class House:
    """A scheduler, a fake device, and every promise checked at every step."""

    def __init__(self, num_blocks=16, max_num_seqs=4, max_step_tokens=16, policy=None, wrong=0.3):
        self.blocks = KvBlocks(num_blocks, BLOCK)
        self.proposer = FakeProposer(
            is_wrong=lambda key, position: Random(key * 7919 + position).random() < wrong
        )
        self.scheduler = WatchedScheduler(
            SchedulerConfig(max_num_seqs, max_step_tokens, frozenset({EOS})),
            self.blocks,
            policy or speculation_policy("fixed:4"),
            {"ngram": self.proposer},
            COST,
        )
        self.sequences: list[Sequence] = []
        self.outputs: dict[int, list[int]] = {}
        self.steps = 0

    def add(self, **of_request) -> Sequence:
        sequence = Sequence.of(len(self.sequences), request(**of_request), 0)
        self.sequences.append(sequence)
        self.outputs[sequence.key] = []
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        self.check_memory()
        if plan is None:
            assert not self.open, "nothing planned although something is open"
            return None
        self.check_plan(plan)
        self.apply(plan)
        self.check_memory()
        self.steps += 1
        return plan

    def apply(self, plan: StepPlan) -> None:
        for emission in self.scheduler.apply(plan, FakeExecutor().execute(plan)):
            assert len(emission.token_ids) == len(emission.logprobs)
            self.outputs[emission.sequence.key].extend(emission.token_ids)

    def run(self) -> None:
        """Run until all is done; a run which takes longer than recomputing everything starves."""
        tokens = sum(s.prompt_tokens + s.request.sampling.max_tokens for s in self.sequences)
        limit = self.steps + tokens * (len(self.sequences) + 1)
        while self.step() is not None:
            assert self.steps <= limit, "somebody starves"
        self.check_results()

    def set_budget(self, max_step_tokens: int) -> None:
        config = self.scheduler.config
        self.scheduler.config = replace(config, max_step_tokens=max_step_tokens)

    @property
    def open(self) -> list[Sequence]:
        return [s for s in self.sequences if s.state is not SequenceState.FINISHED]

    def check_memory(self) -> None:
        self.blocks.check_integrity([s.block_table for s in self.sequences])
        assert all(s.state is SequenceState.RUNNING or not s.block_table for s in self.sequences)
        queue = [s.key for s in self.scheduler.waiting]
        assert queue == sorted(queue), "somebody jumped the queue"

    def check_plan(self, plan: StepPlan) -> None:
        config = self.scheduler.config
        assert 1 <= plan.num_tokens <= config.max_step_tokens
        assert len(self.scheduler.running) <= config.max_num_seqs
        assert len({work.sequence.key for work in plan.work}) == len(plan.work)
        for work in plan.work:
            self.check_work(work)

    def check_work(self, work: SequenceWork) -> None:
        sequence, confirmed = work.sequence, work.num_tokens - work.num_drafts
        assert sequence.state is SequenceState.RUNNING
        assert work.start == sequence.num_computed
        assert confirmed >= 1
        fed = tuple(sequence.token_ids[work.start : work.start + confirmed])
        assert work.token_ids[:confirmed] == fed
        assert work.samples == (work.start + confirmed == len(sequence.token_ids))
        assert len(sequence.block_table) * BLOCK >= work.context_tokens
        most = min(sequence.request.speculation.max_draft_tokens, sequence.remaining_tokens - 1)
        assert 0 <= work.num_drafts <= (most if work.samples else 0)

    def check_results(self) -> None:
        assert self.blocks.num_free == self.blocks.num_blocks
        assert set(self.proposer.forgotten) == {s.key for s in self.sequences}
        for sequence in self.sequences:
            if sequence.finish_reason is not FinishReason.ABORT:
                assert self.outputs[sequence.key] == expected_output(sequence)
                assert sequence.output_tokens == len(self.outputs[sequence.key])


def expected_output(sequence: Sequence) -> list[int]:
    """What the true stream gives: up to the end token or the length."""
    sampling, output = sequence.request.sampling, []
    for position in range(sequence.prompt_tokens, sequence.prompt_tokens + sampling.max_tokens):
        output.append(hashed_token(sequence, position))
        if output[-1] == EOS and not sampling.ignore_eos:
            break
    return output


POLICIES = st.one_of(
    st.sampled_from(["off", "fixed:1", "fixed:5", "auto"]).map(speculation_policy),
    st.integers(0, 100).map(RandomPicker),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, go and are stepped in any order."""

    @initialize(
        num_blocks=st.integers(6, 24),
        max_num_seqs=st.integers(1, 6),
        max_step_tokens=st.integers(1, 24),
        policy=POLICIES,
        wrong=st.sampled_from([0.0, 0.3, 1.0]),
    )
    def start(self, num_blocks, max_num_seqs, max_step_tokens, policy, wrong):
        self.house = House(num_blocks, max_num_seqs, max_step_tokens, policy, wrong)

    @rule(
        prompt=st.integers(1, 12),
        max_tokens=st.integers(1, 12),
        drafts=st.integers(0, 6),
        ignore_eos=st.booleans(),
    )
    def arrive(self, **of_request):
        self.house.add(**of_request)

    @rule(count=st.integers(1, 5))
    def steps(self, count):
        for _ in range(count):
            self.house.step()

    @rule(max_step_tokens=st.integers(1, 24))
    def change_budget(self, max_step_tokens):
        self.house.set_budget(max_step_tokens)

    @precondition(lambda self: self.house.open)
    @rule(data=st.data(), during_a_step=st.booleans())
    def cancel(self, data, during_a_step):
        sequence = data.draw(st.sampled_from(self.house.open))
        plan = self.house.scheduler.plan() if during_a_step else None
        self.house.scheduler.finish(sequence, FinishReason.ABORT)
        self.house.check_memory()
        if plan is not None:
            self.house.apply(plan)

    @invariant()
    def memory_is_sound(self):
        if hasattr(self, "house"):
            self.house.check_memory()

    def teardown(self):
        if hasattr(self, "house"):
            self.house.run()


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=25)
TestScheduler = SchedulerMachine.TestCase


@pytest.mark.parametrize("policy", ["off", "fixed:4", "auto"])
def test_a_pool_too_small_for_all_preempts_and_still_gives_every_token(policy: str) -> None:
    """Sequences whose blocks are taken are computed again and miss no token."""
    house = House(num_blocks=9, max_num_seqs=4, policy=speculation_policy(policy))
    for _ in range(4):
        house.add(prompt=6, max_tokens=26, drafts=4, ignore_eos=True)
    house.run()
    assert sum(s.preemptions for s in house.sequences) > 0


def test_more_decodes_than_budget_take_turns() -> None:
    """With 6 decodes and a budget of 2, each gets a token in every third step."""
    house = House(num_blocks=64, max_num_seqs=6, max_step_tokens=6)
    sequences = [house.add(prompt=1, max_tokens=30, ignore_eos=True) for _ in range(6)]
    house.step()
    house.set_budget(2)
    before = [s.output_tokens for s in sequences]
    for _ in range(9):
        house.step()
    gained = [s.output_tokens - b for s, b in zip(sequences, before, strict=True)]
    assert gained == [3] * 6


def test_decodes_go_on_while_a_long_prompt_is_prefilled() -> None:
    """A prompt of many chunks stalls no decode: each step gives every decode its token."""
    house = House(num_blocks=64, max_step_tokens=8)
    decode = house.add(prompt=1, max_tokens=20, ignore_eos=True)
    house.step()
    long = house.add(prompt=60, max_tokens=1)
    while long.output_tokens == 0:
        before = decode.output_tokens
        house.step()
        assert decode.output_tokens == before + 1


def test_drafts_leave_prefills_their_share() -> None:
    """Decodes that could fill every step with drafts do not keep a newcomer from its prefill."""
    house = House(num_blocks=200, max_num_seqs=5, max_step_tokens=20, wrong=1.0)
    for _ in range(4):
        house.add(prompt=1, max_tokens=60, drafts=4, ignore_eos=True)
    house.step()
    house.step()
    newcomer = house.add(prompt=32, max_tokens=1)
    for _ in range(4):  # 8 tokens a step: 16 are left beside the decodes, half of them for drafts
        house.step()
    assert newcomer.state is SequenceState.FINISHED


def test_drafts_do_not_take_the_blocks_that_let_a_newcomer_in() -> None:
    """A newcomer whose prompt fits the free blocks is admitted at once, drafts or not."""
    house = House(num_blocks=8, max_step_tokens=64, wrong=1.0)
    house.add(prompt=4, max_tokens=20, drafts=12, ignore_eos=True)
    house.step()
    newcomer = house.add(prompt=24, max_tokens=1)
    house.step()
    assert newcomer.state is SequenceState.FINISHED


def test_drafts_shrink_to_the_free_blocks() -> None:
    """A draft that needs a block nobody has is shortened; it does not preempt its neighbour."""
    house = House(num_blocks=4, max_num_seqs=2, wrong=0.0)
    first = house.add(prompt=4, max_tokens=4, drafts=3, ignore_eos=True)
    second = house.add(prompt=4, max_tokens=4, drafts=3, ignore_eos=True)
    house.run()
    assert first.preemptions == second.preemptions == 0


def test_preempted_sequences_return_in_order_of_arrival() -> None:
    """An older sequence that turn-taking had preempted stands before a younger one's return."""
    house = House(num_blocks=6, max_num_seqs=3)
    oldest, _, youngest = [house.add(prompt=4, max_tokens=16, ignore_eos=True) for _ in range(3)]
    for _ in range(4):
        house.step()
    house.set_budget(1)  # the oldest is served, so it comes last in the next step
    house.step()
    house.set_budget(16)
    house.step()
    assert house.scheduler.waiting == (oldest,)
    while house.scheduler.waiting == (oldest,):
        house.step()
    assert house.scheduler.waiting == (oldest, youngest)
    house.run()


def test_an_unverified_offer_still_teaches_acceptance() -> None:
    """With drafting off for now, offers that agree raise the estimate, so `auto` can come back."""
    house = House(policy=speculation_policy("off"), wrong=0.0)
    house.add(prompt=2, max_tokens=20, drafts=3, ignore_eos=True)
    house.run()
    assert house.scheduler.load().acceptance > 0.7
    assert house.sequences[0].outcome().num_drafted_tokens == 0


def test_outcome_counts_what_was_drafted_and_accepted() -> None:
    """With perfect drafts of 3 and 13 tokens: one prefill token, then three steps of 1 + 3."""
    house = House(policy=speculation_policy("fixed:3"), wrong=0.0)
    house.add(prompt=2, max_tokens=13, drafts=3, ignore_eos=True)
    house.run()
    outcome = house.sequences[0].outcome()
    assert outcome.acceptance_histogram == (0, 0, 0, 3)
    assert outcome.num_spec_steps == 3
    assert outcome.num_drafted_tokens == outcome.num_accepted_tokens == 9


def test_load_tells_of_queue_memory_and_price() -> None:
    """The load counts what runs and waits; the price is positive under way and 0 when idle."""
    house = House(num_blocks=16, max_num_seqs=1)
    for _ in range(2):
        house.add(prompt=4, max_tokens=3, ignore_eos=True)
    house.step()
    load = house.scheduler.load()
    assert (load.running, load.waiting, load.kv_blocks_total) == (1, 1, 16)
    assert load.kv_blocks_free < 16
    assert load.price > 0
    house.run()
    idle = house.scheduler.load()
    assert (idle.running, idle.waiting, idle.kv_blocks_free, idle.price) == (0, 0, 16, 0.0)


def test_no_sequence_leaves_the_table_of_states() -> None:
    """A finished sequence can become nothing else, and finishing twice changes nothing."""
    house = House()
    sequence = house.add(max_tokens=1)
    house.run()
    house.scheduler.finish(sequence, FinishReason.ABORT)
    assert sequence.finish_reason is not FinishReason.ABORT
    with pytest.raises(RuntimeError, match="FINISHED cannot become RUNNING"):
        sequence.move_to(SequenceState.RUNNING)
