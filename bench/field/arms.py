"""The servers that `draftgate bench field` compares, and their commands."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.harness.servers import SERVE
from draftgate.backends.checkpoints import SHIPPED_MODEL

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
        core: the core of the servers, or None.
        scratch: a folder for caches.
    """

    model: Path | None
    gguf: Path | None
    dtype: str
    streams: int
    context_tokens: int
    kv_bytes: int
    core: int | None
    scratch: Path


class Plan(NamedTuple):
    """The arms of a comparison, and the reason for each arm or family that is left out."""

    arms: list[Arm]
    skipped: dict[str, str]


def draftgate_arm(serving: Serving, policy: str, proposer: str | None = None) -> Arm:
    """Return a Draftgate server with a policy, and with all proposers or a single one."""
    only = () if proposer is None else ("--proposer", proposer)
    command = (
        *(*SERVE, *(() if serving.model is None else (str(serving.model),))),
        *("--device", "cpu", "--threads", "1", "--dtype", serving.dtype),
        *("--max-model-len", str(serving.context_tokens), "--kv-bytes", str(serving.kv_bytes)),
        *("--max-num-seqs", str(serving.streams), "--log-level", "error"),
        *("--speculation", policy, *only),
    )
    # The first server measures its steps, and the others use its measurements.
    variables = {**_ONE_THREAD, "XDG_CACHE_HOME": str(serving.scratch / "cache")}
    setting = policy if proposer is None else f"{policy} {proposer}"
    return Arm(Family.DRAFTGATE, setting, command, "/v1/models", variables)


def plan_arms(
    serving: Serving, proposers: Sequence[str], *, vllm: str | None, llama_server: str | None
) -> Plan:
    """Return the arms besides `Draftgate off`, by family.

    Args:
        proposers: the proposers of the model.
        vllm, llama_server: commands or paths of the rivals, or None.
    """
    plan = Plan([draftgate_arm(serving, "auto")], {})
    policy = f"fixed:{DRAFT_TOKENS}"
    plan.arms.extend(draftgate_arm(serving, policy, proposer) for proposer in proposers)
    found, folder = shutil.which(vllm) if vllm else None, serving.model or SHIPPED_MODEL
    if found is None:
        plan.skipped[Family.VLLM] = _absent("--vllm", vllm)
    elif not folder.is_dir():
        plan.skipped[Family.VLLM] = "the model is not a directory"
    else:
        plan.arms.extend(_vllm_arms(serving, found, folder))
    found = shutil.which(llama_server) if llama_server else None
    if found is None:
        plan.skipped[Family.LLAMA_CPP] = _absent("--llama-server", llama_server)
    elif serving.gguf is None:
        plan.skipped[Family.LLAMA_CPP] = "--gguf names no file of the model"
    else:
        plan.arms.extend(_llama_cpp_arms(serving, found, serving.gguf))
    return plan


_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1"}


def _absent(option: str, given: str | None) -> str:
    return f"{option} is not set" if given is None else f"{option}: {given} is not executable"


def _vllm_arms(serving: Serving, program: str, folder: Path) -> Iterator[Arm]:
    variables = {
        **_ONE_THREAD,
        "VLLM_CPU_OMP_THREADS_BIND": "0" if serving.core is None else str(serving.core),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    for setting, speculation in VLLM_SPECULATION.items():
        given = () if speculation is None else ("--speculative-config", json.dumps(speculation))
        command = (
            *(program, "serve", str(folder), "--dtype", serving.dtype),
            *("--max-model-len", str(serving.context_tokens)),
            *("--kv-cache-memory-bytes", str(serving.kv_bytes)),
            *("--max-num-seqs", str(serving.streams), "--generation-config", "vllm", *given),
        )
        yield Arm(Family.VLLM, setting, command, "/health", variables)


def _llama_cpp_arms(serving: Serving, program: str, gguf: Path) -> Iterator[Arm]:
    # The server divides its context among the slots.
    context_tokens = str(serving.streams * serving.context_tokens)
    for setting in LLAMA_CPP_SPECULATION:
        command = (
            *(program, "--model", str(gguf), "--threads", "1", "--threads-batch", "1"),
            *("--parallel", str(serving.streams), "--ctx-size", context_tokens),
            *("--spec-type", setting, "--no-ui"),
        )
        yield Arm(Family.LLAMA_CPP, setting, command, "/health", _ONE_THREAD)


def in_groups(arms: Sequence[Arm], at_once: int) -> list[list[Arm]]:
    """Return groups of at most `at_once` arms, with the arms of a family spread over the groups."""
    count = ceil(len(arms) / at_once)
    return [list(arms[first::count]) for first in range(count)]


def alternating(items: Sequence[Arm], number: int) -> list[Arm]:
    """Return the items in the order of a round, which is reversed in every second round."""
    return list(items) if number % 2 == 0 else list(reversed(items))
