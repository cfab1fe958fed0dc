"""The measured servers: Draftgate, the minimal servers and the compared gateways."""

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
"""A device whose steps take no time, so that only edge and scheduler take time."""

_SERVE: Final = (sys.executable, "-m", "draftgate", "serve")
_MOCK: Final = (sys.executable, "-m", "bench.edge.mock")

PACE_MS: Final = 5.0
"""Milliseconds between the chunks of a paced stream. The pace is faster than a reader needs, but
slow enough that each chunk is read and written separately, as in production. Only the slowest
proxy falls behind with 16 such streams."""


_LITELLM: Final = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # requests have no API keys
}


class Kind(StrEnum):
    """The source of the tokens of a target."""

    DIRECT = "direct"  # the mock, on the client's core
    NO_EDGE = "no edge"  # the simulated worker, without HTTP
    IN_PROCESS = "in process"
    PROXY = "proxy"


@dataclass(frozen=True, slots=True)
class Target:
    """A server to measure.

    Attributes:
        command: command line without the port, or None for the mock, which always runs.
        port_flag: option that sets the port.
        paced_command: command of a second server, if the pace is set per server, not per request.
        variables: environment variables of the server.
    """

    name: str
    kind: Kind
    command: tuple[str, ...] | None
    port_flag: str = "--port"
    paced_command: tuple[str, ...] | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


def _draftgate_command(*flags: str, log_level: str = "warning") -> tuple[str, ...]:
    shared = ("--served-model-name", wire.MODEL, "--speculation", "off", "--log-level", log_level)
    return (*_SERVE, *shared, *flags)


def _with_features(
    name: str, kind: Kind, flags: Sequence[str], folder: Path, upstream: str
) -> Target:
    """Return Draftgate with keys, quotas, a log line per request and traces of 1% of requests.

    Args:
        upstream: URL of the mock, which also takes the traces.
    """
    keys = folder / "keys.yaml"
    limits = {"requests_per_minute": 10**7, "tokens_per_minute": 10**10}
    keys.write_text(json.dumps({"keys": [{"name": "edge", "key": wire.KEY, **limits}]}))
    keys.chmod(0o600)
    features = ("--api-keys-file", str(keys), "--otlp-endpoint", upstream)
    command = _draftgate_command(*features, *flags, log_level="info")
    variables = {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.01"}
    return Target(name, kind, command, variables=variables)


def paced_profile(folder: Path) -> Path:
    """Write the profile of a device that takes `PACE_MS` per step, and return its path."""
    paced = folder / "paced.json"
    profile = json.loads(INSTANT.read_text(encoding="utf-8"))
    paced.write_text(json.dumps(profile | {"step_s": [PACE_MS / 1e3] * 2}), encoding="utf-8")
    return paced


SEVERAL: Final = (2, 4)
"""Numbers of processes that are measured in addition to a single process."""


def in_process(folder: Path, upstream: str) -> list[Target]:
    """Return the servers that generate their tokens in process.

    Args:
        folder: folder for the profile of a device that takes `PACE_MS` per step, and for keys.
        upstream: URL of the mock.
    """
    sim = ("--backend", "sim", "--profile")
    instant = _draftgate_command(*sim, str(INSTANT))
    paced = _draftgate_command(*sim, str(paced_profile(folder)))
    return [
        Target("mock", Kind.DIRECT, None),
        Target("bare handler", Kind.IN_PROCESS, _MOCK),
        Target("draftgate sim", Kind.IN_PROCESS, instant, paced_command=paced),
        _with_features(
            "draftgate sim, all features", Kind.IN_PROCESS, (*sim, str(INSTANT)), folder, upstream
        ),
        *(
            Target(
                f"draftgate sim, {count} processes",
                Kind.IN_PROCESS,
                (*instant, "--processes", str(count)),
                paced_command=(*paced, "--processes", str(count)),
            )
            for count in SEVERAL
        ),
    ]


def proxies(folder: Path, upstream: str) -> list[Target]:
    """Return Draftgate and the minimal proxy, both in front of an upstream.

    Args:
        folder: folder for keys.
    """
    found = [Target("bare proxy", Kind.PROXY, (*_MOCK, "--upstream", upstream))]
    if "openai" in backend_names():
        flags = ("--backend", "openai", "--upstream", upstream)
        command = _draftgate_command(*flags)
        found.append(Target("draftgate proxy", Kind.PROXY, command))
        name = "draftgate proxy, all features"
        found.append(_with_features(name, Kind.PROXY, flags, folder, upstream))
        found += [
            Target(
                f"draftgate proxy, {count} processes",
                Kind.PROXY,
                (*command, "--processes", str(count)),
            )
            for count in SEVERAL
        ]
    return found


def rivals(environments: Path, upstream: str, folder: Path) -> Iterator[Target]:
    """Yield the installed gateways, each in the environment of its name.

    Args:
        environments: folder that `python -m bench.edge.rivals` creates.
        folder: folder for configuration files.
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
    litellm.write_text(json.dumps({"model_list": models}), encoding="utf-8")  # JSON is valid YAML
    router = ("--worker-urls", upstream, "--policy", "round_robin", "--host", "127.0.0.1")
    quiet = ("--log-level", "error", "--prometheus-port")
    return {
        "litellm": ("--config", str(litellm), "--host", "127.0.0.1", "--num_workers", "1"),
        "vllm-router": (*router, *quiet, str(free_port())),
        "sglang-router": ("launch", *router, *quiet, str(free_port())),
    }
