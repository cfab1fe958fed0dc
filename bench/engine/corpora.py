"""Measure what drafts from earlier outputs bring to structured output, tool calls and agents.

    python -m bench.engine.corpora MODEL --prompts FILE --json OUT [--dtype DTYPE]

The arms are `off`, `alone` (`auto` without drafts from earlier outputs) and `auto`. In each
round they run the same conversations on engines of their own, in turns of a fraction of a second
(`bench.engine.bound`). A stream runs the turns of a conversation one after another, and begins the
next conversation afterwards. In a cell, an arm keeps its tenant, so cached prefixes and earlier
outputs remain from round to round, and the first round begins with none. FILE has the chats.

Speed is output tokens per second of CPU time while all streams are busy, host work and prompts
included.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from bench.engine.bound import (
    Arm,
    cpu_config,
    learn_costs_from,
    model_parser,
    ratio_of,
    share_weights,
    take_turns,
)
from bench.engine.recorded_tasks import Turn, templated
from bench.harness.provenance import provenance
from draftgate.backends.core.pipeline import CompletedStep, run_until_idle
from draftgate.backends.engine.load import load_engine
from draftgate.backends.engine.loaded import LoadedEngine
from draftgate.backends.token_ids import compact
from draftgate.backends.types import GenerationRequest, SamplingParams, SpeculationOutcome
from draftgate.policies.types import RequestView

ARMS: Final = ("off", "alone", "auto")
WORKLOADS: Final = ("structured", "tool_calls", "agent")
CHATS: Final = "chats"
MOST_CHAT_TOKENS: Final = 64
SINGLE_CONVERSATIONS: Final = {"agent": 2}
STREAM_CONVERSATIONS: Final = {"agent": 1.0}
"""Conversations of a round with one stream (4 in other workloads), and for each stream of more
(2 in other workloads, whose conversations have a single turn)."""
CELLS: Final = ",".join(f"{name}:{n}" for name in (*WORKLOADS, CHATS) for n in (1, 16))
SYSTEM: Final = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

_cells = count()

Conversation = tuple[Turn, ...]


class Reply(NamedTuple):
    """A turn of a conversation: its number, the tokens of its prompt, and those of its output."""

    conversation: int
    prompt: list[int]
    output: list[int]


@dataclass
class Run:
    """An arm in a round, while all streams are busy, in seconds of CPU time.

    Attributes:
        tokens, total_s: output tokens, and all time.
        prompt_s, decode_s: time of the executor in steps with and without prompt tokens.
        decodes, decoded, rows: number of steps without prompt tokens, their output tokens and rows.
        replies: all turns, in order of completion.
        outcome: drafts of all turns.
    """

    tokens: int = 0
    total_s: float = 0.0
    prompt_s: float = 0.0
    decode_s: float = 0.0
    decodes: int = 0
    decoded: int = 0
    rows: int = 0
    replies: list[Reply] = field(default_factory=list)
    outcome: SpeculationOutcome = field(default_factory=SpeculationOutcome)

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.total_s

    @property
    def texts(self) -> list[list[int]]:
        """The output tokens of all turns of each conversation."""
        texts: dict[int, list[int]] = {}
        for reply in self.replies:
            texts.setdefault(reply.conversation, []).extend(reply.output)
        return [texts[number] for number in sorted(texts)]

    def add_step(self, step: CompletedStep) -> None:
        """Count a step."""
        tokens = sum(len(delta.token_ids) for _, delta in step.deltas)
        self.tokens += tokens
        if any(len(work.token_ids) > 1 for work in step.plan.work):
            self.prompt_s += step.result.step_s
            return
        self.decode_s += step.result.step_s
        self.decodes += 1
        self.decoded += tokens
        self.rows += sum(len(work.fed_ids) for work in step.plan.work)


class ConversationArm(Arm):
    """An arm whose streams run conversations."""

    def __init__(self, name: str, engine: LoadedEngine) -> None:
        super().__init__("off" if name == "off" else "auto", engine)
        self.name = name
        self._executor = engine.executor
        self._histories: dict[str, tuple[int, Conversation, int, list[int], int]] = {}

    def converse(
        self,
        conversations: list[Conversation],
        tenant: str,
        streams: int,
        temperature: float,
        runs: list[Run],
    ) -> Iterator[None]:
        """Run all conversations in a number of streams, yield after each step, and add the run."""
        waiting = list(enumerate(conversations))[::-1]
        run, started_s = Run(), 0.0
        begun: set[str] = set()
        for _ in range(streams):
            self._submit(*waiting.pop(), 0, [], tenant, temperature)
        for step in run_until_idle(self.worker, self._executor, self.now_s):
            if len(self._histories) == streams and len(begun) >= streams:
                run.add_step(step)
                run.total_s = self.now_s() - started_s
            for request_id, delta in step.deltas:
                begun.add(request_id)
                index, conversation, turn, history, begin = self._histories[request_id]
                history.extend(delta.token_ids)
                if delta.outcome is None:
                    continue
                run.replies.append(Reply(index, history[:begin], history[begin:]))
                run.outcome += delta.outcome
                del self._histories[request_id]
                if turn + 1 < len(conversation):
                    self._submit(index, conversation, turn + 1, history, tenant, temperature)
                elif waiting:
                    self._submit(*waiting.pop(), 0, [], tenant, temperature)
            if not run.tokens:
                started_s = self.now_s()
            yield
        runs.append(run)

    def _submit(
        self,
        index: int,
        conversation: Conversation,
        turn: int,
        history: list[int],
        tenant: str,
        temperature: float,
    ) -> None:
        worker, asked = self.worker, conversation[turn]
        if history and history[-1] in worker.tokenizer.encode("<|im_end|>"):
            history = history[:-1]  # the next turn begins with it
        before = "<|im_end|>\n" if turn else f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
        text = f"{before}<|im_start|>user\n{asked.message}<|im_end|>\n<|im_start|>assistant\n"
        tokens, most = history + list(worker.tokenizer.encode(text)), asked.max_tokens
        sampling = SamplingParams(most, seed=index, temperature=temperature)
        view = RequestView(len(tokens), most, temperature)
        request = GenerationRequest(
            f"{tenant}-{index}-{turn}",
            compact(tokens),
            sampling,
            self.rule.decide(view, worker.load()),
            tenant=tenant,
            grammar=asked.grammar,
            corpus=self.name == "auto",
        )
        live = index, conversation, turn, tokens, len(tokens)
        self._histories[request.request_id] = live
        worker.submit(request, self.now_s())


def profile_of(runs: list[Run]) -> dict[str, Any]:
    """Return where the time of an arm went, and what its drafts did."""
    tokens, total_s = sum(one.tokens for one in runs), sum(one.total_s for one in runs)
    prompt_s, decode_s = sum(one.prompt_s for one in runs), sum(one.decode_s for one in runs)
    decodes = max(1, sum(one.decodes for one in runs))
    return {
        "tokens_per_cpu_s": round(tokens / total_s, 1),
        "ms_per_token": round(1e3 * total_s / tokens, 3),
        "of_prompt_steps": round(1e3 * prompt_s / tokens, 3),
        "of_decode_steps": round(1e3 * decode_s / tokens, 3),
        "of_host": round(1e3 * (total_s - prompt_s - decode_s) / tokens, 3),
        "decode_step_ms": round(1e3 * decode_s / decodes, 2),
        "tokens_per_decode_step": round(sum(one.decoded for one in runs) / decodes, 2),
        "rows_per_decode_step": round(sum(one.rows for one in runs) / decodes, 2),
        "drafted": sum(one.outcome.num_drafted_tokens for one in runs),
        "accepted": sum(one.outcome.num_accepted_tokens for one in runs),
    }


def measure_cell(
    arms: list[ConversationArm], rounds: list[list[Conversation]], streams: int, temperature: float
) -> dict[str, Any]:
    """Return the row of a cell."""
    tenant = f"cell-{next(_cells)}"
    runs: dict[str, list[Run]] = {arm.name: [] for arm in arms}
    for each in rounds:
        take_turns(
            {arm: arm.converse(each, tenant, streams, temperature, runs[arm.name]) for arm in arms}
        )
    pairs = [
        pair
        for one, other in zip(runs["off"], runs["auto"], strict=True)
        for pair in zip(one.texts, other.texts, strict=True)
    ]
    return {
        "to_off": {
            name: ratio_of([one.speed for one in each], [one.speed for one in runs["off"]])
            for name, each in runs.items()
            if name != "off"
        },
        "arms": {name: profile_of(each) for name, each in runs.items()},
        "conversations": len(pairs),
        "different_texts": sum(one != other for one, other in pairs),
    }


def conversations(workload: str, file: Path) -> Iterator[Conversation]:
    """Yield different conversations of a workload."""
    if workload in WORKLOADS:
        yield from (one.turns for number in count() for one in templated(workload, 1, number))
    chats = [json.loads(line)["turns"] for line in file.read_text("utf-8").splitlines()]
    random.Random(1).shuffle(chats)
    for turns in chats:
        if len("".join(turns)) < 2000:
            yield (Turn(turns[0], MOST_CHAT_TOKENS),)


def main() -> None:
    """Run the benchmark."""
    parser = model_parser(__doc__)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--cells", default=CELLS)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    learn_costs_from(time.thread_time)
    torch.set_num_threads(1)
    cells = [cell.split(":") for cell in options.cells.split(",")]
    most = max([int(streams) for _, streams in cells])
    config = cpu_config(
        options.model, most, dtype=options.dtype, exact=options.exact, kv_bytes=512 << 20
    )
    names = options.arms.split(",")
    engines = [load_engine(config) for _ in names]
    arms = [ConversationArm(name, engine) for name, engine in zip(names, engines, strict=True)]
    share_weights(arms)
    facts = {**provenance(), "numerics_class": engines[0].served.card.numerics_class}
    sources = {workload: conversations(workload, options.prompts) for workload, _ in cells}
    rows: list[dict[str, Any]] = []
    for workload, number in cells:
        streams = int(number)
        each = STREAM_CONVERSATIONS.get(workload, 2.0)
        size = SINGLE_CONVERSATIONS.get(workload, 4) if streams == 1 else round(each * streams)
        rounds = [list(islice(sources[workload], size)) for _ in range(options.rounds)]
        cell = {"workload": workload, "streams": streams, "temperature": options.temperature}
        rows.append({**cell, **measure_cell(arms, rounds, streams, options.temperature)})
        print(rows[-1], flush=True)
        options.json.write_text(json.dumps({**facts, "cells": rows}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
