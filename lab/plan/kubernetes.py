"""The machines of a plan as Kubernetes manifests.

They replace the workers of the repository's `deploy/kubernetes/engine` by one StatefulSet for each
profile and role. The labels are those of its workers, so its Service, network policy and disruption
budget hold for these workers too. The autoscaler is removed, because the plan fixes the number of
workers. The gateways get the planned policies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from draftgate.lab.plan.deployment import (
    NODE,
    PORT,
    Deployable,
    as_yaml,
    profile_label,
    worker_flags,
    worker_name,
)

BASE: Final = "https://github.com/draftgate/draftgate//deploy/kubernetes/engine"
WORKER: Final = "draftgate-worker"
"""Name of the objects of the workers in the base."""

GATEWAY: Final = "draftgate-gateway"

PROFILE_LABEL: Final = "draftgate.dev/profile"
"""Label of the nodes that have the GPUs of a profile, and of the pods that need them."""

ROLE_LABEL: Final = "draftgate.dev/role"
"""Label of the pods of a role."""

_REPLACED: Final = (("apps", "v1", "StatefulSet"), ("autoscaling", "v2", "HorizontalPodAutoscaler"))
"""Group, version and kind of the objects of the base that the plan replaces."""

_LABELS: Final = {
    "app.kubernetes.io/name": "draftgate",
    "app.kubernetes.io/instance": "draftgate",
    "app.kubernetes.io/component": "worker",
}


def write_kubernetes(planned: Deployable, folder: Path) -> None:
    """Write `kustomization.yaml` and `workers.yaml` to a folder, for `kubectl apply -k`.

    Raises:
        OSError: the folder cannot be written.
        ValueError: a profile is a group of several GPUs.
    """
    workers = "---\n".join(as_yaml(stateful_set(machine)) for machine in planned.machines)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "workers.yaml").write_text(workers, encoding="utf-8")
    (folder / "kustomization.yaml").write_text(as_yaml(kustomization(planned)), encoding="utf-8")


def kustomization(planned: Deployable) -> dict[str, Any]:
    """Return the base without its workers, and the planned workers and policies."""
    removed = [
        {
            "target": {"group": group, "version": version, "kind": kind, "name": WORKER},
            "patch": as_yaml(
                {
                    "$patch": "delete",
                    "apiVersion": f"{group}/{version}",
                    "kind": kind,
                    "metadata": {"name": WORKER},
                }
            ),
        }
        for group, version, kind in _REPLACED
    ]
    policies = [{"name": name, "value": value} for name, value in planned.policies.items()]
    gateway = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": GATEWAY},
        "spec": {"template": {"spec": {"containers": [{"name": "gateway", "env": policies}]}}},
    }
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "draftgate",
        "resources": [BASE, "workers.yaml"],
        "patches": [*removed, {"patch": as_yaml(gateway)}],
    }


def stateful_set(machine: dict[str, Any]) -> dict[str, Any]:
    """Return the StatefulSet of the workers of a profile and role.

    Raises:
        ValueError: the profile is a group of several GPUs.
    """
    label = profile_label(machine)
    labels = {**_LABELS, PROFILE_LABEL: label, ROLE_LABEL: machine["role"]}
    claim = {
        "metadata": {"name": "cache"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "64Gi"}},
        },
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": worker_name(machine), "labels": labels},
        "spec": {
            "serviceName": WORKER,
            "replicas": machine["count"],
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "terminationGracePeriodSeconds": 75,
                    "nodeSelector": {PROFILE_LABEL: label},
                    "tolerations": [
                        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
                    ],
                    "securityContext": {
                        "runAsNonRoot": True,
                        "runAsUser": 10001,
                        "runAsGroup": 10001,
                        "fsGroup": 10001,
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                    "containers": [_container(machine)],
                    "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}],
                },
            },
            "volumeClaimTemplates": [claim],
        },
    }


def _container(machine: dict[str, Any]) -> dict[str, Any]:
    def probe(path: str, period_s: int, failures: int) -> dict[str, Any]:
        return {
            "httpGet": {"path": path, "port": "http"},
            "periodSeconds": period_s,
            "failureThreshold": failures,
        }

    return {
        "name": "worker",
        "image": "draftgate:engine-cuda",
        "args": [*NODE, "--drain-timeout-s", "60", *worker_flags(machine)],
        "env": [
            _secret("DRAFTGATE_JOIN", "join"),
            _secret("PEER_SECRET", "peer-secret"),
            _secret("DRAFTGATE_MODEL", "model"),
            _secret("HF_TOKEN", "hf-token", optional=True),
        ],
        "ports": [{"name": "http", "containerPort": int(PORT)}],
        "startupProbe": probe("/health", 2, 300),
        "livenessProbe": probe("/health", 10, 3),
        "readinessProbe": probe("/ready", 2, 2),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", "5"]}}},
        "resources": {
            "requests": {"cpu": "4", "memory": "16Gi"},
            "limits": {"memory": "32Gi", "nvidia.com/gpu": "1"},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - a folder in the container
            {"name": "cache", "mountPath": "/home/draftgate/.cache"},
        ],
    }


def _secret(name: str, key: str, *, optional: bool = False) -> dict[str, Any]:
    reference: dict[str, Any] = {"name": "draftgate", "key": key}
    if optional:
        reference["optional"] = True
    return {"name": name, "valueFrom": {"secretKeyRef": reference}}
