r"""Record the accepted draft length at every position of texts, for the simulator to replay.

    python -m bench.engine.acceptance --texts FILE --json draftgate-demo.json
    python -m bench.engine.acceptance --texts FILE --json NAME.json.gz \
        --model MODEL --spec-bench question.jsonl [--conversations N] [--record-only]

The first command records the shipped model on prompts of held-out code. The
second records another model on the first N conversations of each task in
`bench.engine.recorded_tasks`.

The model generates without drafts, so its texts do not depend on them. Each proposer then drafts at
every position, as `serve --record-acceptance` does, and the text shows how many tokens of each
draft were right. The simulator therefore finds a record for every draft length that a policy
chooses.

FILE keeps the tokens of the texts, for one model. A command that was interrupted continues from
there. After a change of a proposer, the command records the texts again without generating them
again. The recording has no tokens.
"""

from __future__ import annotations

import argparse
import gzip
import random
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from itertools import groupby
from pathlib import Path
from typing import Final

import torch
from msgspec.structs import replace

from bench.engine.recorded_tasks import Conversation, Turn, conversations
from bench.engine.recorded_texts import (
    STREAMS,
    Answer,
    Talk,
    generate,
    read_answers,
    request_of,
    save_answer,
    seed_of,
)
from bench.harness.loops import loop_start
from bench.harness.prompts import held_out_prompts
from bench.harness.provenance import provenance
from draftgate.backends.core.draft_recorder import DraftRecorder
from draftgate.backends.core.drafts import NO_DRAFT, PREDICTION, Draft
from draftgate.backends.core.proposer import DraftRequest, Proposer
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.core.worker import WorkerCore
from draftgate.backends.engine.load import load_engine
from draftgate.backends.engine.loaded import LoadedEngine
from draftgate.backends.engine.proposers.ngram import NgramProposer
from draftgate.backends.engine.proposers.prediction import PredictionProposer
from draftgate.backends.grammar import LlGrammars
from draftgate.backends.recording import SLOTS, Columns, RecordingFile, Text
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import Delta, FinishReason, SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from training.corpus import held_out_files

DEMO_TEMPERATURES: Final = (0.0, 0.8)
PROMPTS: Final = 32
SHOWN_TOKENS, BEGUN_TOKENS = 240, 40
LONG_PROMPTS: Final = 8
LONG_TOKENS: Final = 4_000
KV_BYTES: Final = 256 << 20
REWRITE: Final = "\n\n# The same, with names that say more:\n"
"""The prompts of the shipped model, and its KV memory."""

DEMO_POSITIONS: Final = 160
"""Recorded positions per text of the shipped model. Texts are longer, so that the last drafts can
be checked."""

LEAST_POSITIONS: Final = 24
"""Minimum number of recorded positions. N-grams predict a loop perfectly, so texts end before a
loop, and texts that loop earlier are left out."""

TEMPERATURES: Final = (0.0, 0.7, 1.0)

CONTEXT_TOKENS: Final = 4096
DEMO_CLASSES: Final = {
    "code": "completion",
    "interactive": "completion",
    "chat": "completion",
    "standard": "completion",
    "shared_prefix": "completion",
    "rag": "rewrite",
    "long_document": "long_context",
    "batch": "long_context",
    "*": "completion",
}
"""The task that a class of requests replays.

The choice compares the tokens per step of n-gram drafts, up to 8 tokens long, with prompt lookup in
a replay of texts by Llama-3.1-8B (2026-11-21). Chat has 1.63 tokens per step (ShareGPT: 1.67), and
code completion has 1.72. Retrieval has 2.5 (news: 1.56, code editing: 3.15), and quotations have
3.7."""

CLASSES: Final = {
    "code": "code_edit",
    "interactive": "chat",
    "chat": "chat",
    "standard": "chat",
    "rag": "rag",
    "shared_prefix": "agent",
    "long_document": "summary",
    "batch": "summary",
    "*": "chat",
}


class KeptDrafts:
    """Proposes the drafts that `SparseDrafts` kept."""

    def __init__(self, answers: Iterable[Answer]) -> None:
        self._answers = {answer.key: answer.sparse or {} for answer in answers}

    def depth_s(self, sequences: int) -> float:
        """Return 0, because the drafts exist."""
        return 0.0

    def catch_up_s(self, sequence: Sequence) -> float:
        """Return 0, because the drafts exist."""
        return 0.0

    def propose(self, requests: Many[DraftRequest]) -> list[Draft]:
        """Return the kept draft of each sequence, or an empty draft."""
        return [self._draft(request.sequence) for request in requests]

    def _draft(self, sequence: Sequence) -> Draft:
        kept = self._answers[sequence.request.request_id]
        evidence, tokens = kept.get(str(len(sequence.token_ids)), (0, ()))
        return Draft(tokens, evidence=evidence) if tokens else NO_DRAFT

    def forget(self, sequence: Sequence) -> None:
        """Do nothing, because the object has no state."""


def record(
    engine: LoadedEngine, answers: Many[Answer], of: Iterable[Conversation], *, trees: bool
) -> list[Text]:
    """Return the texts of answers, with the drafts of every proposer at every position.

    Args:
        of: the conversations of the answers.
        trees: whether n-gram drafts have branches.
    """
    by_place = {(one.task, one.number): one for one in of}

    def group(answer: Answer) -> tuple[str, float, bool, bool]:
        turn = by_place[answer.task, answer.index].turns[answer.turn]
        return answer.task, answer.temperature, answer.sparse is not None, bool(turn.prediction)

    texts = []
    for (_, _, sparse, predicted), found in groupby(sorted(answers, key=group), key=group):
        batch = list(found)
        proposers: dict[str, Proposer] = {"ngram": NgramProposer(trees=trees)}
        if "draft_model" in engine.proposers:
            proposers["draft_model"] = engine.proposers["draft_model"]
        if sparse:
            proposers["sparse_self"] = KeptDrafts(batch)
        if predicted:
            proposers[PREDICTION] = PredictionProposer()
        for begin in range(0, len(batch), STREAMS):
            texts += _record_batch(engine, batch[begin : begin + STREAMS], by_place, proposers)
    return sorted(texts, key=lambda text: (text.task, text.temperature, text.prompt))


def _record_batch(
    engine: LoadedEngine,
    answers: list[Answer],
    by_place: dict[tuple[str, int], Conversation],
    proposers: dict[str, Proposer],
) -> list[Text]:
    worker = engine.worker
    assert isinstance(worker, WorkerCore)
    tokenizer = worker.tokenizer
    recorder = DraftRecorder(proposers, grammars=LlGrammars(tokenizer, engine.served.card.eos_ids))
    for answer in answers:
        turn = by_place[answer.task, answer.index].turns[answer.turn]
        seed = seed_of(answer.index, answer.turn)
        sampling = SamplingParams(len(answer.output_ids), seed, answer.temperature)
        recorder.begin(request_of(answer.key, answer.prompt_ids, turn, tokenizer, sampling))
    ends = [
        (answer.key, Delta(0, answer.output_ids, "", finish_reason=FinishReason.STOP))
        for answer in answers
    ]
    texts = []
    for text in recorder.observe(ends):
        answer = answers[text.prompt]
        conversation = by_place[answer.task, answer.index]
        turn = conversation.turns[answer.turn]
        if cut := _cut(text, _recorded_tokens(answer)):
            held_out = conversation.held_out and not turn.tokens
            texts.append(replace(cut, task=answer.task, prompt=answer.index, held_out=held_out))
    return texts


def _recorded_tokens(answer: Answer) -> int:
    """Return the number of tokens up to the first of a loop, and before the end of a cut answer."""
    end = len(answer.output_ids) - (0 if answer.ended else SLOTS)
    return min(end, loop_start(answer.output_ids) + 1)


def _cut(text: Text, end: int) -> Text | None:
    """Return a text without its first position and its end, or None if little is left."""
    if end <= LEAST_POSITIONS:
        return None
    drafts = {
        name: Columns.from_guesses([text.guess(name, at) for at in range(1, end)])
        for name in sorted(text.drafts)
    }
    return replace(text, drafts=drafts)


def demo_prompts(tokenizer: Tokenizer) -> dict[str, list[tuple[int, ...]]]:
    """Return the prompts of the shipped model by task, identical in each call.

    The tasks are to complete code, to rewrite code of the prompt as an editor does, and to continue
    a long context.
    """
    shown = held_out_prompts(tokenizer, PROMPTS, seed=1, least=SHOWN_TOKENS, most=SHOWN_TOKENS)
    ask = tokenizer.encode(REWRITE)
    return {
        "completion": held_out_prompts(tokenizer, PROMPTS, least=100, most=240),
        "rewrite": [(*code, *ask, *code[:BEGUN_TOKENS]) for code in shown],
        "long_context": list(_long_prompts(tokenizer)),
    }


def _long_prompts(tokenizer: Tokenizer) -> Iterator[tuple[int, ...]]:
    files = list(held_out_files())
    random.Random(2).shuffle(files)
    for _ in range(LONG_PROMPTS):
        tokens: list[int] = []
        while len(tokens) < LONG_TOKENS:
            tokens += tokenizer.encode(files.pop().read_text(encoding="utf-8", errors="ignore"))
        yield tuple(tokens[:LONG_TOKENS])


def demo_conversations(tokenizer: Tokenizer) -> list[Conversation]:
    """Return the held-out prompts of the shipped model."""
    tokens = DEMO_POSITIONS + SLOTS + 1
    return [
        Conversation(task, index, (Turn("", tokens, tokens=prompt),))
        for task, prompts in demo_prompts(tokenizer).items()
        for index, prompt in enumerate(prompts)
        if index % 2
    ]


def as_file(texts: list[Text], classes: dict[str, str]) -> RecordingFile:
    """Return the recording in the simulator's form."""
    facts = provenance()
    keys = ("command", "commit", "device", "torch", "date")
    return RecordingFile(
        format="acceptance/2",
        source="; ".join(f"{key}: {facts[key]}" for key in keys),
        slots=SLOTS,
        classes=classes,
        texts=tuple(texts),
    )


def load(model: str | None) -> LoadedEngine:
    """Return the engine of a model, with one thread, or that of the shipped model."""
    torch.set_num_threads(1)
    config = WorkerConfig(
        speculation=f"fixed:{SLOTS}", kv_bytes=KV_BYTES, max_num_seqs=8, device="cpu", threads=1
    )
    if model is None:
        return load_engine(config)
    return load_engine(
        replace(
            config,
            model=model,
            dtype="bfloat16",
            kv_bytes=8 * KV_BYTES,
            max_num_seqs=STREAMS,
            max_model_len=CONTEXT_TOKENS,
        )
    )


def main() -> None:
    """Generate the missing texts, record all texts, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--model")
    parser.add_argument("--spec-bench", type=Path)
    parser.add_argument("--conversations", type=int, default=80)
    parser.add_argument("--record-only", action="store_true", help="generate no further text")
    options = parser.parse_args()
    if (options.model is None) != (options.spec_bench is None):
        parser.error("--model needs --spec-bench, and only another model needs it")
    engine = load(options.model)
    worker = engine.worker
    assert isinstance(worker, WorkerCore)
    demo = options.model is None
    if demo:
        asked = demo_conversations(worker.tokenizer)
    else:
        asked = conversations(options.spec_bench, options.conversations)
    temperatures = DEMO_TEMPERATURES if demo else TEMPERATURES
    talks = [Talk(one, temperature) for one in asked for temperature in temperatures]
    # Prompts are cached for the next temperature, and drafts of `sparse_self` take the most time.
    talks.sort(key=lambda talk: (talk.is_sparse, talk.conversation.number, talk.temperature))
    known = read_answers(options.texts)
    with options.texts.open("ab") as lines:
        for answer in generate(engine, () if options.record_only else talks, known):
            save_answer(answer, lines)
            known[answer.key] = answer
    wanted = {(one.task, one.number) for one in asked}
    answers = [one for one in known.values() if (one.task, one.index) in wanted]
    # Chains in the older recording of the shipped model, because a worker drafted chains then.
    texts = record(engine, answers, asked, trees=not demo)
    content = as_file(texts, DEMO_CLASSES if demo else CLASSES).encode()
    options.json.parent.mkdir(parents=True, exist_ok=True)
    compressed = options.json.suffix == ".gz"
    options.json.write_bytes(gzip.compress(content, mtime=0) if compressed else content)


if __name__ == "__main__":
    main()
