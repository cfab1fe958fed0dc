"""The servers that `draftgate bench cpu` compares, and their commands."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.harness.servers import SERVE
from draftgate.backends.checkpoints import SHIPPED_MODEL_ID
from draftgate.backends.engine.cpu_isa import isa_variables

DRAFT_TOKENS: Final = 4
"""Draft length of the fixed policies and of vLLM's n-gram speculation."""

VLLM_SPECULATION: Final[Mapping[str, Mapping[str, Any] | None]] = {
    "off": None,
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": DRAFT_TOKENS,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 5,
    },
    "suffix": {"method": "suffix", "num_speculative_tokens": 16},
}
"""The settings by name. The lookup lengths are those of vLLM's examples, and 16 tokens is the
longest draft of Draftgate."""

LLAMA_CPP_SPECULATION: Final = ("none", "ngram-simple", "ngram-mod")


class Family(StrEnum):
    """A program that serves models."""

    DRAFTGATE = "Draftgate"
    VLLM = "vLLM"
    LLAMA_CPP = "llama.cpp"


@dataclass(frozen=True, slots=True)
class Arm:
    """A server of the comparison.

    Attributes:
        setting: its speculation, which is unique within a family.
        command: the command without the address.
        variables: environment variables besides those of this process.
        ready_path: a path that is answered with 200 as soon as the server can generate.
    """

    family: Family
    setting: str
    command: tuple[str, ...]
    ready_path: str
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the arm."""
        return f"{self.family} {self.setting}"


@dataclass(frozen=True, slots=True)
class Serving:
    """What all servers have in common.

    Attributes:
        model: a checkpoint directory, or None for the shipped model.
        gguf: the GGUF file of llama.cpp's server, or None without one.
        dtype: the data type of Draftgate and vLLM.
        streams: the largest number of streams.
        context_tokens: the longest prompt and its output.
        kv_bytes: the KV memory of Draftgate and vLLM.
        threads: threads of each server.
        core: the core of the servers, or None.
        cache: a folder for caches of Draftgate.
        checkpoint: the checkpoint directory for vLLM, or None without one.
        quantization: how Draftgate quantises weights at load.
        isa: the instruction set to which Draftgate and vLLM are limited, or None.
    """

    model: Path | None
    gguf: Path | None
    dtype: str
    streams: int
    context_tokens: int
    kv_bytes: int
    core: int | None
    cache: Path
    threads: int = 1
    checkpoint: Path | None = None
    quantization: str = "auto"
    isa: str | None = None

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of all servers."""
        limits: dict[str, str] = {} if self.isa is None else isa_variables(self.isa)
        return {"OMP_NUM_THREADS": str(self.threads), **limits}


class Plan(NamedTuple):
    """The arms of a comparison, and the reason for each arm or family that is left out."""

    arms: list[Arm]
    skipped: dict[str, str]


def draftgate_arm(serving: Serving, policy: str, proposer: str | None = None) -> Arm:
    """Return a Draftgate server with a policy, and with all proposers or a single one."""
    only = () if proposer is None else ("--proposer", proposer)
    command = (
        *(*SERVE, str(serving.model or SHIPPED_MODEL_ID)),
        *("--device", "cpu", "--threads", str(serving.threads), "--dtype", serving.dtype),
        *("--max-model-len", str(serving.context_tokens), "--kv-bytes", str(serving.kv_bytes)),
        *("--max-num-seqs", str(serving.streams), "--log-level", "error"),
        *("--quantization", serving.quantization),
        *("--speculation", policy, *only),
    )
    # The first server measures its steps, and the others use its measurements.
    variables = {**serving.variables, "XDG_CACHE_HOME": str(serving.cache)}
    setting = policy if proposer is None else f"{policy} {proposer}"
    return Arm(Family.DRAFTGATE, setting, command, "/v1/models", variables)


def plan_arms(
    serving: Serving, proposers: Sequence[str], rivals: Path | None, *, full: bool
) -> Plan:
    """Return the arms besides `Draftgate off`, by family.

    Args:
        proposers: the proposers of the model.
        rivals: folder with `vllm/bin/vllm` and `llama/llama-server`, or None. For a limited
            instruction set, the latter is built for it, such as `llama-avx2/llama-server`.
        full: whether to include fixed drafts of each proposer, and all drafts of the rivals.
    """
    plan = Plan([draftgate_arm(serving, "auto")], {})
    if full:
        policy = f"fixed:{DRAFT_TOKENS}"
        plan.arms.extend(draftgate_arm(serving, policy, proposer) for proposer in proposers)
    checkpoint = serving.checkpoint
    if checkpoint is None or not checkpoint.is_dir():
        plan.skipped[Family.VLLM] = "the model is not a directory, and --checkpoint names none"
    elif (found := _found(rivals, "vllm/bin/vllm")) is None:
        plan.skipped[Family.VLLM] = _absent(rivals, "vllm/bin/vllm")
    else:
        settings = VLLM_SPECULATION if full else ("off", "ngram")
        plan.arms.extend(_vllm_arms(serving, found, checkpoint, settings))
    # The instruction set of llama.cpp is fixed when it is built.
    program = f"llama{f'-{serving.isa}' if serving.isa else ''}/llama-server"
    if serving.gguf is None:
        plan.skipped[Family.LLAMA_CPP] = "--gguf names no file of the model"
    elif (found := _found(rivals, program)) is None:
        plan.skipped[Family.LLAMA_CPP] = _absent(rivals, program)
    else:
        kinds = LLAMA_CPP_SPECULATION if full else ("none", "ngram-mod")
        plan.arms.extend(_llama_cpp_arms(serving, found, serving.gguf, kinds))
    return plan


def _found(rivals: Path | None, path: str) -> str | None:
    return None if rivals is None else shutil.which(str(rivals / path))


def _absent(rivals: Path | None, path: str) -> str:
    return "--rivals is not set" if rivals is None else f"--rivals has no program {path}"


def _vllm_arms(
    serving: Serving, program: str, folder: Path, settings: Iterable[str]
) -> Iterator[Arm]:
    cores = sorted(os.sched_getaffinity(0))[: serving.threads]
    if serving.core is not None:
        cores = [serving.core]
    variables = {
        **serving.variables,
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    for setting in settings:
        speculation = VLLM_SPECULATION[setting]
        given = () if speculation is None else ("--speculative-config", json.dumps(speculation))
        command = (
            *(program, "serve", str(folder), "--dtype", serving.dtype),
            *("--max-model-len", str(serving.context_tokens)),
            *("--kv-cache-memory-bytes", str(serving.kv_bytes)),
            *("--max-num-seqs", str(serving.streams), "--generation-config", "vllm", *given),
        )
        yield Arm(Family.VLLM, setting, command, "/health", variables)


def _llama_cpp_arms(
    serving: Serving, program: str, gguf: Path, kinds: Iterable[str]
) -> Iterator[Arm]:
    threads = str(serving.threads)
    # The server divides its context among the slots.
    context_tokens = str(serving.streams * serving.context_tokens)
    for setting in kinds:
        command = (
            *(program, "--model", str(gguf), "--threads", threads, "--threads-batch", threads),
            *("--parallel", str(serving.streams), "--ctx-size", context_tokens),
            *("--spec-type", setting, "--no-ui"),
        )
        yield Arm(Family.LLAMA_CPP, setting, command, "/health", serving.variables)


def in_groups(arms: Sequence[Arm], at_once: int) -> list[list[Arm]]:
    """Return groups of at most `at_once` arms, with the arms of a family spread over the groups."""
    count = ceil(len(arms) / at_once)
    return [list(arms[first::count]) for first in range(count)]


def alternating(items: Sequence[Arm], number: int) -> list[Arm]:
    """Return the items in the order of a round, which is reversed in every second round."""
    return list(items) if number % 2 == 0 else list(reversed(items))
