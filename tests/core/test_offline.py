"""Offline sequences under random steps: other prompts never share a step with them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.core.sequence import SequenceState
from draftgate.backends.core.steps import StepPlan
from draftgate.policies.types import OFFLINE_PRIORITY, ServiceLevel
from tests.core.fakes import request
from tests.core.scheduler_harness import SchedulerHarness

OFFLINE = ServiceLevel(priority=OFFLINE_PRIORITY)


class OfflineHarness(SchedulerHarness):
    """A scheduler with sequences of both kinds."""

    def check_memory(self) -> None:
        self.blocks.check_integrity([s.block_table for s in self.sequences])
        assert all(s.state is SequenceState.RUNNING or not s.block_table for s in self.sequences)
        queue = [(s.offline, s.key) for s in self.scheduler.waiting]
        assert queue == sorted(queue), "an offline sequence precedes another one"

    def check_load(self) -> None:
        """Check that the load is that of the other sequences."""
        online = [s for s in self.open if not s.offline]
        load = self.scheduler.load()
        assert load.running + load.waiting == len(online)
        lacking = [
            s.pending_tokens
            for s in online
            if s.pending_tokens > 1 or s.state is SequenceState.WAITING
        ]
        assert load.prompt_tokens == sum(lacking)
        used = {block for s in online for block in s.block_table}
        assert self.blocks.num_free <= load.kv_blocks_free <= load.kv_blocks_total
        assert load.kv_blocks_free >= load.kv_blocks_total - len(used)

    def check_plan(self, plan: StepPlan) -> None:
        super().check_plan(plan)
        prompts = [
            work
            for work in plan.work
            if not work.sequence.offline and (len(work.token_ids) > 1 or not work.samples)
        ]
        if prompts:
            assert not any(work.sequence.offline for work in plan.work)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.booleans(), st.integers(1, 20), st.integers(1, 12), st.integers(1, 2)),
        st.integers(1, 4),
    ),
    min_size=4,
    max_size=24,
)


@given(ACTIONS)
def test_prompts_have_their_steps_for_themselves(actions: list[tuple | int]) -> None:
    """No step computes a prompt together with offline sequences. Each sequence ends with its own
    text, although offline ones leave the batch and memory is short. The load shows none of them."""
    harness = OfflineHarness(num_blocks=18, max_num_seqs=3, max_step_tokens=12)
    for action in actions:
        if isinstance(action, int):
            for _ in range(action):
                harness.step()
            continue
        offline, prompt, max_tokens, n = action
        service = OFFLINE if offline else ServiceLevel()
        harness.add_choices(
            request(prompt, max_tokens, drafts=3, n=n, service=service, ignore_eos=True)
        )
    harness.run()


def test_an_arrival_frees_the_sequences_of_a_full_batch() -> None:
    """A request that arrives while offline sequences fill batch and memory is in the next step."""
    harness = OfflineHarness(num_blocks=12, max_num_seqs=2, max_step_tokens=16)
    for first in (1, 40):
        prompt = tuple(range(first, first + 20))
        harness.add(prompt=prompt, max_tokens=3, service=OFFLINE, ignore_eos=True)
    for _ in range(3):
        harness.step()
    assert len(harness.scheduler.running) == 2
    online = harness.add(prompt=tuple(range(80, 90)), max_tokens=2, ignore_eos=True)
    assert [work.sequence for work in harness.step().work] == [online]
    harness.run()
