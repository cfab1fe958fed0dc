"""A worker on a fake device that overlaps steps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.kv_blocks import KvBlocks
from draftgate.backends.core.pipeline import OWN_DEVICE, Pipeline, Turns
from draftgate.backends.core.scheduler import Scheduler, SchedulerConfig
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.core.steps import PENDING, StepPlan, StepResult
from draftgate.backends.core.worker import WorkerCore
from draftgate.backends.types import Delta, GenerationRequest, Task
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.registry import speculation_policy
from tests.core.fakes import FakeExecutor, FakeProposer, hashed_token
from tests.core.scheduler_harness import BLOCK, prefixes

LETTERS = 50


class LetterTokenizer:
    """A tokenizer that decodes token i as the i-th letter, so streams contain stop strings."""

    vocab_size = LETTERS
    texts = tuple(chr(ord("A") + token) for token in range(LETTERS))

    def decode(self, token_ids) -> str:
        return "".join(chr(ord("A") + token) for token in token_ids)


def known_tokens(sequence: Sequence) -> list[int]:
    """Return the tokens of a sequence that the device knows."""
    return [
        hashed_token(sequence, place) if token == PENDING else token
        for place, token in enumerate(sequence.token_ids)
    ]


class FakeDevice(FakeExecutor):
    """A device that computes a launched step as late as possible, when the step is fetched.

    A launched step writes to the slots of its plan and reads the results of earlier steps. A block
    that is reused too early appears as a wrong prefix.
    """

    def __init__(self) -> None:
        super().__init__()
        self.overlapped = 0  # number of steps launched before their predecessor was fetched
        self.in_flight = 0  # number of steps launched and not fetched
        self.memory: dict[tuple[int, int], int] = {}
        self.steps = count()

    def now_s(self) -> float | None:
        """Return None, because this device has no clock."""
        return None

    def execute(self, plan: StepPlan) -> StepResult:
        return self.fetch(self.launch(plan))

    def launch(self, plan: StepPlan, previous=None):
        next(self.steps)
        self.in_flight += 1
        self.overlapped += previous is not None
        for work in plan.work:
            pending = [place for place, token in enumerate(work.fed_ids) if token == PENDING]
            assert not pending or pending == [len(work.token_ids) - 1]
            assert not pending or work.sequence.key in {w.sequence.key for w in previous[0].work}
        tables = [tuple(work.sequence.block_table) for work in plan.work]
        texts = [known_tokens(work.sequence) for work in plan.work]
        return plan, tables, texts, FakeExecutor.execute(self, plan)

    def fetch(self, launched) -> StepResult:
        plan, tables, texts, result = launched
        self.in_flight -= 1
        for work, table, text in zip(plan.work, tables, texts, strict=True):
            self._write(work, table, prefixes(text[: work.confirmed_end]))
        for work, table, text, path in zip(plan.work, tables, texts, result.accepted, strict=True):
            for position, prefix in enumerate(prefixes(text[: work.start])):
                assert self.memory[table[position // BLOCK], position % BLOCK] == prefix
            self._compact(work, table, path)
        return result

    def _write(self, work, table, known: list[int]) -> None:
        for position in range(work.start, work.confirmed_end):
            self.memory[table[position // BLOCK], position % BLOCK] = known[position]
        for place, token in enumerate(work.draft.token_ids):
            before = self._place(work, table, work.draft.parent(place))
            prefix = hash((self.memory[before], token))
            self.memory[self._place(work, table, place)] = prefix

    def _compact(self, work, table, path: tuple[int, ...]) -> None:
        for depth, place in enumerate(path):
            source = self.memory[self._place(work, table, place)]
            self.memory[self._place(work, table, depth)] = source

    @staticmethod
    def _place(work, table, place: int) -> tuple[int, int]:
        position = work.confirmed_end + place
        return table[position // BLOCK], position % BLOCK


class FakeDraftModel(FakeProposer):
    """A proposer that computes on the device, whose keys and values no step may overwrite."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__(is_wrong=lambda key, place: (key + place) % 4 == 0, depth_s=1e-4)
        self._device = device

    def propose(self, requests) -> list[Draft]:
        assert not self._device.in_flight, "a draft is computed while a step runs"
        return super().propose(requests)


class PipelineHarness:
    """A worker with a pipeline, and its deliveries by request and choice."""

    def __init__(
        self,
        *,
        asynchronous: bool,
        num_blocks: int,
        policy: str,
        eos: int = 0,
        device: FakeDevice | None = None,
        finds: Callable[[int, int], bool] = lambda key, place: True,
        is_wrong: Callable[[int, int], bool] = lambda key, place: (key + place) % 3 == 0,
        branches: float = 0.3,
        step_s: float = 1e-3,
        turns: Turns = OWN_DEVICE,
    ) -> None:
        self.blocks = KvBlocks(num_blocks, BLOCK)
        self.device = device or FakeDevice()
        ngram = FakeProposer(is_wrong=is_wrong, branches=branches, finds=finds)
        self.scheduler = Scheduler(
            SchedulerConfig(4, 16, frozenset({eos})),
            self.blocks,
            speculation_policy(policy),
            {"ngram": ngram, "draft_model": FakeDraftModel(self.device)},
            StepCost((64,), (step_s,)),
        )
        self.worker = WorkerCore(
            self.scheduler, LetterTokenizer(), 2000, tasks=(Task.GENERATE, Task.EMBED)
        )
        self.delivered: dict[tuple[str, int], list[Delta]] = {}
        launcher = self.device if asynchronous else None
        self.pipeline = Pipeline(
            self.worker, self.device, self._deliver, launcher, self.device.now_s, turns
        )
        self.sequences = []

    def _deliver(self, batch) -> None:
        for request_id, delta in batch:
            self.delivered.setdefault((request_id, delta.choice), []).append(delta)

    def submit(self, each: GenerationRequest) -> None:
        self.worker.admission.check(each)
        self.worker.submit(each)
        self.sequences = [*{*self.sequences, *self.scheduler.waiting, *self.scheduler.running}]

    def step(self) -> bool:
        stepped = self.pipeline.step()
        self.blocks.check_integrity([sequence.block_table for sequence in self.sequences])
        return stepped

    def run(self) -> None:
        while self.step():
            pass
        assert self.worker.open_requests == ()
        assert self.blocks.num_free == self.blocks.num_blocks

    def deltas_by_choice(self) -> dict:
        """Return the tokens and all other results of each choice."""
        return {
            key: (
                [token for delta in deltas for token in delta.token_ids],
                "".join(delta.text for delta in deltas),
                [entry for delta in deltas for entry in delta.logprobs],
                [delta.finish_reason for delta in deltas if delta.finish_reason is not None],
                [delta.pooled for delta in deltas if delta.pooled is not None],
                [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None],
            )
            for key, deltas in self.delivered.items()
        }
