"""Tests that the commands and variables of the deployment files are valid."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
import yaml

from draftgate.gateway.cli import app
from draftgate.gateway.config import settings
from tests.deploy.compose import ROOT, services
from tests.deploy.kubernetes import containers

NODE_IMAGES = ("draftgate:core", "draftgate:engine")


def _of_compose() -> Iterator[Any]:
    for name, service in services().items():
        if service["image"].startswith(NODE_IMAGES) and "entrypoint" not in service:
            command, environment = service["command"], service["environment"]
            yield pytest.param(command, set(environment), id=f"compose-{name}")


def _of_kubernetes() -> Iterator[Any]:
    for owner, container in containers():
        if container["image"].startswith(NODE_IMAGES):
            names = {variable["name"] for variable in container["env"]}
            yield pytest.param(container["args"], names, id=f"kubernetes-{owner}")


COMMANDS = [*_of_compose(), *_of_kubernetes()]


def test_compose_and_kubernetes_have_commands() -> None:
    """The deployment files contain five commands of gateways and workers."""
    assert len(COMMANDS) == 5


@pytest.mark.parametrize(("command", "environment"), COMMANDS)
def test_flags_and_variables_of_a_command_exist(command: list[str], environment: set[str]) -> None:
    """Every flag of a command belongs to `serve`, and every DRAFTGATE_ variable is a setting."""
    name, *arguments = command
    group = typer.main.get_command(app)
    serve = group.commands[name]  # type: ignore[attr-defined]
    serve.make_context("serve", list(arguments))
    known = {setting.variable for setting in settings()}
    assert {v for v in environment if v.startswith("DRAFTGATE_")} <= known


def test_variables_of_the_gpu_overlay_exist() -> None:
    """Every DRAFTGATE_ variable of the GPU overlay is a setting."""
    patch = yaml.safe_load((ROOT / "deploy/kubernetes/gpu/workers.yaml").read_text())
    (container,) = patch["spec"]["template"]["spec"]["containers"]
    known = {setting.variable for setting in settings()}
    ours = {v["name"] for v in container["env"] if v["name"].startswith("DRAFTGATE_")}
    assert ours
    assert ours <= known
