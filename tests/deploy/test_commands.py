"""Tests that the commands and variables of the deployment files are valid."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from draftgate.gateway.cli import app
from draftgate.gateway.config import settings
from draftgate.gateway.config.reading import CONFIG_VARIABLE
from tests.deploy.compose import services
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
    """The deployment files contain eight commands of gateways and workers."""
    assert len(COMMANDS) == 8


@pytest.mark.parametrize(("command", "environment"), COMMANDS)
def test_flags_and_variables_of_a_command_exist(command: list[str], environment: set[str]) -> None:
    """Every flag of a command belongs to `serve`, and every DRAFTGATE_ variable is a setting."""
    name, *arguments = command
    group = typer.main.get_command(app)
    serve = group.commands[name]  # type: ignore[attr-defined]
    serve.make_context("serve", list(arguments))
    known = {CONFIG_VARIABLE, *(setting.variable for setting in settings())}
    assert {v for v in environment if v.startswith("DRAFTGATE_")} <= known
