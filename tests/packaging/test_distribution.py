"""`pip install draftgate` installs the right files, which work without the checkout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.installing import (
    ROOT,
    Environment,
    build_sdist,
    build_wheel,
    constraints,
    copy_checkout,
    members,
)

FOLDERS = ("gateway", "backends", "policies", "loadgen", "lab")
READY_S = 240  # a first import of torch takes minutes on a busy machine
PROMPT = {"prompt": "def main():", "max_tokens": 8}


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean copy of the checkout."""
    return copy_checkout(tmp_path_factory.mktemp("checkout") / "draftgate")


@pytest.fixture(scope="session")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from the checkout."""
    return build_wheel(checkout, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def sdist(checkout: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, built after the wheel because both builds use the same folder."""
    return build_sdist(checkout, tmp_path_factory.mktemp("sdist") / "dist")


@pytest.fixture(scope="session")
def core(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A clean environment without extras."""
    return Environment(tmp_path_factory.mktemp("core") / "venv", wheel, set())


def test_wheel_holds_every_file_of_the_package_and_no_other(checkout: Path, wheel: Path) -> None:
    """The wheel has all sources and data of the five folders, and no tests or benchmarks."""
    found = {name for name in members(wheel) if ".dist-info/" not in name}
    linked = {
        f"draftgate/{path.relative_to(checkout).as_posix()}"
        for folder in FOLDERS
        for path in (checkout / folder).rglob("*")
        if path.is_file()
    }
    names = ("__init__", "__main__", "addresses", "cache", "compressed", "extensions")
    own = {"draftgate/py.typed", *(f"draftgate/{name}.py" for name in names)}
    assert found == linked | own


def test_sdist_holds_no_link_no_test_and_no_benchmark(sdist: Path) -> None:
    """The source distribution has the package and its metadata as plain files."""
    with tarfile.open(sdist) as archive:
        entries = archive.getmembers()
    assert all(entry.isfile() or entry.isdir() for entry in entries)
    tops = {Path(entry.name).parts[1] for entry in entries if "/" in entry.name}
    assert tops == {
        *("draftgate", "draftgate.egg-info", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md"),
        *("pyproject.toml", "setup.cfg"),
    }


def test_wheel_from_sdist_equals_wheel_from_checkout(
    sdist: Path, wheel: Path, tmp_path: Path
) -> None:
    """Both wheels have the same files, byte for byte."""
    again = members(build_wheel(sdist, tmp_path))
    first = members(wheel)
    assert again.keys() == first.keys()
    assert [name for name in first if first[name] != again[name]] == []


def test_install_adds_one_package_and_its_metadata(core: Environment) -> None:
    """An install adds only the package and its metadata to site-packages."""
    assert core.installed == {"draftgate", "draftgate-0.1.0.dist-info"}


def test_core_needs_neither_torch_nor_plotly_nor_ray(core: Environment) -> None:
    """An install without extras requires no package of an extra."""
    extras = {
        "torch",
        "triton",
        "safetensors",
        "plotly",
        "ray",
        "scipy",
        "transformers",
        "pytest",
        "zmq",
    }
    assert not extras & core.requirements.keys()


def test_constraints_pin_every_requirement(core: Environment) -> None:
    """Each direct or transitive requirement has the pinned version."""
    pins = constraints()
    assert {name: found.version.partition("+")[0] for name, found in core.requirements.items()} == {
        name: pins.get(name) for name in core.requirements
    }


def test_core_serves_from_the_simulator_and_from_an_upstream(
    core: Environment, tmp_path: Path
) -> None:
    """Without torch, the installed command serves the API and the page. The default command of the
    images serves from the upstream in DRAFTGATE_UPSTREAM."""
    _, *options = image_command()
    with serving(core, tmp_path, "--backend", "sim") as base:
        model = call(base, "/v1/models")["data"][0]["id"]
        answer = call(base, "/v1/completions", {"model": model, **PROMPT})
        assert answer["usage"]["completion_tokens"] == PROMPT["max_tokens"]
        for path, kind in (("/", "text/html"), ("/web/page.js", "text/javascript")):
            with urllib.request.urlopen(base + path, timeout=30) as response:
                assert response.headers["content-type"].startswith(kind)
        with serving(core, tmp_path / "gateway", *options, DRAFTGATE_UPSTREAM=base) as gateway:
            answer = call(gateway, "/v1/completions", {"model": model, **PROMPT})
            assert answer["usage"]["completion_tokens"] == PROMPT["max_tokens"]


def test_image_without_torch_and_upstreams_names_what_to_set(
    core: Environment, tmp_path: Path
) -> None:
    """The default command of the images generates no text of the simulator: without torch and
    without an upstream, it ends with a message."""
    done = run([core.python, "-m", "draftgate", *image_command()], tmp_path)
    assert done.returncode == 1
    assert "or forward to other servers: draftgate serve --upstream URL" in done.stderr


def image_command() -> list[str]:
    """Return the default command of the images, with a free port."""
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (command,) = re.findall(r"^CMD (.*)$", dockerfile, re.MULTILINE)
    return ["0" if word == "8000" else word for word in json.loads(command)]


def test_module_and_command_print_the_version(core: Environment, tmp_path: Path) -> None:
    """`draftgate --version` and `python -m draftgate --version` agree with the metadata."""
    script = core.python.with_name("draftgate")
    for command in ([script], [core.python, "-m", "draftgate"]):
        done = run([*command, "--version"], tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (0, "draftgate 0.1.0\n", "")


@pytest.mark.parametrize(
    ("arguments", "package", "extra"),
    [
        (("serve", "draftgate-demo", "--port", "0"), "torch", "engine"),
        (("run", "draftgate-demo", "x"), "torch", "engine"),
        (("plan", "mix", "--tputs", "gpus.json"), "scipy", "plan"),
        (("ray", "status"), "Ray", "ray"),
        (("bench", "engine"), "", ""),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_missing_package_names_the_extra_to_install(
    core: Environment, tmp_path: Path, arguments: tuple[str, ...], package: str, extra: str
) -> None:
    """A feature without its package fails before it starts and names the extra to install."""
    done = run([core.python, "-m", "draftgate", *arguments], tmp_path)
    assert done.returncode in {1, 2}
    assert "Traceback" not in done.stderr
    if not extra:
        assert done.stderr == "draftgate: benchmarks need a source checkout, not a package\n"
        return
    message = " ".join(done.stderr.replace("│", " ").split())
    assert f"not installed: pip install 'draftgate[{extra}]'" in message
    assert package in message


def test_bare_checkout_runs_as_a_module(checkout: Path, core: Environment, tmp_path: Path) -> None:
    """A checkout that is not installed needs only the dependencies."""
    script = (
        f"import sys; sys.path.insert(0, {str(checkout)!r}); import draftgate; print(draftgate)"
    )
    assert str(checkout) in run([core.python, "-c", script], tmp_path).stdout
    done = run([core.python, "-m", "draftgate", "--version"], checkout)
    assert (done.returncode, done.stdout) == (0, "draftgate 0.1.0\n")


@pytest.mark.parametrize("name", ["policies", "backends.core", "backends.engine.backend"])
def test_package_imports_with_few_dependencies(name: str) -> None:
    """Policies, scheduler and engine import without aiohttp, redis, typer, YAML or tracing."""
    script = f"""
import importlib, pkgutil, sys
root = importlib.import_module("draftgate.{name}")
if hasattr(root, "__path__"):
    for module in pkgutil.walk_packages(root.__path__, root.__name__ + "."):
        importlib.import_module(module.name)
print(*sorted(
    {{"aiohttp", "httpx", "llguidance", "opentelemetry", "plotly", "prometheus_client",
      "redis", "rich", "typer", "uvloop", "yaml", "triton"}} & set(sys.modules)
))
"""
    done = run([sys.executable, "-c", script], ROOT)
    assert (done.stdout, done.stderr) == ("\n", "")


@pytest.mark.long
def test_engine_extra_serves_the_shipped_model(wheel: Path, tmp_path: Path) -> None:
    """The wheel with `[engine]` serves the shipped model without Triton and without the hub."""
    engine = Environment(tmp_path / "venv", wheel, {"engine"})
    assert not {"triton", "plotly", "ray"} & engine.requirements.keys()
    with serving(engine, tmp_path) as base:
        answer = call(base, "/v1/completions", {"model": "draftgate-demo", **PROMPT})
    assert answer["usage"]["completion_tokens"] == PROMPT["max_tokens"]
    assert answer["choices"][0]["text"].strip()


def run(command: list[Any], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command to its end without this checkout on the import path."""
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd, env=environment(cwd), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def environment(home: Path) -> dict[str, str]:
    """Return an environment with PATH and HOME but without Draftgate settings."""
    return {"PATH": os.environ["PATH"], "HOME": str(home), "COLUMNS": "120", "LC_ALL": "C.UTF-8"}


@contextmanager
def serving(environ: Environment, home: Path, *arguments: str, **variables: str) -> Iterator[str]:
    """Run `draftgate serve` on a free port and yield its URL when the server is ready."""
    command = [environ.python.with_name("draftgate"), "serve", "--port", "0", *arguments]
    home.mkdir(exist_ok=True)
    log = home / "server.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            list(map(str, command)),
            cwd=home,
            env=environment(home) | variables,
            stdout=output,
            stderr=output,
        ) as server,
    ):
        try:
            yield _address(server, log)
        finally:
            server.terminate()
            server.wait(timeout=20)


def _address(server: subprocess.Popen[bytes], log: Path) -> str:
    """Return the server's URL from its banner, which appears when the server is ready."""
    deadline = time.monotonic() + READY_S
    while server.poll() is None and time.monotonic() < deadline:
        for word in log.read_text(encoding="utf-8", errors="replace").split():
            if word.startswith("http://127.0.0.1:") and word.endswith("/v1"):
                return word.removesuffix("/v1")
        time.sleep(0.2)
    pytest.fail(f"the server did not become ready:\n{log.read_text(errors='replace')[-4000:]}")


def call(base: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Return the JSON response of a path."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(base + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.loads(response.read())
