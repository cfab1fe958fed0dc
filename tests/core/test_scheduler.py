"""The scheduler on a fake device: budgets, blocks, fairness, and correct tokens."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.sequence import Sequence, SequenceState
from draftgate.backends.types import FinishReason, Pace, ResumedChoice, Task
from draftgate.policies.batching import LEAST_CHUNK, LEAST_STRETCH, MOST_TARGETS
from draftgate.policies.registry import speculation_policy
from draftgate.policies.speculation.weights import LATE_WEIGHT
from draftgate.policies.types import ServiceLevel
from tests.core.fakes import FakeExecutor, request
from tests.core.scheduler_harness import COST, RandomPicker, SchedulerHarness, expected_output
from tests.examples import examples

POLICIES = st.one_of(
    st.sampled_from(["off", "fixed:1", "fixed:5", "auto"]).map(speculation_policy),
    st.integers(0, 100).map(RandomPicker),
)


class SchedulerMachine(RuleBasedStateMachine):
    """A state machine that adds, cancels, paces and steps requests in any order."""

    @initialize(
        num_blocks=st.integers(6, 24),
        max_num_seqs=st.integers(1, 6),
        max_step_tokens=st.integers(1, 24),
        policy=POLICIES,
        wrong=st.sampled_from([0.0, 0.3, 1.0]),
        batching=st.sampled_from(["slack", "fixed:8", "prefill_first", "decode_first"]),
    )
    def start(self, num_blocks, max_num_seqs, max_step_tokens, policy, wrong, batching):
        self.harness = SchedulerHarness(
            num_blocks, max_num_seqs, max_step_tokens, policy, wrong, batching
        )

    @rule(
        prompt=st.integers(1, 12),
        max_tokens=st.integers(1, 12),
        drafts=st.integers(0, 6),
        ignore_eos=st.booleans(),
    )
    def arrive(self, **of_request):
        self.harness.add(**of_request)

    @rule(
        length=st.integers(1, 16), families=st.integers(1, 3), n=st.integers(1, 4), data=st.data()
    )
    def arrive_with_a_known_prefix(self, length, families, n, data):
        """Add a prompt that shares all tokens but the last with its family.

        The choices of the request share the whole prompt.
        """
        family = data.draw(st.integers(1, families))
        prompt = (*(family * 100 + i for i in range(length)), data.draw(st.integers(0, 2)))
        generation = request(prompt=prompt, max_tokens=6, drafts=3, n=n)
        self.harness.add_choices(replace(generation, tenant=data.draw(st.sampled_from("ab"))))

    @rule(
        length=st.integers(0, 16), family=st.integers(1, 3), n=st.integers(1, 3),
        max_tokens=st.integers(0, 3),
    )  # fmt: skip
    def arrive_for_prompt_logprobs(self, length, family, n, max_tokens):
        """Add a request for log probabilities of a prompt whose blocks may be cached."""
        prompt = (*(family * 100 + i for i in range(length)), 7)
        generation = request(prompt=prompt, max_tokens=max_tokens, n=n, prompt_logprobs=0)
        self.harness.add_choices(replace(generation, tenant="a"))

    @rule(prompt=st.integers(1, 16), family=st.integers(1, 3), last=st.integers(0, 2))
    def arrive_to_be_embedded(self, prompt, family, last):
        """Add an embedding whose prompt starts like those of the generating families."""
        tokens = (*(family * 100 + i for i in range(prompt - 1)), last)
        self.harness.add_choices(replace(request(prompt=tokens, task=Task.EMBED), tenant="a"))

    @rule(
        prompt=st.integers(1, 10), done=st.integers(1, 7), right=st.integers(0, 8),
        wrong=st.integers(0, 20),
    )  # fmt: skip
    def arrive_half_way(self, prompt, done, right, wrong):
        """Add a request with tokens that another worker generated, of which some may be wrong."""
        generation = request(prompt=prompt, max_tokens=8, drafts=3, ignore_eos=True)
        key = len(self.harness.sequences)
        output = expected_output(Sequence.for_choice(key, generation, ResumedChoice(0, ())))
        begun, following = tuple(output[:done]), tuple(output[done : done + right])
        choice = ResumedChoice(0, begun, following + (99,) * wrong)
        self.harness.add_choices(replace(generation, resumed=(choice,)))

    @rule(count=st.integers(1, 5))
    def steps(self, count):
        for _ in range(count):
            self.harness.step()

    @rule(max_step_tokens=st.integers(1, 24))
    def change_budget(self, max_step_tokens):
        self.harness.set_budget(max_step_tokens)

    @precondition(lambda self: self.harness.open)
    @rule(data=st.data(), during_a_step=st.booleans())
    def cancel(self, data, during_a_step):
        sequence = data.draw(st.sampled_from(self.harness.open))
        plan = self.harness.scheduler.plan() if during_a_step else None
        if plan is not None:
            self.harness.check_plan(plan)
        self.harness.scheduler.finish(sequence, FinishReason.ABORT)
        self.harness.check_memory()
        if plan is not None:
            self.harness.apply(plan)

    @precondition(lambda self: self.harness.open)
    @rule(
        data=st.data(),
        pace=st.sampled_from(Pace),
        tpot_s=st.sampled_from((0.0, 5e-3)),
        during_a_step=st.booleans(),
    )
    def change_pace(self, data, pace, tpot_s, during_a_step):
        sequence = data.draw(st.sampled_from(self.harness.open))
        plan = self.harness.scheduler.plan() if during_a_step else None
        if plan is not None:
            self.harness.check_plan(plan)
        self.harness.scheduler.set_pace(sequence, pace, tpot_s)
        self.harness.check_memory()
        if plan is not None:
            self.harness.apply(plan)

    @invariant()
    def memory_is_sound(self):
        if hasattr(self, "harness"):
            self.harness.check_memory()

    def teardown(self):
        if hasattr(self, "harness"):
            self.harness.run()


SchedulerMachine.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=25)
TestScheduler = SchedulerMachine.TestCase


@pytest.mark.parametrize("policy", ["off", "fixed:4", "auto"])
def test_preempted_sequences_get_all_their_tokens(policy: str) -> None:
    """Preempted sequences are recomputed in a small pool and miss no token."""
    harness = SchedulerHarness(num_blocks=9, max_num_seqs=4, policy=speculation_policy(policy))
    for _ in range(4):
        harness.add(prompt=6, max_tokens=26, drafts=4, ignore_eos=True)
    harness.run()
    assert sum(s.preemptions for s in harness.sequences) > 0


def test_more_decodes_than_budget_take_turns() -> None:
    """Each of 6 decodes emits a token in every third step with a budget of 2."""
    harness = SchedulerHarness(num_blocks=64, max_num_seqs=6, max_step_tokens=6)
    sequences = [harness.add(prompt=1, max_tokens=30, ignore_eos=True) for _ in range(6)]
    harness.step()
    harness.set_budget(2)
    before = [s.output_tokens for s in sequences]
    for _ in range(9):
        harness.step()
    gained = [s.output_tokens - b for s, b in zip(sequences, before, strict=True)]
    assert gained == [3] * 6


def test_decodes_continue_during_a_long_prefill() -> None:
    """Every decode emits a token in each step of a long prefill."""
    harness = SchedulerHarness(num_blocks=64, max_step_tokens=8)
    decode = harness.add(prompt=1, max_tokens=20, ignore_eos=True)
    harness.step()
    long = harness.add(prompt=60, max_tokens=1)
    while long.output_tokens == 0:
        before = decode.output_tokens
        harness.step()
        assert decode.output_tokens == before + 1


def test_drafts_leave_budget_for_prefills() -> None:
    """Decodes with drafts for a full step do not delay the prefill of a new sequence."""
    harness = SchedulerHarness(num_blocks=200, max_num_seqs=5, max_step_tokens=20, wrong=1.0)
    for _ in range(4):
        harness.add(prompt=1, max_tokens=60, drafts=4, ignore_eos=True)
    harness.step()
    harness.step()
    newcomer = harness.add(prompt=32, max_tokens=1)
    for _ in range(4):  # 8 tokens per step, because decodes leave 16 tokens and drafts may use half
        harness.step()
    assert newcomer.state is SequenceState.FINISHED


def test_drafts_leave_blocks_for_the_next_sequence() -> None:
    """The scheduler admits a new sequence whose prompt fits the free blocks despite drafts."""
    harness = SchedulerHarness(num_blocks=8, max_step_tokens=64, wrong=1.0)
    harness.add(prompt=4, max_tokens=20, drafts=12, ignore_eos=True)
    harness.step()
    newcomer = harness.add(prompt=24, max_tokens=1)
    harness.step()
    assert newcomer.state is SequenceState.FINISHED


def test_drafts_shrink_to_the_free_blocks() -> None:
    """The scheduler shortens a draft without a free block instead of preempting a sequence."""
    harness = SchedulerHarness(num_blocks=4, max_num_seqs=2, wrong=0.0)
    first = harness.add(prompt=4, max_tokens=4, drafts=3, ignore_eos=True)
    second = harness.add(prompt=4, max_tokens=4, drafts=3, ignore_eos=True)
    harness.run()
    assert first.preemptions == second.preemptions == 0


def test_preempted_sequences_return_in_order_of_arrival() -> None:
    """An older preempted sequence precedes a younger sequence that was preempted earlier."""
    harness = SchedulerHarness(num_blocks=6, max_num_seqs=3)
    oldest, _, youngest = [harness.add(prompt=4, max_tokens=16, ignore_eos=True) for _ in range(3)]
    for _ in range(4):
        harness.step()
    harness.set_budget(1)  # The oldest sequence is served, so it is last in the next step.
    harness.step()
    harness.set_budget(16)
    harness.step()
    assert harness.scheduler.waiting == (oldest,)
    while harness.scheduler.waiting == (oldest,):
        harness.step()
    assert harness.scheduler.waiting == (oldest, youngest)
    harness.run()


def test_unverified_offers_update_acceptance() -> None:
    """Correct drafts raise the estimate even if they are not verified, so that `auto` can resume
    drafting."""
    harness = SchedulerHarness(policy=speculation_policy("off"), wrong=0.0)
    harness.add(prompt=2, max_tokens=20, drafts=3, ignore_eos=True)
    harness.run()
    assert harness.scheduler.load().acceptance > 0.7
    assert harness.sequences[0].outcome().num_drafted_tokens == 0


def test_outcome_counts_drafted_and_accepted_tokens() -> None:
    """A prefill token and three steps with drafts of 3 tokens give all 13 tokens."""
    harness = SchedulerHarness(policy=speculation_policy("fixed:3"), wrong=0.0)
    harness.add(prompt=2, max_tokens=13, drafts=3, ignore_eos=True)
    harness.run()
    outcome = harness.sequences[0].outcome()
    assert outcome.acceptance_histogram == (0, 0, 0, 3)
    assert outcome.num_spec_steps == 3
    assert outcome.num_drafted_tokens == outcome.num_accepted_tokens == 9


def test_load_reports_queue_memory_and_price() -> None:
    """The load counts running and waiting sequences, and its price is 0 when idle."""
    harness = SchedulerHarness(num_blocks=16, max_num_seqs=1)
    for _ in range(2):
        harness.add(prompt=4, max_tokens=3, ignore_eos=True)
    harness.step()
    harness.step()  # The first step that decodes.
    load = harness.scheduler.load()
    assert (load.running, load.waiting, load.kv_blocks_total) == (1, 1, 16)
    assert load.kv_blocks_free < 16
    assert load.price > 0
    harness.run()
    idle = harness.scheduler.load()
    assert (idle.running, idle.waiting, idle.kv_blocks_free, idle.price) == (0, 0, 16, 0.0)


def test_load_counts_urgent_sequences() -> None:
    """The load counts the open sequences above the usual priority class until they end."""
    harness = SchedulerHarness(max_num_seqs=1)
    for priority in (-1, 0, -2):
        urgent = replace(request(max_tokens=2), service=ServiceLevel(priority=priority))
        harness.add_choices(urgent)
    assert harness.scheduler.load().urgent == 2
    harness.run()
    assert harness.scheduler.load().urgent == 0


def test_load_reports_speed() -> None:
    """The load reports the configured limits, and the speeds of a fake device with steps of 1
    ms."""
    harness = SchedulerHarness(num_blocks=400, max_num_seqs=2, max_step_tokens=16)
    for _ in range(2):
        harness.add(prompt=tuple(range(480)), max_tokens=300, drafts=3, ignore_eos=True)
    load = harness.scheduler.load()
    assert (load.max_sequences, load.step_tokens, load.kv_block_tokens) == (2, 16, 4)
    assert load.prompt_tokens == 960
    harness.step()
    assert harness.scheduler.load().prompt_tokens == 960 - 16
    while harness.open and not all(s.output_tokens for s in harness.sequences):
        harness.step()
    assert harness.scheduler.load().speed.prompt_token_s == pytest.approx(1e-3 / 16, rel=0.2)
    before = [s.output_tokens for s in harness.sequences]
    for _ in range(60):
        harness.step()
    gained = sum(s.output_tokens for s in harness.sequences) - sum(before)
    speed = harness.scheduler.load().speed
    assert speed.tpot_s == pytest.approx(1e-3 / (gained / 120), rel=0.1)
    assert speed.sequence_s > 0.0


def test_finished_sequences_cannot_change_state() -> None:
    """A finished sequence has no transition, and finishing twice changes nothing."""
    harness = SchedulerHarness()
    sequence = harness.add(max_tokens=1)
    harness.run()
    harness.scheduler.finish(sequence, FinishReason.ABORT)
    assert sequence.finish_reason is not FinishReason.ABORT
    with pytest.raises(RuntimeError, match="FINISHED cannot become RUNNING"):
        sequence.move_to(SequenceState.RUNNING)


def test_step_costs_are_learned_from_steps() -> None:
    """After some hundred steps, the scheduler knows that a device is half as fast as its
    profile."""
    harness = SchedulerHarness(num_blocks=400, max_num_seqs=4)
    for _ in range(4):
        harness.add(prompt=2, max_tokens=300, ignore_eos=True)
    before_s = harness.scheduler.cost.seconds(4)
    for _ in range(200):
        plan = harness.scheduler.plan()
        size, result = plan.size, FakeExecutor().execute(plan)
        seconds = 2 * COST.seconds(size.tokens, size.kv_tokens, size.sequences)
        harness.scheduler.apply(plan, replace(result, step_s=seconds))
    assert harness.scheduler.cost.seconds(4) == pytest.approx(2 * before_s, rel=0.1)
    assert harness.scheduler.cost_error < 0.05


def test_step_size_counts_attention_pairs_and_sampled_tokens() -> None:
    """A sequence adds one pair per attended token for each token after its first.

    Only the last token of a prompt, decodes and draft slots are sampled.
    """
    harness = SchedulerHarness(num_blocks=64, max_step_tokens=64)
    harness.add(prompt=5, max_tokens=6, drafts=3, ignore_eos=True)
    harness.add(prompt=3, max_tokens=6, ignore_eos=True)
    prefill = harness.step()
    assert prefill.size == (8, 8, 2, (2 + 3 + 4 + 5) + (2 + 3), 2)
    harness.proposer.draft = lambda sequence, max_tokens: Draft((0,) * max_tokens)
    decode = harness.step()
    assert decode.size == (1 + 3 + 1, (6 + 3) + 4, 2, 7 + 8 + 9, 5)


def test_late_sequences_get_more_slots() -> None:
    """A late sequence verifies more draft tokens than a punctual sequence with an equal draft."""
    harness = SchedulerHarness(
        num_blocks=200, max_step_tokens=6, policy=speculation_policy("auto"), wrong=0.0
    )
    punctual = request(prompt=2, max_tokens=60, drafts=4, ignore_eos=True)
    late = replace(punctual, service=ServiceLevel(tpot_s=1e-6))
    (patient,), (hasty,) = harness.add_choices(punctual), harness.add_choices(late)
    while hasty.state is not SequenceState.FINISHED:
        harness.step()
    assert (hasty.weight, patient.weight) == (LATE_WEIGHT, 1.0)
    assert patient.output_tokens < 40
    harness.run()


def test_sequences_ahead_of_their_target_have_ordinary_weight() -> None:
    """A sequence far ahead of its target has the weight of a sequence without a target."""
    harness = SchedulerHarness(num_blocks=64)
    generation = request(prompt=2, max_tokens=30, ignore_eos=True)
    (ahead,) = harness.add_choices(replace(generation, service=ServiceLevel(tpot_s=10.0)))
    harness.run()
    assert ahead.weight == 1.0


def long_steps(batching: str, tpot_s: float) -> list[float]:
    """Return the predicted seconds of steps with a targeted decode beside a long prompt."""
    harness = SchedulerHarness(num_blocks=200, max_step_tokens=256, batching=batching)
    generation = request(prompt=2, max_tokens=80, ignore_eos=True)
    (decode,) = harness.add_choices(replace(generation, service=ServiceLevel(tpot_s=tpot_s)))
    harness.step()
    harness.add(prompt=240, max_tokens=1)
    steps = []
    while harness.open != [decode]:
        size = harness.step().size
        steps.append(COST.seconds(size.tokens, size.kv_tokens, size.sequences))
    return steps


def test_no_decode_waits_for_a_whole_prefill() -> None:
    """No step exceeds the multiple of the target that `slack` allows, or the share of prompts."""
    least_s = max(LEAST_STRETCH * COST.seconds(1, 400, 1), COST.seconds(1 + LEAST_CHUNK, 400, 2))
    assert max(long_steps("slack:1", 2e-3)) <= least_s
    assert 4e-3 < max(long_steps("slack:1", 5e-3)) <= 5e-3
    assert 5e-3 < max(long_steps("slack", 5e-3)) <= MOST_TARGETS * 5e-3
    assert max(long_steps("prefill_first", 5e-3)) > 15e-3


def test_drafting_time_reduces_prefill_budget() -> None:
    """Prompts receive the remaining target after the step and its drafting."""
    depth_s, tpot_s = 1e-3, 9e-3
    harness = SchedulerHarness(num_blocks=200, max_step_tokens=256)
    harness.scheduler._drafting._proposers["draft_model"]._depth_s = depth_s
    generation = request(prompt=2, max_tokens=80, drafts=4, proposer="draft_model", ignore_eos=True)
    (decode,) = harness.add_choices(replace(generation, service=ServiceLevel(tpot_s=tpot_s)))
    harness.step()
    harness.step()  # The sequence drafts for the first time.
    harness.add(prompt=240, max_tokens=1)
    waits_s = []
    while harness.open != [decode]:
        plan = harness.step()
        size, drafts = plan.size, max(work.num_drafts for work in plan.work)
        step_s = COST.seconds(size.tokens, size.kv_tokens, size.sequences)
        waits_s.append(step_s + depth_s * drafts)
    assert 0.75 * MOST_TARGETS * tpot_s < max(waits_s) <= MOST_TARGETS * tpot_s


def test_prefill_first_and_decode_first_order_steps() -> None:
    """A prompt stalls decodes under `prefill_first` and waits for decodes under `decode_first`."""
    for batching, together in (("prefill_first", False), ("decode_first", False), ("slack", True)):
        harness = SchedulerHarness(num_blocks=200, max_step_tokens=64, batching=batching)
        decode = harness.add(prompt=2, max_tokens=12, ignore_eos=True)
        harness.step()
        newcomer = harness.add(prompt=40, max_tokens=2, ignore_eos=True)
        computed = {work.sequence for work in harness.step().work}
        assert (computed == {decode, newcomer}) == together
        assert newcomer in computed or batching == "decode_first"
        harness.run()
