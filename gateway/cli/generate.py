"""`draftgate generate`, which runs one prompt on a worker in this process, without HTTP."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from typing import Final

import typer

from draftgate.backends.errors import BackendError
from draftgate.backends.token_ids import compact
from draftgate.backends.types import SamplingParams, SpeculationOutcome
from draftgate.gateway.app import StartError, build_node, start_workers
from draftgate.gateway.cli.options import fail
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.errors import GatewayError, InvalidRequest
from draftgate.gateway.loading import loading_shown
from draftgate.gateway.node import Node
from draftgate.policies.speculation.repetition import repetition

INTERRUPTED: Final = 130
"""Exit status after Ctrl-C, as in shells."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The prompt and the sampling parameters of the command."""

    prompt: str
    max_tokens: int
    temperature: float
    seed: int
    chat: bool


def run_generate(config: ServeConfig, sample: Sample) -> None:
    """Stream the text to stdout and print a summary to stderr.

    The process exits with status 1 and one line on stderr after an error.
    """
    try:
        asyncio.run(_generate(config, sample))
    except (StartError, BackendError, GatewayError) as error:
        fail(error)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


async def _generate(config: ServeConfig, sample: Sample) -> None:
    node = build_node(config)
    try:
        async with loading_shown(node, config):
            await start_workers(node)
        await _stream(node, sample)
    finally:
        await node.heartbeat.write_files()
        await node.fleet.stop()


async def _stream(node: Node, sample: Sample) -> None:
    tokenizer = node.served.tokenizer
    prompt = _decoded(sample.prompt)
    if sample.chat:
        prompt = tokenizer.render_chat([{"role": "user", "content": prompt}])
    ids = compact(tokenizer.encode(prompt, add_special_tokens=not sample.chat))
    sampling = SamplingParams(sample.max_tokens, sample.seed, sample.temperature)
    job = Job("generate", (ids,), sampling, sample.max_tokens, repetitions=(repetition(ids),))
    tokens, outcome, begin_s = 0, SpeculationOutcome(), time.perf_counter()
    async with node.dispatcher.run(job) as run:
        async for delta in run.deltas:
            typer.echo(delta.text, nl=False)
            tokens += len(delta.token_ids)
            outcome = delta.outcome or outcome
    seconds = time.perf_counter() - begin_s
    typer.echo()
    reason = run.holds[0].request.speculation.reason
    typer.echo(_summary(tokens, seconds, outcome, reason), err=True)


def _decoded(argument: str) -> str:
    """Return a command-line argument decoded as UTF-8, independent of the locale.

    Raises:
        InvalidRequest: the bytes of the argument are not valid UTF-8.
    """
    try:
        return os.fsencode(argument).decode()
    except UnicodeError:
        raise InvalidRequest("the prompt is not valid UTF-8", "prompt") from None


def _summary(tokens: int, seconds: float, outcome: SpeculationOutcome, reason: str) -> str:
    steps = outcome.num_spec_steps
    per_step = outcome.num_accepted_tokens / steps if steps else 0.0
    return (
        f"{tokens} tokens, {tokens / max(seconds, 1e-9):.1f} tok/s, "
        f"{outcome.num_drafted_tokens} drafted, {outcome.num_accepted_tokens} accepted, "
        f"{per_step:.2f} accepted per step ({reason})"
    )
