"""The scheduler against a fake device: budgets, blocks, fairness, and exactly the true tokens."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.sequence import Sequence, SequenceState
from draftgate.backends.types import FinishReason, Pace, ResumedChoice, Task
from draftgate.policies.batching import LEAST_CHUNK, LEAST_STRETCH
from draftgate.policies.registry import speculation_policy
from draftgate.policies.speculation.weights import LATE_WEIGHT
from draftgate.policies.types import ServiceLevel
from tests.core.fakes import FakeExecutor, request
from tests.core.house import COST, House, RandomPicker, expected_output

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
        batching=st.sampled_from(["slack", "fixed:8", "prefill_first", "decode_first"]),
    )
    def start(self, num_blocks, max_num_seqs, max_step_tokens, policy, wrong, batching):
        self.house = House(num_blocks, max_num_seqs, max_step_tokens, policy, wrong, batching)

    @rule(
        prompt=st.integers(1, 12),
        max_tokens=st.integers(1, 12),
        drafts=st.integers(0, 6),
        ignore_eos=st.booleans(),
    )
    def arrive(self, **of_request):
        self.house.add(**of_request)

    @rule(
        length=st.integers(1, 16), families=st.integers(1, 3), n=st.integers(1, 4), data=st.data()
    )
    def arrive_with_a_known_prefix(self, length, families, n, data):
        """Prompts of a family share all tokens but the last; choices share the whole prompt."""
        family = data.draw(st.integers(1, families))
        prompt = (*(family * 100 + i for i in range(length)), data.draw(st.integers(0, 2)))
        wanted = request(prompt=prompt, max_tokens=6, drafts=3, n=n)
        self.house.add_choices(replace(wanted, tenant=data.draw(st.sampled_from("ab"))))

    @rule(prompt=st.integers(1, 16), family=st.integers(1, 3), last=st.integers(0, 2))
    def arrive_to_be_embedded(self, prompt, family, last):
        """Their prompts begin as those of the families that generate."""
        tokens = (*(family * 100 + i for i in range(prompt - 1)), last)
        self.house.add_choices(replace(request(prompt=tokens, task=Task.EMBED), tenant="a"))

    @rule(prompt=st.integers(1, 10), done=st.integers(1, 7))
    def arrive_half_way(self, prompt, done):
        """Another worker has begun: the tokens it generated come along."""
        wanted = request(prompt=prompt, max_tokens=8, drafts=3, ignore_eos=True)
        key = len(self.house.sequences)
        begun = expected_output(Sequence.for_choice(key, wanted, ResumedChoice(0, ())))[:done]
        self.house.add_choices(replace(wanted, resumed=(ResumedChoice(0, tuple(begun)),)))

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
        if plan is not None:
            self.house.check_plan(plan)
        self.house.scheduler.finish(sequence, FinishReason.ABORT)
        self.house.check_memory()
        if plan is not None:
            self.house.apply(plan)

    @precondition(lambda self: self.house.open)
    @rule(data=st.data(), pace=st.sampled_from(Pace), during_a_step=st.booleans())
    def change_pace(self, data, pace, during_a_step):
        sequence = data.draw(st.sampled_from(self.house.open))
        plan = self.house.scheduler.plan() if during_a_step else None
        if plan is not None:
            self.house.check_plan(plan)
        self.house.scheduler.set_pace(sequence, pace)
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
    house.step()  # the first one that decodes
    load = house.scheduler.load()
    assert (load.running, load.waiting, load.kv_blocks_total) == (1, 1, 16)
    assert load.kv_blocks_free < 16
    assert load.price > 0
    house.run()
    idle = house.scheduler.load()
    assert (idle.running, idle.waiting, idle.kv_blocks_free, idle.price) == (0, 0, 16, 0.0)


def test_load_tells_how_fast_the_steps_are() -> None:
    """Seats and budget are the bounds; speeds are those of the fake device's steps of 1 ms."""
    house = House(num_blocks=400, max_num_seqs=2, max_step_tokens=16)
    for _ in range(2):
        house.add(prompt=tuple(range(480)), max_tokens=300, drafts=3, ignore_eos=True)
    load = house.scheduler.load()
    assert (load.max_sequences, load.step_tokens, load.kv_block_tokens) == (2, 16, 4)
    assert load.prompt_tokens == 960
    house.step()
    assert house.scheduler.load().prompt_tokens == 960 - 16
    while house.open and not all(s.output_tokens for s in house.sequences):
        house.step()
    assert house.scheduler.load().speed.prompt_token_s == pytest.approx(1e-3 / 16, rel=0.2)
    before = [s.output_tokens for s in house.sequences]
    for _ in range(60):
        house.step()
    gained = sum(s.output_tokens for s in house.sequences) - sum(before)
    speed = house.scheduler.load().speed
    assert speed.tpot_s == pytest.approx(1e-3 / (gained / 120), rel=0.1)
    assert speed.sequence_s > 0.0


def test_no_sequence_leaves_the_table_of_states() -> None:
    """A finished sequence can become nothing else, and finishing twice changes nothing."""
    house = House()
    sequence = house.add(max_tokens=1)
    house.run()
    house.scheduler.finish(sequence, FinishReason.ABORT)
    assert sequence.finish_reason is not FinishReason.ABORT
    with pytest.raises(RuntimeError, match="FINISHED cannot become RUNNING"):
        sequence.move_to(SequenceState.RUNNING)


def test_step_costs_are_learned_from_the_steps() -> None:
    """A device half as fast as its profile says is known for it after some hundred steps."""
    house = House(num_blocks=400, max_num_seqs=4)
    for _ in range(4):
        house.add(prompt=2, max_tokens=300, ignore_eos=True)
    before_s = house.scheduler.cost.seconds(4)
    for _ in range(200):
        plan = house.scheduler.plan()
        size, result = plan.size, FakeExecutor().execute(plan)
        seconds = 2 * COST.seconds(size.tokens, size.kv_tokens, size.sequences)
        house.scheduler.apply(plan, replace(result, step_s=seconds))
    assert house.scheduler.cost.seconds(4) == pytest.approx(2 * before_s, rel=0.1)
    assert house.scheduler.cost_error < 0.05


def test_the_size_of_a_step_counts_what_attention_reads() -> None:
    """Pairs are those of all tokens behind the first of a sequence with all up to themselves."""
    house = House(num_blocks=64, max_step_tokens=64)
    house.add(prompt=5, max_tokens=6, drafts=3, ignore_eos=True)
    house.add(prompt=3, max_tokens=6, ignore_eos=True)
    prefill = house.step()
    assert prefill.size == (8, 8, 2, (2 + 3 + 4 + 5) + (2 + 3))
    house.proposer.draft = lambda sequence, max_tokens: Draft((0,) * max_tokens)
    decode = house.step()
    assert decode.size == (1 + 3 + 1, (6 + 3) + 4, 2, 7 + 8 + 9)


def test_who_is_late_gets_the_slots() -> None:
    """Of two sequences with equal drafts, the one behind its target verifies more of them."""
    house = House(num_blocks=200, max_step_tokens=6, policy=speculation_policy("auto"), wrong=0.0)
    usual = request(prompt=2, max_tokens=60, drafts=4, ignore_eos=True)
    late = replace(usual, service=ServiceLevel(tpot_s=1e-6))
    (patient,), (hasty,) = house.add_choices(usual), house.add_choices(late)
    while hasty.state is not SequenceState.FINISHED:
        house.step()
    assert (hasty.weight, patient.weight) == (LATE_WEIGHT, 1.0)
    assert patient.output_tokens < 40
    house.run()


def test_a_target_is_met_without_more_than_ample_weight() -> None:
    """A sequence far ahead of its target weighs as much as one without."""
    house = House(num_blocks=64)
    wanted = request(prompt=2, max_tokens=30, ignore_eos=True)
    (ahead,) = house.add_choices(replace(wanted, service=ServiceLevel(tpot_s=10.0)))
    house.run()
    assert ahead.weight == 1.0


def long_steps(batching: str, tpot_s: float) -> list[float]:
    """Predicted seconds of the steps of a decode with a target while a long prompt comes."""
    house = House(num_blocks=200, max_step_tokens=256, batching=batching)
    wanted = request(prompt=2, max_tokens=80, ignore_eos=True)
    (decode,) = house.add_choices(replace(wanted, service=ServiceLevel(tpot_s=tpot_s)))
    house.step()
    house.add(prompt=240, max_tokens=1)
    steps = []
    while house.open != [decode]:
        size = house.step().size
        steps.append(COST.seconds(size.tokens, size.kv_tokens, size.sequences))
    return steps


def test_no_decode_waits_for_a_whole_prefill() -> None:
    """Under `slack` no step is longer than the decode's target, or than prompts get anyhow."""
    least_s = max(LEAST_STRETCH * COST.seconds(1, 400, 1), COST.seconds(1 + LEAST_CHUNK, 400, 2))
    assert max(long_steps("slack", 2e-3)) <= least_s
    assert 4e-3 < max(long_steps("slack", 5e-3)) <= 5e-3
    assert max(long_steps("prefill_first", 5e-3)) > 15e-3


def test_drafting_counts_in_what_a_decode_waits() -> None:
    """Prompts get what the target leaves behind the step and the computing of its drafts."""
    depth_s, tpot_s = 1e-3, 9e-3
    house = House(num_blocks=200, max_step_tokens=256)
    house.scheduler._drafting._proposers["draft_model"]._depth_s = depth_s
    wanted = request(prompt=2, max_tokens=80, drafts=4, proposer="draft_model", ignore_eos=True)
    (decode,) = house.add_choices(replace(wanted, service=ServiceLevel(tpot_s=tpot_s)))
    house.step()
    house.step()  # drafts for the first time
    house.add(prompt=240, max_tokens=1)
    waits_s = []
    while house.open != [decode]:
        plan = house.step()
        size, drafts = plan.size, max(work.num_drafts for work in plan.work)
        step_s = COST.seconds(size.tokens, size.kv_tokens, size.sequences)
        waits_s.append(step_s + depth_s * drafts)
    assert 7e-3 < max(waits_s) <= tpot_s


def test_prefills_first_and_decodes_first_are_what_they_say() -> None:
    """A prompt stalls decodes under the one, and waits for all of them under the other."""
    for batching, together in (("prefill_first", False), ("decode_first", False), ("slack", True)):
        house = House(num_blocks=200, max_step_tokens=64, batching=batching)
        decode = house.add(prompt=2, max_tokens=12, ignore_eos=True)
        house.step()
        newcomer = house.add(prompt=40, max_tokens=2, ignore_eos=True)
        fed = {work.sequence for work in house.step().work}
        assert (fed == {decode, newcomer}) == together
        assert newcomer in fed or batching == "decode_first"
        house.run()
