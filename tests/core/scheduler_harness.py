"""A scheduler with a fake device that checks all invariants at every step."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from random import Random

from draftgate.backends.core.accounting import count_draft
from draftgate.backends.core.kv_blocks import KvBlocks
from draftgate.backends.core.scheduler import Scheduler, SchedulerConfig
from draftgate.backends.core.sequence import Sequence, SequenceState
from draftgate.backends.core.steps import SequenceWork, StepPlan
from draftgate.backends.types import FinishReason, GenerationRequest, Pace
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.registry import batching_policy, speculation_policy
from tests.core.fakes import FakeExecutor, FakeProposer, hashed_token, request

BLOCK = 4
COST = StepCost((1, 4, 8, 16, 32), (1e-3, 1.1e-3, 1.2e-3, 1.8e-3, 3e-3), 1e-7, 1e-5)
EOS = 0


class RandomPicker:
    """A policy of random valid draft lengths, which must not break an invariant."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)

    def decide(self, request, load):
        raise NotImplementedError

    def least_survival(self, step, cost):
        return None

    def draft_lengths(self, step, cost):
        budget, lengths = step.slot_budget, []
        for candidate in step.candidates:
            lengths.append(self._random.randint(0, min(candidate.max_draft_tokens, max(budget, 0))))
            budget -= lengths[-1]
        return lengths


class WatchedScheduler(Scheduler):
    """A scheduler that checks that drafts preempt no sequence."""

    def _plan_drafts(self, step, *, ahead):
        running = self.running
        super()._plan_drafts(step, ahead=ahead)
        assert self.running == running


class SchedulerHarness:
    """A scheduler on a fake device, with checks of all invariants at every step."""

    def __init__(
        self,
        num_blocks=16,
        max_num_seqs=4,
        max_step_tokens=16,
        policy=None,
        wrong=0.3,
        batching="slack",
    ):
        self.blocks = KvBlocks(num_blocks, BLOCK)

        def is_wrong(key: int, position: int) -> bool:
            return Random(key * 7919 + position).random() < wrong

        self.proposer = FakeProposer(is_wrong=is_wrong, branches=wrong)
        self.scheduler = WatchedScheduler(
            SchedulerConfig(max_num_seqs, max_step_tokens, frozenset({EOS})),
            self.blocks,
            policy or speculation_policy("fixed:4"),
            {
                "ngram": self.proposer,
                "draft_model": FakeProposer(is_wrong=is_wrong, depth_s=1e-5),
            },
            COST,
            batching_policy(batching),
        )
        self.sequences: list[Sequence] = []
        self.outputs: dict[int, list[int]] = {}
        self.scored: dict[int, list[float]] = {}  # positions in `Delta.prompt_logprobs`, by key
        self.memory: dict[tuple[int, int], int] = {}  # entries by (block, offset)
        self.steps = 0
        self.now_s = 0.0

    def add(self, **of_request) -> Sequence:
        return self.add_choices(request(**of_request))[0]

    def add_choices(self, wanted: GenerationRequest) -> list[Sequence]:
        choices = []
        for choice in wanted.choices:
            sequence = Sequence.for_choice(len(self.sequences), wanted, choice)
            self.sequences.append(sequence)
            self.outputs[sequence.key] = list(choice.output_ids)
            self.scheduler.add(sequence)
            choices.append(sequence)
        return choices

    def step(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        self.check_memory()
        if plan is None:
            held_up = [s for s in self.open if s.pace is not Pace.PAUSED]
            assert not held_up, "no step is planned although a sequence is open"
            return None
        self.check_plan(plan)
        self.apply(plan)
        self.check_memory()
        self.check_load()
        self.steps += 1
        return plan

    def apply(self, plan: StepPlan) -> None:
        result = FakeExecutor().execute(plan)
        self.now_s += result.step_s
        for work, path in zip(plan.work, result.accepted, strict=True):
            self.compact(work, path)
        for sequence, token_ids, logprobs, draft, details in self.scheduler.apply(plan, result):
            assert len(token_ids) == len(logprobs)
            count_draft(sequence, draft, len(token_ids))
            self.outputs[sequence.key].extend(token_ids)
            if details is not None and details.prompt_logprobs is not None:
                assert sequence.key not in self.scored, "log probabilities are delivered twice"
                scored = details.prompt_logprobs.scored_tokens()
                self.scored[sequence.key] = [token.logprob for token in scored]

    def run(self) -> None:
        """Run all sequences to their end within the steps of a full recomputation.

        Paused sequences are resumed first.
        """
        for sequence in self.open:
            if sequence.pace is Pace.PAUSED:
                self.scheduler.set_pace(sequence, Pace.FULL)
        tokens = sum(s.prompt_tokens + s.request.sampling.max_tokens for s in self.sequences)
        limit = self.steps + tokens * (len(self.sequences) + 1)
        while self.step() is not None:
            assert self.steps <= limit, "a sequence starves"
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
        assert queue == sorted(queue), "the queue is not in order of arrival"
        assert all(s.pace is not Pace.PAUSED for s in self.scheduler.waiting), (
            "a paused sequence is in the queue"
        )
        load = self.scheduler.load()
        assert load.running + load.waiting + load.paused == len(self.open), "a sequence is lost"

    def check_load(self) -> None:
        """Check that the load counts the pending tokens of all sequences except decodes."""
        unpaused = [s for s in self.open if s.pace is not Pace.PAUSED]
        leaving = [s for s in self.open if s.pace is Pace.PAUSED and s.block_table]
        lacking = [
            s.pending_tokens
            for s in [*unpaused, *leaving]
            if s.pending_tokens > 1 or s.state is SequenceState.WAITING
        ]
        load, waiting = self.scheduler.load(), self.scheduler.waiting
        assert load.prompt_tokens == sum(lacking)
        assert load.head_tokens == (len(waiting[0].token_ids) if waiting else 0)
        assert load.urgent == sum(s.request.service.priority < 0 for s in self.open)

    def check_plan(self, plan: StepPlan) -> None:
        config = self.scheduler.config
        assert 1 <= plan.num_tokens <= config.max_step_tokens
        assert len(self.scheduler.running) <= config.max_num_seqs
        assert len({work.sequence.key for work in plan.work}) == len(plan.work)
        for place, work in enumerate(plan.work):
            self.check_work(work, pools=place in plan.pooled)
        for work in plan.work:
            self.write(work)
        for work in plan.work:
            self.read(work)

    def write(self, work: SequenceWork) -> None:
        """Write keys and values to blocks that no other sequence uses.

        The prefix of a token represents its keys and values.
        """
        own = work.sequence.block_table[work.start // BLOCK :]
        others = [s.block_table for s in self.sequences if s is not work.sequence]
        assert not set(own) & {block for table in others for block in table}, "a shared block"
        end = work.confirmed_end
        written = prefixes(work.sequence.token_ids[:end])
        for position, prefix in list(enumerate(written))[work.start :]:
            self.memory[self.place(work.sequence, position)] = prefix
        for place, token in enumerate(work.draft.token_ids):
            before = self.place(work.sequence, end + work.draft.parent(place))
            prefix = hash((self.memory[before], token))
            self.memory[self.place(work.sequence, end + place)] = prefix

    def compact(self, work: SequenceWork, path: tuple[int, ...]) -> None:
        """Move the entries of accepted tokens to the slots of their positions."""
        if not work.sequence.block_table:
            return  # The request was cancelled while the step ran.
        for depth, place in enumerate(path):
            source = self.place(work.sequence, work.confirmed_end + place)
            target = self.place(work.sequence, work.confirmed_end + depth)
            self.memory[target] = self.memory[source]

    def read(self, work: SequenceWork) -> None:
        """Check that every earlier position has the entry of exactly this prefix."""
        for position, prefix in enumerate(prefixes(work.sequence.token_ids[: work.start])):
            assert self.memory[self.place(work.sequence, position)] == prefix, "a wrong prefix"

    @staticmethod
    def place(sequence: Sequence, position: int) -> tuple[int, int]:
        return sequence.block_table[position // BLOCK], position % BLOCK

    def check_work(self, work: SequenceWork, *, pools: bool) -> None:
        sequence, confirmed = work.sequence, len(work.token_ids)
        assert sequence.state is SequenceState.RUNNING
        assert work.start == sequence.num_computed
        assert confirmed >= 1
        expected_tokens = tuple(sequence.token_ids[work.start : work.start + confirmed])
        assert work.token_ids == expected_tokens
        assert work.confirmed_end == work.start + confirmed
        ends = work.start + confirmed == len(sequence.token_ids)
        assert (work.samples, pools) == (
            ends and not sequence.ends_with_prompt,
            ends and sequence.embeds,
        )
        assert len(sequence.block_table) * BLOCK >= work.context_tokens
        (choice,) = (c for c in sequence.request.choices if c.choice == sequence.choice)
        next_ids = choice.next_ids
        verifies_next = bool(work.num_drafts and next_ids and sequence.first_token_s is None)
        cap = max(len(next_ids) if verifies_next else 0, sequence.draft_cap)
        most = min(cap, sequence.remaining_tokens - 1)
        assert 0 <= work.num_drafts <= (most if work.samples else 0)
        assert sequence.pace is not Pace.PAUSED, "a paused sequence is in a step"
        may_draft = sequence.pace is Pace.FULL or verifies_next
        assert may_draft or not work.num_drafts, "a draft for a slow reader"

    def check_results(self) -> None:
        assert self.blocks.num_free == self.blocks.num_blocks
        assert set(self.proposer.forgotten) == {s.key for s in self.sequences}
        for sequence in self.sequences:
            if sequence.finish_reason is FinishReason.ABORT:
                continue
            if sequence.embeds:
                assert sequence.pooled == f"{sequence.key}@{sequence.prompt_tokens - 1}".encode()
                assert not self.outputs[sequence.key]
            else:
                assert self.outputs[sequence.key] == expected_output(sequence)
                assert sequence.output_tokens == len(self.outputs[sequence.key])
                self.check_scored(sequence)

    def check_scored(self, sequence: Sequence) -> None:
        """Check that each requested log probability of the prompt is computed once, in order."""
        resumed = bool(sequence.request.resumed)
        wanted = sequence.request.sampling.prompt_logprobs is not None and not resumed
        if wanted and sequence.choice == 0 and sequence.prompt_tokens > 1:
            assert self.scored[sequence.key] == list(range(1, sequence.prompt_tokens))
        else:
            assert sequence.key not in self.scored


def prefixes(tokens: list[int]) -> list[int]:
    """Return the prefix up to each token, which determines its keys and values."""
    return list(accumulate(tokens, lambda before, token: hash((before, token)), initial=0))[1:]


def expected_output(sequence: Sequence) -> list[int]:
    """Return the true tokens up to the end token or the length."""
    sampling, output = sequence.request.sampling, []
    for position in range(sequence.prompt_tokens, sequence.prompt_tokens + sampling.max_tokens):
        output.append(hashed_token(sequence, position))
        if output[-1] == EOS and not sampling.ignore_eos:
            break
    return output
