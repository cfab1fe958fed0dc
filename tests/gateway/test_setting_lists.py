"""Tests of settings that take several values, from every source and through the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_origin

import pytest
import yaml
from typer.testing import CliRunner

from draftgate.backends.worker_config import UpstreamSettings
from draftgate.gateway.cli import app
from draftgate.gateway.config import Setting, effective_config, settings

LISTS = {setting.name: setting for setting in settings() if get_origin(setting.type) is tuple}

VALUES = {
    "fallbacks": ("large=small", "large=other"),
    "hosts": ("a.example", "b.example"),
    "indices": ("0", "1"),
    "list": ("first", "second"),
    "models": ("a=org/a", "b=org/b"),
    "origins": ("https://a.example", "http://b:3000"),
    "shares": ("a=0.5", "b=0.25"),
    "upstreams": ("http://a:8001", "b=https://user:secret@b/prefix"),
    "urls": ("http://a:8001", "https://user:secret@b/prefix"),
}
"""Two values of each kind of list."""


def read(
    setting: Setting, arguments: Sequence[str], environ: Mapping[str, str], file: Path | None = None
) -> object:
    """Return the value of a setting as the command `serve` gets it."""
    found: list[object] = []
    runner = CliRunner()

    def note(config: object) -> None:
        found.append(getattr(config, setting.name))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftgate.gateway.cli.server.run_server", note)
        config = [] if file is None else ["--config", str(file)]
        result = runner.invoke(app, ["serve", *config, *arguments], env=dict(environ))
    assert result.exit_code == 0, result.output
    (value,) = found
    return value


def as_given(value: object) -> str:
    """Return the text of one of several values of a setting."""
    if isinstance(value, UpstreamSettings):
        return f"{value.name}={value.url}".removeprefix("=")
    return str(value)


@pytest.mark.parametrize("name", LISTS)
def test_every_list_means_the_same_from_every_source(name: str, tmp_path: Path) -> None:
    """Repeated flags, commas in a flag or variable, and both forms in YAML give one list."""
    setting, values = LISTS[name], VALUES[LISTS[name].kind]
    joined, spaced = ",".join(values), " , ".join(values)
    as_list, as_text = tmp_path / "list.yaml", tmp_path / "text.yaml"
    as_list.write_text(yaml.safe_dump({name: list(values)}))
    as_text.write_text(yaml.safe_dump({name: joined}))
    repeated = [part for value in values for part in (setting.flag, value)]
    found = [
        read(setting, repeated, {}),
        read(setting, [setting.flag, joined], {}),
        read(setting, [f"{setting.flag}={spaced}"], {}),
        read(setting, [], {setting.variable: joined}),
        read(setting, [], {setting.variable: spaced}),
        read(setting, [], {}, as_list),
        read(setting, [], {}, as_text),
    ]
    assert isinstance(found[0], tuple)
    assert tuple(map(as_given, found[0])) == values
    assert all(value == found[0] for value in found)


@pytest.mark.parametrize("name", [name for name in LISTS if LISTS[name].kind != "indices"])
def test_blank_text_is_an_empty_list_in_every_source(name: str, tmp_path: Path) -> None:
    """A variable without a value, as a compose file passes it, is an empty list."""
    setting, file = LISTS[name], tmp_path / "node.yaml"
    file.write_text(f"{name}: ''\n")
    assert read(setting, [setting.flag, ""], {}) == read(setting, [], {setting.variable: " "}) == ()
    assert read(setting, [], {}, file) == ()


@pytest.mark.parametrize("kind", ["models", "shares"])
def test_value_of_a_mapping_may_have_a_comma(kind: str, tmp_path: Path) -> None:
    """A YAML mapping is a list of pairs, whose values are not split."""
    file = tmp_path / "node.yaml"
    file.write_text("loras: {a: '/m/a,b'}\nmemory_shares: {chat: 0.5}\n")
    config = effective_config({}, {}, str(file)).config
    assert {"models": config.loras, "shares": config.memory_shares}[kind] in {
        ("a=/m/a,b",),
        ("chat=0.5",),
    }


@pytest.mark.parametrize(
    "second", ["http://a:8000", "http://a:8000/v1", "http://A:8000/", "HTTP://a:8000"]
)
def test_one_server_cannot_be_two_upstreams(second: str) -> None:
    """The settings reject an upstream that is given twice in different ways."""
    with pytest.raises(ValueError, match="--upstream: expected distinct addresses"):
        effective_config({"upstream": ["http://a:8000", second]}, {})


def test_named_upstream_may_be_written_differently() -> None:
    """`--upstream-speculates` names an upstream with or without the path of the API."""
    flags = {"upstream": "http://a,http://b", "upstream_speculates": "http://b/v1/"}
    config = effective_config({**flags, "backend": "openai"}, {}).config
    found = [one.speculates for one in config.upstreams()]
    assert found == [False, True]


@pytest.mark.parametrize(
    ("arguments", "suggested"),
    [
        (["serve", "--backend", "openai", "--upstream", "localhost:8000"], "http://localhost:8000"),
        (["serve", "--advertise", "10.0.0.5:8000"], "http://10.0.0.5:8000"),
        (["serve", "--otlp-endpoint", "localhost:4318/v1/traces"], "http://localhost:4318"),
        (["serve", "--join", "localhost:6379"], "redis://localhost:6379"),
        (["load", "localhost:8000"], "http://localhost:8000"),
        (["load", "search", "localhost:8000/v1"], "http://localhost:8000"),
        (["load", "sweep", "a=localhost:8000", "--rates", "1"], "http://localhost:8000"),
        (["explain", "localhost:8000"], "http://localhost:8000"),
        (["ray", "start", "--max-workers", "2", "--gateway", "http://a,b:8000"], "http://b:8000"),
    ],
)
def test_every_command_suggests_the_missing_scheme(arguments: list[str], suggested: str) -> None:
    """An address without a scheme ends the command with one line that has the whole address."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code in {1, 2}
    (line,) = result.output.splitlines()
    assert f"did you mean {suggested}?" in line


def test_lists_in_config_show_are_those_of_the_command() -> None:
    """`config show` prints a comma-separated flag as the list that the node uses."""
    result = CliRunner().invoke(app, ["config", "show", "--json", "--allowed-hosts", "a, b"])
    assert json.loads(result.output)["allowed_hosts"]["value"] == ["a", "b"]
