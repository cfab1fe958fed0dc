"""Tests of the release: its workflows, and the images whose digests it records."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.deploy.compose import ROOT, read
from tests.deploy.kubernetes import containers

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yaml"))
OWN = "draftgate:"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_satisfies_the_schema(path: Path) -> None:
    """The workflow satisfies GitHub's schema."""
    checker = [sys.executable, "-m", "check_jsonschema", "--builtin-schema"]
    done = subprocess.run(
        [*checker, "vendor.github-workflows", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_release_records_the_digest_of_every_image() -> None:
    """The script lists every third-party image that the deployment files name."""
    named = {
        service["image"] for service in read(environ={"PEER_SECRET": "x"})["services"].values()
    }
    named |= {container["image"] for _, container in containers()}
    files = [ROOT / "Dockerfile", ROOT / ".ci" / "image-digests"]
    dockerfile = files[0].read_text(encoding="utf-8")
    expected = {image for image in named if not image.startswith(OWN)}
    done = subprocess.run([files[1], "--list"], capture_output=True, text=True, check=True)
    listed = set(done.stdout.split())
    assert expected <= listed
    assert all(
        f"FROM {image} " in dockerfile or f"={image}\n" in dockerfile for image in listed - expected
    )
    assert any(image.startswith("python:") for image in listed)


def test_nothing_is_released_with_known_vulnerabilities() -> None:
    """The wheel and the images are built only after the audit."""
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yaml").read_text())
    for name in ("wheel", "image"):
        needs = release["jobs"][name]["needs"]
        assert "audit" in ([needs] if isinstance(needs, str) else needs)
