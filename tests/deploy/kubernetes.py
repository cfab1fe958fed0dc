"""Reader of the Kubernetes manifests, which are rendered from the Helm chart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.compose import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
RENDERED = ("gateway-only", "engine", "gpu")
"""Folders with rendered manifests. Each has the name of an example of the chart."""

Manifest = dict[str, Any]


def kustomization(folder: Path) -> Manifest:
    """Return the kustomization of a folder."""
    return dict(yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8")))


def manifests(name: str = "engine") -> list[Manifest]:
    """Return every object of a folder, in order."""
    text = (FOLDER / name / "manifests.yaml").read_text(encoding="utf-8")
    return list(yaml.safe_load_all(text))


def manifests_of_kind(*kinds: str) -> dict[tuple[str, str], Manifest]:
    """Return the manifests of these kinds in `engine` by kind and component."""
    return {
        (manifest["kind"], component(manifest)): manifest
        for manifest in manifests()
        if manifest["kind"] in kinds
    }


def component(manifest: Manifest) -> str:
    """Return the component of an object, such as gateway."""
    return str(manifest["metadata"]["labels"]["app.kubernetes.io/component"])


def workloads() -> dict[tuple[str, str], Manifest]:
    """Return the objects of `engine` that run pods, by kind and component."""
    return manifests_of_kind("Deployment", "StatefulSet")


def pod(workload: Manifest) -> Manifest:
    """Return the pod specification of a workload."""
    return dict(workload["spec"]["template"]["spec"])


def containers() -> Iterator[tuple[str, Manifest]]:
    """Yield every container of each folder with the folder and the component."""
    for name in RENDERED:
        for manifest in manifests(name):
            if manifest["kind"] in {"Deployment", "StatefulSet"}:
                for container in pod(manifest)["containers"]:
                    yield f"{name}-{component(manifest)}", container
