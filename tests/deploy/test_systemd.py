"""Tests of the systemd units and of the example of a configuration file."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from draftgate.gateway.app import CLOSE_S
from draftgate.gateway.cli import app
from draftgate.gateway.config import ServeConfig, settings
from draftgate.gateway.config.reading import effective_config
from tests.deploy.compose import ROOT
from tests.deploy.programs import run

UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
EXAMPLE = ROOT / "deploy" / "config.example.yaml"
EXPOSURE = 20
"""The largest exposure level of a unit. systemd-analyze calls levels up to 2.0 (20) safe."""

units = pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)


def service(unit: Path) -> dict[str, str]:
    """Return the settings of a unit's service. The last of several values counts."""
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(unit)
    return dict(parser["Service"])


@units
def test_unit_starts_a_node_and_waits_for_its_drain(unit: Path) -> None:
    """The command is valid, and systemd waits longer than the node drains and closes."""
    found = service(unit)
    executable, name, *arguments = shlex.split(found["ExecStart"])
    assert executable.endswith("/draftgate")
    serve = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    context = serve.make_context(name, arguments)
    assert context.params["config"] == f"/etc/draftgate/{unit.stem.removeprefix('draftgate-')}.yaml"
    assert float(found["TimeoutStopSec"]) >= ServeConfig().drain_timeout_s + 2 * CLOSE_S


@units
def test_systemd_accepts_the_unit_and_finds_it_confined(unit: Path, tmp_path: Path) -> None:
    """The unit has no unknown settings, and its exposure is in the safe range."""
    local = tmp_path / unit.name
    text = unit.read_text(encoding="utf-8")
    local.write_text(re.sub(r"^(ExecStart=)\S+", r"\1/bin/true", text, flags=re.MULTILINE))
    assert run("systemd-analyze", "verify", local) == ""
    run("systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE}", local)


def test_example_of_a_configuration_shows_defaults_and_valid_values(tmp_path: Path) -> None:
    """The example changes nothing. Each of its commented settings exists, has a valid value, and
    shows the default if there is one."""
    assert yaml.safe_load(EXAMPLE.read_text(encoding="utf-8")) is None
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    shown = [line[2:] for line in lines if re.match(r"# (\w+:( |$)|  )(?!.*\.$)", line)]
    everything = tmp_path / "config.yaml"
    everything.write_text("\n".join(shown), encoding="utf-8")
    named: dict[str, Any] = yaml.safe_load(everything.read_text(encoding="utf-8"))
    assert len(named) > 50
    values = effective_config({}, {}, str(everything)).config
    for setting in settings():
        if setting.name in named and setting.default not in (None, (), False):
            assert getattr(values, setting.name) == setting.default, setting.name
