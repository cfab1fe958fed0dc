"""The servers of the study: ours, the floors, the rivals; how each is started and asked."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from bench.edge import wire
from bench.harness.processes import free_port
from draftgate.backends.registry import backend_names

INSTANT: Final = Path(__file__).parents[1] / "harness" / "instant.json"
"""A device whose steps take no time: what is left is the edge, and the scheduler behind it."""

_OURS: Final = (sys.executable, "-m", "draftgate", "serve")
_MOCK: Final = (sys.executable, "-m", "bench.edge.mock")

PACE_MS: Final = 5.0
"""Between the chunks of a paced stream: faster than a reader needs, and yet each chunk is read and
written by itself, as in life. 16 such streams are too many for the slowest proxy alone."""


_LITELLM: Final = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # nobody has keys here
}


class Kind(StrEnum):
    """Where a target's tokens come from."""

    DIRECT = "direct"  # the mock itself, on the client's core
    NO_EDGE = "no edge"  # the simulated worker, asked by nobody over HTTP
    IN_PROCESS = "in process"
    PROXY = "proxy"


@dataclass(frozen=True, slots=True)
class Target:
    """A server to measure.

    Attributes:
        command: without its port; None for the mock that runs anyway.
        port_flag: how the port is given.
        paced_command: of a second server where the pace is the server's, not the request's.
        variables: of its environment.
    """

    name: str
    kind: Kind
    command: tuple[str, ...] | None
    port_flag: str = "--port"
    paced_command: tuple[str, ...] | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


def _ours(*flags: str) -> tuple[str, ...]:
    shared = ("--served-model-name", wire.MODEL, "--speculation", "off", "--log-level", "warning")
    return (*_OURS, *shared, *flags)


def paced_profile(folder: Path) -> Path:
    """Write the profile of a device that takes `PACE_MS` a step; return its path."""
    paced = folder / "paced.json"
    profile = json.loads(INSTANT.read_text(encoding="utf-8"))
    paced.write_text(json.dumps(profile | {"step_s": [PACE_MS / 1e3] * 2}), encoding="utf-8")
    return paced


def in_process(folder: Path) -> list[Target]:
    """Return the servers that make their tokens themselves.

    Args:
        folder: for the profile of a device that takes `PACE_MS` a step.
    """
    sim = ("--backend", "sim", "--profile")
    return [
        Target("mock", Kind.DIRECT, None),
        Target("bare handler", Kind.IN_PROCESS, _MOCK),
        Target(
            "draftgate sim",
            Kind.IN_PROCESS,
            _ours(*sim, str(INSTANT)),
            paced_command=_ours(*sim, str(paced_profile(folder))),
        ),
    ]


def proxies(upstream: str) -> list[Target]:
    """Return ours and the floor of a proxy, both in front of an upstream."""
    found = [Target("bare proxy", Kind.PROXY, (*_MOCK, "--upstream", upstream))]
    if "openai" in backend_names():
        ours = _ours("--backend", "openai", "--upstream", upstream)
        found.append(Target("draftgate proxy", Kind.PROXY, ours))
    return found


def rivals(environments: Path, upstream: str, folder: Path) -> Iterator[Target]:
    """Yield the rivals that are installed, each in the environment of its name.

    Args:
        environments: as `python -m bench.edge.rivals` makes them.
        folder: for their configuration.
    """
    for name, flags in _flags(upstream, folder).items():
        program = environments / name / "bin" / name
        if program.is_file():
            variables = _LITELLM if name == "litellm" else {}
            yield Target(name, Kind.PROXY, (str(program), *flags), variables=variables)


def _flags(upstream: str, folder: Path) -> dict[str, Sequence[str]]:
    litellm = folder / "litellm.yaml"
    route = {"model": f"openai/{wire.MODEL}", "api_base": f"{upstream}/v1", "api_key": "none"}
    models = [{"model_name": wire.MODEL, "litellm_params": route}]
    litellm.write_text(json.dumps({"model_list": models}), encoding="utf-8")  # JSON is YAML
    router = ("--worker-urls", upstream, "--policy", "round_robin", "--host", "127.0.0.1")
    quiet = ("--log-level", "error", "--prometheus-port")
    return {
        "litellm": ("--config", str(litellm), "--host", "127.0.0.1", "--num_workers", "1"),
        "vllm-router": (*router, *quiet, str(free_port())),
        "sglang-router": ("launch", *router, *quiet, str(free_port())),
    }
