"""Compare Draftgate with vLLM and llama.cpp on a CPU: tokens/s, CPU time and memory, in one run.

    draftgate bench cpu MODEL --rivals DIR --json OUT

MODEL is a GGUF file or a checkpoint directory, by default the shipped model. llama.cpp's server
needs the same model as a GGUF file (`--gguf`) and vLLM as a directory (`--checkpoint`), if MODEL is
not already one. DIR has the programs `llama/llama-server` and `vllm/bin/vllm`.

The arms are `off` and `auto` of Draftgate, and both rivals without and with n-gram drafts. With
`--full`, they are also fixed drafts of each proposer of the model, and further drafts of the
rivals. An arm whose program is absent or does not start is skipped and named.

All servers have `--threads` threads. With a single thread they share a core, and the client has
another core. Only one server has requests at a time. In each turn, the servers of a group run the
requests of a cell back to back. A cell has a number of streams and a temperature, or a length of
prompts whose output is a single token. Each stream sends its next request after the previous
response. The prompts are token ids, every output has the same number of tokens, and no prompt
occurs twice. The order reverses from round to round.

At most `--at-once` servers run besides `Draftgate off`, which runs in every group. Ratios are to
its run in the same turn. CPU time and memory of a server include all its processes. On a busy
machine, only tokens per CPU second are comparable, not tokens/s and latencies.

`--prompts` has a JSON object per line, whose `turns` begin with a user's message, as in Spec-Bench.
The default are messages of the same kinds, or held-out code for a model without a chat template.
`--isa avx2` limits Draftgate and vLLM to this instruction set. llama.cpp has to be built for it, as
`llama-avx2/llama-server` in DIR.

The results are written after every turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final, NoReturn

import uvloop

from bench.cpu.arms import (
    Arm,
    Plan,
    Serving,
    alternating,
    draftgate_arm,
    in_groups,
    plan_arms,
)
from bench.cpu.chats import chats
from bench.cpu.measure import (
    WARM_REQUESTS,
    Contender,
    Prompt,
    Sessions,
    Turn,
    chat_tokens,
    model_facts,
    requests_of,
    warm_up,
    windows,
)
from bench.cpu.report import Cell, Run, summary, tables
from bench.cpu.servers import RunningServers
from bench.harness.processes import Cores, on_core, two_cores
from bench.harness.prompts import held_out_windows
from bench.harness.provenance import (
    BUSY_LIMIT,
    bench_parser,
    busy_share,
    cpu_name,
    simulated_provenance,
)
from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.engine.cpu_isa import ISAS

FORMAT: Final = "cpu/1"
CONTEXT_STEP_TOKENS: Final = 256
DRAFT_ROOM_TOKENS: Final = 64
"""Context for drafts beyond the end of an output. llama.cpp's n-grams draft up to 64 tokens."""

CHATS: Final = 512
HELD_OUT: Final = 512
HELD_OUT_CHARACTERS: Final = (120, 750)


class Comparison:
    """The arms of a run, their turns and results."""

    def __init__(
        self,
        args: argparse.Namespace,
        serving: Serving,
        servers: RunningServers,
        sessions: Sessions,
    ) -> None:
        self._args = args
        self._serving = serving
        self._servers = servers
        self._sessions = sessions
        self._reference = draftgate_arm(serving, "off")
        self._plan = Plan([], {})
        self._facts: dict[str, Any] = {}
        self._runs: list[Run] = []
        self._prompts: Iterator[Prompt] = iter(())
        self._parts: Iterator[Prompt] = iter(())
        self._warm_prompts: list[Prompt] = []
        self._ends_s = time.monotonic() + 60 * args.minutes

    @property
    def cells(self) -> list[Cell]:
        """The cells of a round, with the shortest first."""
        outputs = [Cell(t, n) for n in self._args.streams for t in self._args.temperatures]
        return [*outputs, *(Cell(0.0, 1, tokens) for tokens in self._args.prefill)]

    async def run(self, head: dict[str, Any]) -> None:
        """Run all rounds, and write the results after each turn."""
        reference = await self._contender(self._reference)
        assert reference is not None
        listed = await model_facts(reference.client.session, reference.client.url)
        self._plan = plan_arms(
            self._serving,
            listed["proposers"],
            self._args.rivals,
            full=self._args.full,
        )
        if self._args.only:
            self._plan.arms[:] = [arm for arm in self._plan.arms if arm.name in self._args.only]
        found, parts = await self._read_prompts(reference, chat=listed["chat"])
        self._prompts, self._parts = iter(found), iter(parts)
        self._warm_prompts = [next(self._prompts) for _ in range(WARM_REQUESTS)]
        await self._warm(reference)
        rounds = range(self._args.rounds)
        prompts = [{cell: self._prompts_of(cell) for cell in self.cells} for _ in rounds]
        groups = list(enumerate(in_groups(self._plan.arms, self._args.at_once)))
        for number in rounds:
            for group, arms in groups if number % 2 == 0 else groups[::-1]:
                if time.monotonic() > self._ends_s:
                    print(f"round {number}, group {group}: no time left", flush=True)
                    continue
                contenders = await self._start_group(arms)
                for cell in self.cells:
                    if time.monotonic() > self._ends_s:
                        break
                    tokens = 1 if cell.prompt_tokens else self._args.tokens
                    turn = Turn(number, group, cell, prompts[number][cell], tokens)
                    await self._run_turn(turn, contenders, reference)
                    self._write(head)

    def _prompts_of(self, cell: Cell) -> list[Prompt]:
        """Return prompts for the requests of a cell, which no other cell gets."""
        count = requests_of(cell)
        if not cell.prompt_tokens:
            return [next(self._prompts) for _ in range(count)]
        parts: list[Prompt] = []
        while sum(map(len, parts)) < count * cell.prompt_tokens:
            parts.append(next(self._parts))
        return windows(parts, cell.prompt_tokens, count)

    async def _start_group(self, arms: Sequence[Arm]) -> dict[str, Contender]:
        self._servers.keep([self._reference, *arms])
        found = {}
        for arm in [self._reference, *arms]:
            if (contender := await self._contender(arm)) is not None:
                found[arm.name] = contender
        return found

    async def _contender(self, arm: Arm) -> Contender | None:
        """Return the client of an arm, whose server starts and warms up if it does not run."""
        began_s = time.monotonic()
        server = self._servers.run(arm)
        if server is None:
            print(f"{arm.name} is skipped: {self._servers.failed[arm.name]}", flush=True)
            return None
        contender, is_new = await self._sessions.contender(arm, server)
        if is_new:
            self._facts[arm.name] = await contender.facts()
            await self._warm(contender)
            print(f"{arm.name} is ready after {time.monotonic() - began_s:.0f} s", flush=True)
        return contender

    async def _warm(self, contender: Contender) -> None:
        await warm_up(contender, self._warm_prompts, self._args.temperatures)

    async def _run_turn(
        self, turn: Turn, contenders: dict[str, Contender], reference: Contender
    ) -> None:
        arms = alternating([one.arm for one in contenders.values()], turn.round)
        order = [contenders[arm.name] for arm in arms]
        runs, failed = await turn.run(order, reference, list(self._servers.servers.values()))
        self._runs.extend(runs)
        for name, reason in failed.items():
            print(f"{name} failed {reason}", flush=True)
            del contenders[name]
            self._servers.fail(name, reason)
        rates = ", ".join(f"{run.arm} {run.tokens_per_cpu_s:.0f}" for run in runs)
        print(f"round {turn.round}, {turn.cell.label}: tokens per CPU second {rates}", flush=True)

    async def _read_prompts(
        self, reference: Contender, *, chat: bool
    ) -> tuple[list[Prompt], list[Prompt]]:
        """Return distinct prompts of at most `--prompt-tokens` tokens in shuffled order.

        Returns:
            The prompts to send, and further prompts that are the parts of timed ones.

        Raises:
            SystemExit: there are too few of them.
        """
        args = self._args
        if args.prompts is not None:
            texts = _messages(args.prompts)
        else:
            texts = chats(CHATS, args.seed) if chat else _held_out_texts()
        texts = list(dict.fromkeys(texts))
        random.Random(args.seed).shuffle(texts)
        outputs = [cell for cell in self.cells if not cell.prompt_tokens]
        needed = WARM_REQUESTS + args.rounds * sum(map(requests_of, outputs))
        # A timed prompt begins with a new part, and cuts its last one.
        timed = [cell for cell in self.cells if cell.prompt_tokens]
        timed_tokens = args.rounds * sum(cell.prompt_tokens + args.prompt_tokens for cell in timed)
        found: list[Prompt] = []
        parts: list[Prompt] = []
        parts_tokens = 0
        for text in texts:
            tokens = await chat_tokens(reference, text, chat=chat)
            if len(tokens) > args.prompt_tokens:
                continue
            if len(found) < needed:
                found.append(tokens)
            elif parts_tokens < timed_tokens:
                parts.append(tokens)
                parts_tokens += len(tokens)
            else:
                break
        if len(found) == needed and parts_tokens >= timed_tokens:
            return found, parts
        raise SystemExit(
            f"the run needs {needed} prompts and others with {timed_tokens} tokens together, of at "
            f"most {args.prompt_tokens} tokens each, but there are {len(found)} and others with "
            f"{parts_tokens}: use fewer rounds, or more --prompt-tokens"
        )

    def _names(self) -> list[str]:
        return [self._reference.name, *(arm.name for arm in self._plan.arms)]

    def _write(self, head: dict[str, Any]) -> None:
        results = self.results(head)
        if self._args.json is None:
            return
        content = json.dumps({**results, "columns": Run._fields}, indent=1)
        rows = ",\n".join(f"  {json.dumps(run)}" for run in self._runs)
        part = self._args.json.with_suffix(".part")
        part.write_text(f'{content[:-2]},\n "runs": [\n{rows}\n ]\n}}\n', encoding="utf-8")
        part.replace(self._args.json)

    def results(self, head: dict[str, Any]) -> dict[str, Any]:
        """Return the results so far as JSON values."""
        commands = [self._reference, *self._plan.arms]
        return {
            **head,
            "skipped": {**self._plan.skipped, **self._servers.failed},
            "servers": {
                arm.name: {"command": _shown(arm), **self._facts.get(arm.name, {})}
                for arm in commands
            },
            "cells": summary(self._runs, self._names(), self._reference.name),
        }


def _shown(arm: Arm) -> str:
    """Return the command of an arm without the folders of this machine."""
    return " ".join(Path(word).name if word.startswith("/") else word for word in arm.command)


def _messages(path: Path) -> list[str]:
    return [json.loads(line)["turns"][0] for line in path.read_text("utf-8").splitlines()]


def _held_out_texts() -> list[str]:
    """Return windows of held-out code, of 40 to 240 tokens of the shipped model."""
    rng = random.Random(0)
    windows = islice(held_out_windows(rng), HELD_OUT)
    return [window[: rng.randint(*HELD_OUT_CHARACTERS)] for window in windows]


async def compare(
    args: argparse.Namespace, serving: Serving, servers: RunningServers, head: dict[str, Any]
) -> list[str]:
    """Run the comparison, and return the lines of the report."""
    async with Sessions() as sessions:
        comparison = Comparison(args, serving, servers, sessions)
        await comparison.run(head)
    results = comparison.results(head)
    skipped = [f"skipped: {name}: {reason}" for name, reason in results["skipped"].items()]
    return [*tables(results["cells"], "Draftgate off"), "", *skipped]


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("field", __doc__)
    add = parser.add_argument
    add("model", nargs="?", type=Path, help="GGUF file or checkpoint directory")
    add("--rivals", type=Path, help="folder with llama/llama-server and vllm/bin/vllm")
    add("--gguf", type=Path, help="the model for llama.cpp's server (default: MODEL)")
    add("--checkpoint", type=Path, help="the model for vLLM (default: MODEL)")
    add("--full", action="store_true", help="also measure fixed drafts, and others of the rivals")
    add("--prompts", type=Path, help="JSON lines with `turns` (default: made from templates)")
    add("--markdown", type=Path, help="write the tables to this file")
    add("--dtype", default="auto", help="data type of Draftgate and vLLM")
    add("--quantization", default="auto", help="how Draftgate quantises weights at load")
    add("--threads", type=int, default=1, help="threads of each server")
    add("--isa", choices=tuple(ISAS), help="limit all servers to this instruction set")
    add("--streams", nargs="+", type=int, default=[1, 4, 16])
    add("--temperatures", nargs="+", type=float, default=[0.0])
    add("--prefill", nargs="*", type=int, default=[512, 4000], help="lengths of timed prompts")
    add("--tokens", type=int, default=64, help="output tokens of each request")
    add("--prompt-tokens", type=int, default=256, help="longest prompt")
    add("--rounds", type=int, default=2)
    add("--minutes", type=float, default=60.0, help="begin no turn after this time")
    add("--at-once", type=int, default=3, help="servers that run besides `Draftgate off`")
    add("--cache", type=Path, help="keep Draftgate's measurements here (default: measure again)")
    add("--kv-bytes", type=int, default=512 << 20, help="KV memory of Draftgate and vLLM")
    add("--only", action="append", help="measure only this arm besides `Draftgate off`; repeatable")
    add("--seed", type=int, default=0, help="seed of the order of the prompts")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench cpu`."""
    args = _parser().parse_args(arguments)
    outputs = args.prompt_tokens + args.tokens
    longest_tokens = max(outputs, *(tokens + 1 for tokens in args.prefill)) + DRAFT_ROOM_TOKENS
    folder = SHIPPED_MODEL if args.model is None else args.model
    checkpoint = args.checkpoint or (folder if folder.is_dir() else None)
    gguf = args.gguf or (folder if folder.is_file() else None)
    busy = busy_share()
    head: dict[str, Any] = {
        "format": FORMAT,
        **simulated_provenance("cpu", arguments),
        "device": cpu_name(),
        "busy_share_before": round(busy, 3),
        "disturbed": busy > BUSY_LIMIT,
        "model": "shipped" if args.model is None else args.model.name,
        "dtype": args.dtype,
        "quantization": args.quantization,
        "gguf": None if gguf is None else gguf.name,
        "threads": args.threads,
        "isa": args.isa,
        "tokens": args.tokens,
        "prompt_tokens": args.prompt_tokens,
    }
    # The default action for SIGTERM would end this process without its servers. The event loop
    # would notice Ctrl-C only after the start of a server, which takes minutes.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    cores = two_cores() if args.threads == 1 else Cores(None, None)
    with (
        tempfile.TemporaryDirectory() as scratch,
        RunningServers(Path(scratch), cores.servers) as servers,
        on_core(cores.clients),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        serving = Serving(
            model=args.model,
            gguf=gguf,
            dtype=args.dtype,
            streams=max(args.streams),
            context_tokens=-(-longest_tokens // CONTEXT_STEP_TOKENS) * CONTEXT_STEP_TOKENS,
            kv_bytes=args.kv_bytes,
            core=cores.servers,
            cache=args.cache or Path(scratch),
            threads=args.threads,
            checkpoint=checkpoint,
            quantization=args.quantization,
            isa=args.isa,
        )
        lines = runner.run(compare(args, serving, servers, head))
    report = "\n".join(lines)
    print(report)
    if args.markdown is not None:
        args.markdown.write_text(report + "\n", encoding="utf-8")


def _end(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
