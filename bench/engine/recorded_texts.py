"""Generate the texts of conversations without drafts, and keep their tokens in a file.

`bench.engine.acceptance` records what proposers would have drafted in these texts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

import msgspec

from bench.engine.recorded_tasks import Conversation, Turn
from bench.harness.loops import loop_start
from draftgate.backends.core.drafts import NO_DRAFT, Draft
from draftgate.backends.core.pipeline import run_until_idle
from draftgate.backends.core.proposer import DraftRequest, Proposer
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.core.worker import WorkerCore
from draftgate.backends.engine.loaded import LoadedEngine
from draftgate.backends.errors import RequestRejected
from draftgate.backends.recording import SLOTS
from draftgate.backends.token_ids import compact
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import FinishReason, GenerationRequest, SamplingParams
from draftgate.policies.types import SpeculationMode, SpeculationPlan

STREAMS: Final = 64
"""Number of requests at a time. With 96 instead of 32, SmolLM2 makes 552 instead of 365 tokens per
second (one thread of a busy Xeon with AMX, bfloat16, 2026-11-28)."""

LOOP_TOKENS: Final = 32
"""Number of tokens in a loop after which a text ends, to save time."""

SPARSE_TASKS: Final = {"long_context": 8, "summary": 2, "rag": 2}
"""Tasks whose contexts exceed the window of sparse self-speculation, with the number of
conversations for which it drafts. In all other tasks `sparse_self` reads the whole context, so its
drafts are always right. Each of its drafts takes 16 forward passes."""

MOST_PROMPT_TOKENS: Final = 1000

NO_DRAFTS: Final = SpeculationPlan("bench", SpeculationMode.OFF, None, 0, "a benchmark")
SPARSE_DRAFTS: Final = SpeculationPlan(
    "bench", SpeculationMode.AUTO, "sparse_self", SLOTS, "a benchmark"
)


class Answer(msgspec.Struct, frozen=True):
    """The tokens of an answer, as a line of the file of texts.

    Attributes:
        index: number of its conversation in the task.
        ended: whether an end-of-sequence token, a stop text or a grammar ended it.
        sparse: drafts of `sparse_self` as pairs of evidence and tokens, by number of tokens before
            them, or None if they were not made.
    """

    task: str
    index: int
    turn: int
    temperature: float
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    ended: bool
    sparse: dict[str, tuple[int, tuple[int, ...]]] | None = None

    @property
    def key(self) -> str:
        """The name of its request."""
        return f"{self.task}/{self.index}/{self.turn}/{self.temperature}"


@dataclass
class Talk:
    """A conversation at one temperature, in progress.

    Attributes:
        messages: messages so far, from which the prompt of the next turn is rendered.
        turn: number of the next turn.
        output_ids: tokens of its answer so far.
    """

    conversation: Conversation
    temperature: float
    messages: list[dict[str, str]] = field(default_factory=list)
    turn: int = 0
    prompt_ids: tuple[int, ...] = ()
    output_ids: list[int] = field(default_factory=list)

    @property
    def key(self) -> str:
        """The name of the request of the present turn, as in `Answer`."""
        task, index = self.conversation.task, self.conversation.number
        return f"{task}/{index}/{self.turn}/{self.temperature}"

    @property
    def next_turn(self) -> Turn | None:
        """The present turn, or None after the last."""
        turns = self.conversation.turns
        return turns[self.turn] if self.turn < len(turns) else None

    @property
    def is_sparse(self) -> bool:
        """Whether `sparse_self` drafts for it."""
        return self.conversation.number < SPARSE_TASKS.get(self.conversation.task, 0)

    def begin_turn(self, turn: Turn, tokenizer: Tokenizer) -> GenerationRequest:
        """Return the request of the present turn."""
        self.prompt_ids, self.output_ids = turn.tokens, []
        if not turn.tokens:
            self.messages.append({"role": "user", "content": turn.message})
            self.prompt_ids = tuple(prompt_tokens(tokenizer, self.messages, turn.begun))
        sampling = SamplingParams(
            turn.max_tokens,
            seed_of(self.conversation.number, self.turn),
            self.temperature,
            stop=(*turn.stop, PLAIN_STOP),
            ignore_eos=bool(turn.tokens),
        )
        plan = SPARSE_DRAFTS if self.is_sparse else NO_DRAFTS
        return request_of(self.key, self.prompt_ids, turn, tokenizer, sampling, plan)

    def end_turn(self, turn: Turn, output_ids: Many[int], tokenizer: Tokenizer) -> None:
        """Add an answer to the messages."""
        text = tokenizer.decode(output_ids)
        for stop in (*turn.stop, PLAIN_STOP):
            text = text.partition(stop)[0]
        self.messages.append({"role": "assistant", "content": turn.begun + text.strip()})
        self.turn += 1


def seed_of(number: int, turn: int) -> int:
    """Return the seed of an answer, on which the drafts of a model depend as well."""
    return number + 1000 * turn


PLAIN_STOP: Final = "\n\nUser:"
"""Text that ends an answer of a model without a chat template."""


def prompt_tokens(tokenizer: Tokenizer, messages: Many[dict[str, str]], begun: str) -> list[int]:
    """Return the prompt of a conversation, as a plain dialogue for models without a template."""
    try:
        text = tokenizer.render_chat(messages)
    except RequestRejected:
        lines = [f"{message['role'].title()}: {message['content']}" for message in messages]
        return tokenizer.encode("\n\n".join([*lines, f"Assistant: {begun}".rstrip(" ")]))
    return tokenizer.encode(text + begun, add_special_tokens=False)


def request_of(
    key: str,
    prompt_ids: Many[int],
    turn: Turn,
    tokenizer: Tokenizer,
    sampling: SamplingParams,
    plan: SpeculationPlan = NO_DRAFTS,
) -> GenerationRequest:
    """Return the request of a turn, with its grammar and its prediction."""
    predicted = tokenizer.encode(turn.prediction, add_special_tokens=False)
    return GenerationRequest(
        key,
        compact(prompt_ids),
        sampling,
        plan,
        grammar=turn.grammar,
        prediction_ids=tuple(predicted),
    )


class SparseDrafts:
    """Keeps the drafts of a proposer that needs the worker's KV cache, and proposes nothing.

    Attributes:
        drafts: by request id, then by number of tokens before them.
    """

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self.drafts: dict[str, dict[str, Draft]] = {}

    def depth_s(self, sequences: int) -> float:
        """Return the cost per depth of the kept proposer, in seconds."""
        return self._proposer.depth_s(sequences)

    def catch_up_s(self, sequence: Sequence) -> float:
        """Return the catch-up cost of the kept proposer, in seconds."""
        return self._proposer.catch_up_s(sequence)

    def propose(self, requests: Many[DraftRequest]) -> list[Draft]:
        """Keep the drafts of the proposer, and return no drafts."""
        for request, draft in zip(requests, self._proposer.propose(requests), strict=True):
            sequence = request.sequence
            kept = self.drafts.setdefault(sequence.request.request_id, {})
            kept[str(len(sequence.token_ids))] = draft
        return [NO_DRAFT] * len(requests)

    def forget(self, sequence: Sequence) -> None:
        """Drop the proposer's state, but not its drafts."""
        self._proposer.forget(sequence)


def generate(
    engine: LoadedEngine, talks: Iterable[Talk], known: dict[str, Answer]
) -> Iterator[Answer]:
    """Run conversations without drafts, up to `STREAMS` at a time, and yield each new answer.

    Args:
        known: answers by key, which are not generated again.
    """
    worker = engine.worker
    assert isinstance(worker, WorkerCore)
    kept = SparseDrafts(engine.proposers["sparse_self"])
    engine.proposers["sparse_self"] = kept
    tokenizer, waiting, busy = worker.tokenizer, deque(talks), dict[str, Talk]()

    def submit(talk: Talk) -> bool:
        """Submit the next turn that has no answer, and return False if none is left."""
        while turn := talk.next_turn:
            key, request = talk.key, talk.begin_turn(turn, tokenizer)
            if key not in known:
                if len(talk.prompt_ids) > MOST_PROMPT_TOKENS and not turn.tokens:
                    return False
                busy[key] = talk
                worker.submit(request)
                return True
            talk.end_turn(turn, known[key].output_ids, tokenizer)
        return False

    def fill() -> None:
        while waiting and len(busy) < STREAMS:
            submit(waiting.popleft())

    fill()
    for step in run_until_idle(worker, engine.executor):
        for key, delta in step.deltas:
            talk = busy[key]
            talk.output_ids.extend(delta.token_ids)
            reason = delta.finish_reason
            if reason is None and not _is_loop(talk):
                continue
            worker.cancel(key)
            answer = _answer(talk, kept, ended=reason is FinishReason.STOP)
            yield answer
            turn = busy.pop(key).next_turn
            assert turn is not None
            talk.end_turn(turn, answer.output_ids, tokenizer)
            if not submit(talk):
                fill()


def _is_loop(talk: Talk) -> bool:
    turn, tokens = talk.next_turn, talk.output_ids
    if turn is None or turn.tokens or len(tokens) % LOOP_TOKENS:
        return False
    return len(tokens) - loop_start(tokens) > LOOP_TOKENS


def _answer(talk: Talk, kept: SparseDrafts, *, ended: bool) -> Answer:
    drafts = kept.drafts.pop(talk.key, {}) if talk.is_sparse else None
    return Answer(
        talk.conversation.task,
        talk.conversation.number,
        talk.turn,
        talk.temperature,
        talk.prompt_ids,
        tuple(talk.output_ids),
        ended,
        drafts
        if drafts is None
        else {at: (draft.evidence, draft.token_ids) for at, draft in drafts.items()},
    )


def read_answers(path: Path) -> dict[str, Answer]:
    """Return the answers of a file by key, or none without a file."""
    if not path.exists():
        return {}
    decoder = msgspec.json.Decoder(Answer)
    return {one.key: one for one in map(decoder.decode, path.read_bytes().splitlines())}


def save_answer(answer: Answer, lines: IO[bytes]) -> None:
    """Add an answer to a file, at once."""
    lines.write(msgspec.json.encode(answer) + b"\n")
    lines.flush()
