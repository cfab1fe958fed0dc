"""The machines of a plan as a Compose file.

The file has Redis, the gateway and one service for the workers of each profile and role, with the
structure of the repository's `compose.yaml`. Workers have the planned limits of a step, and the
gateway has the planned policies. The model and the secret of the nodes come from the environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from draftgate.lab.plan.machines import CONFIG
from draftgate.policies.types import Role

PORT: Final = "8000"
LABEL: Final = "draftgate.profile"
"""Label of the Swarm nodes that have the GPUs of a profile. Compose on one machine ignores it."""

_ALL: Final = "0.0.0.0"  # noqa: S104 - all interfaces of a container
NODE: Final = ("serve", "--host", _ALL, "--port", PORT, "--peer-secret-env", "PEER_SECRET")
"""Command of every node."""

_CONFINED: Final[dict[str, Any]] = {
    "restart": "unless-stopped",
    "read_only": True,
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges:true"],
}
_REDIS: Final = [
    *("redis-server", "--bind", _ALL, "--port", "6379", "--protected-mode", "no"),
    *("--save", "", "--appendonly", "no", "--maxmemory", "128mb"),
    *("--maxmemory-policy", "noeviction"),
]
_REDIS_IMAGE: Final = "redis:8.2.2-bookworm"
_JOIN: Final = "redis://redis:6379"
_SECRET: Final = "${PEER_SECRET:?is not set, add the output of openssl rand -hex 32 to .env}"
_MODEL: Final = "${DRAFTGATE_MODEL:?is not set, add the checkpoint of the profiles to .env}"


@dataclass(frozen=True, slots=True)
class Deployable:
    """The part of a plan that a deployment needs.

    Attributes:
        machines: the `machines` of the plan.
        phases: phases policy of the gateways.
    """

    machines: Sequence[dict[str, Any]]
    phases: str = "together"

    @classmethod
    def from_plan(cls, plan: Mapping[str, Any]) -> Deployable:
        """Return the part of a `plan/1`.

        Raises:
            ValueError: the plan has no machines, or different GPUs divide the phases.
        """
        found = cls(plan.get("machines", []), plan.get("phases") or "together")
        if not found.machines:
            raise ValueError("there are no machines to deploy: give a load with a feasible plan")
        profiles = list(dict.fromkeys(machine["profile"] for machine in found.machines))
        if found.phases != "together" and len(profiles) > 1:
            raise ValueError(
                f"{' and '.join(profiles)} cannot divide the phases, because workers on different"
                " GPUs do not exchange KV blocks: give one profile, or use plan mix"
            )
        return found

    @property
    def policies(self) -> dict[str, str]:
        """The environment of a gateway, with the planned policies."""
        drafting = {machine["speculation"] for machine in self.machines} != {"off"}
        return {
            "DRAFTGATE_PHASES": self.phases,
            "DRAFTGATE_SPECULATION": "auto" if drafting else "off",
        }


def compose_file(planned: Deployable) -> dict[str, Any]:
    """Return a Compose file for the machines of a plan.

    Raises:
        ValueError: a profile is a group of several GPUs.
    """
    services = {
        "redis": {
            **_CONFINED,
            "image": _REDIS_IMAGE,
            "command": _REDIS,
            "user": "999:999",
            "expose": ["6379"],
            "networks": ["cluster"],
            "tmpfs": ["/data"],
            "deploy": {"resources": {"limits": {"memory": "256m"}}},
            "healthcheck": {
                "test": ["CMD-SHELL", "redis-cli -p 6379 ping | grep -q PONG"],
                "interval": "2s",
                "timeout": "2s",
                "retries": 5,
            },
        },
        "gateway": {
            **_compose_node("draftgate:core", ["--no-worker"]),
            "environment": {"PEER_SECRET": _SECRET, **planned.policies},
            "ports": [f"${{GATEWAY_ADDRESS:-127.0.0.1}}:{PORT}:{PORT}"],
            "deploy": {"resources": {"limits": {"memory": "1g"}}},
        },
    }
    for machine in planned.machines:
        services[worker_name(machine)] = _compose_worker(machine)
    return {
        "name": "draftgate-plan",
        "services": services,
        "networks": {"cluster": {"internal": True}},
        "volumes": {"cache": None},
    }


def worker_name(machine: Mapping[str, Any]) -> str:
    """Return the name of the workers of a profile and role, in letters, digits and hyphens.

    Raises:
        ValueError: the profile is a group of several GPUs.
    """
    role = machine["role"]
    return f"worker-{profile_label(machine)}" + ("" if role == Role.ANY else f"-{role}")


def profile_label(machine: Mapping[str, Any]) -> str:
    """Return the label of the machines with the GPUs of a profile.

    Raises:
        ValueError: the profile is a group of several GPUs.
    """
    profile = machine["profile"]
    name = profile.rpartition("/")[2].partition("@")[0].removesuffix(".json").lower()
    if re.fullmatch(r"\w+x\d+-\w+", name):
        raise ValueError(
            f"{profile} is a tensor-parallel group. A worker has one GPU, so serve the group with"
            " vLLM or SGLang, and give its address to --upstream"
        )
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def _compose_node(image: str, flags: Sequence[str]) -> dict[str, Any]:
    check = ["CMD", "python", "-m", "draftgate.gateway.healthcheck"]
    return {
        **_CONFINED,
        "image": image,
        "init": True,
        "command": [*NODE, "--join", _JOIN, *flags],
        "expose": [PORT],
        "networks": ["cluster", "default"],
        "tmpfs": ["/tmp"],  # noqa: S108 - a folder in the container
        "stop_grace_period": "40s",
        "depends_on": {"redis": {"condition": "service_healthy"}},
        "healthcheck": {
            "test": [*check, f"http://127.0.0.1:{PORT}/ready"],
            "interval": "5s",
            "timeout": "5s",
            "retries": 3,
            "start_period": "120s",
        },
    }


def _compose_worker(machine: dict[str, Any]) -> dict[str, Any]:
    gpu = {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    return {
        **_compose_node("draftgate:engine-cuda", worker_flags(machine)),
        "environment": {
            "PEER_SECRET": _SECRET,
            "DRAFTGATE_MODEL": _MODEL,
            "HF_TOKEN": None,
            "OTEL_SERVICE_NAME": worker_name(machine),
        },
        "volumes": ["cache:/home/draftgate/.cache"],
        "deploy": {
            "replicas": machine["count"],
            "placement": {"constraints": [f"node.labels.{LABEL} == {profile_label(machine)}"]},
            "resources": {
                "limits": {"memory": "${WORKER_MEMORY:-32g}"},
                "reservations": {"devices": [gpu]},
            },
        },
    }


def worker_flags(machine: Mapping[str, Any]) -> list[str]:
    """Return the settings that a worker needs to behave as planned."""
    return [
        *("--role", machine["role"]),
        *("--speculation", machine["speculation"]),
        *("--max-num-seqs", str(CONFIG.max_num_seqs)),
        *("--max-step-tokens", str(CONFIG.max_step_tokens)),
    ]


def compose_text(planned: Deployable) -> str:
    """Return `compose_file` as YAML."""
    head = "# Written by `draftgate plan`. Start it with: docker compose -f FILE up\n"
    return head + as_yaml(compose_file(planned))


def as_yaml(document: Mapping[str, Any]) -> str:
    """Return a document as YAML that repeats equal parts instead of referring to the first one."""
    import yaml

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    return yaml.dump(document, Dumper=Plain, sort_keys=False)
