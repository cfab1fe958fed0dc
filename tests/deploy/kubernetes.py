"""Reader of the Kubernetes manifests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.compose import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
BASE = FOLDER / "base"

Manifest = dict[str, Any]


def kustomization(folder: Path) -> Manifest:
    """Return the kustomization of a folder."""
    return dict(yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8")))


def manifests() -> list[Manifest]:
    """Return every object of the base, in order."""
    paths = [BASE / name for name in kustomization(BASE)["resources"]]
    return [m for path in paths for m in yaml.safe_load_all(path.read_text(encoding="utf-8"))]


def manifests_of_kind(*kinds: str) -> dict[tuple[str, str], Manifest]:
    """Return the manifests of these kinds by kind and name."""
    return {
        (manifest["kind"], manifest["metadata"]["name"]): manifest
        for manifest in manifests()
        if manifest["kind"] in kinds
    }


def workloads() -> dict[tuple[str, str], Manifest]:
    """Return the objects that run pods, by kind and name."""
    return manifests_of_kind("Deployment", "StatefulSet")


def pod(workload: Manifest) -> Manifest:
    """Return the pod specification of a workload."""
    return dict(workload["spec"]["template"]["spec"])


def containers() -> Iterator[tuple[str, Manifest]]:
    """Yield every container with the name of its workload."""
    for (_, name), workload in workloads().items():
        for container in pod(workload)["containers"]:
            yield name, container
