"""Environments of client libraries, separate from Draftgate's dependencies.

Each client has a folder with `requirements.txt` or `package-lock.json`, which pins all packages.
The environments stay in `.cache/conformance/`, so that only the first run installs packages.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
CLIENTS: Final = ROOT / "tests" / "conformance" / "clients"
CACHE: Final = ROOT / ".cache" / "conformance"

UNREACHABLE: Final = re.compile(
    r"connection broken|ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ENETUNREACH|ETIMEDOUT"
)
"""Messages of pip and npm without a network. Any other failure is an error."""


def command_of(name: str, results: Path) -> tuple[list[str], Path]:
    """Return the command that runs the suite of a client, and the folder to run it in.

    The first call installs the client. The test skips without a network or without Node.js.

    Args:
        results: path of the report that the command writes, in JUnit's format.
    """
    folder = CLIENTS / name
    if (folder / "package.json").exists():
        reporter = ["--test-reporter=junit", f"--test-reporter-destination={results}"]
        return ["node", "--test", *reporter, "suite.mjs"], _node_environment(folder)
    python = _python_environment(folder) / "bin" / "python"
    options = ["-p", "common", "-p", "no:cacheprovider", "-q", "-c", str(CLIENTS / "pytest.ini")]
    return [str(python), "-m", "pytest", *options, f"--junitxml={results}", "suite.py"], folder


def _python_environment(folder: Path) -> Path:
    """Return a virtual environment with the pinned packages of a client."""
    requirements = folder / "requirements.txt"
    environment = _cached(folder.name, requirements.read_bytes() + sys.version.encode())
    if not (environment / "installed").exists():
        venv.create(environment, clear=True, symlinks=True)
        python = str(environment / "bin" / "python")
        # All packages are pinned, so pip needs to resolve nothing. A package may require a newer
        # Python than it uses, which its suite states.
        options = ["--no-deps", "--ignore-requires-python", "--no-compile", "--quiet"]
        _install([sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check",
                  "install", *options, "-r", str(requirements)], ROOT)  # fmt: skip
        (environment / "installed").touch()
    return environment


def _node_environment(folder: Path) -> Path:
    """Return a folder with the pinned packages of a client and its suite."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("no Node.js")
    environment = _cached(folder.name, (folder / "package-lock.json").read_bytes())
    if not (environment / "installed").exists():
        shutil.rmtree(environment, ignore_errors=True)
        shutil.copytree(folder, environment)
        _install(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], environment)
        (environment / "installed").touch()
    shutil.copy(folder / "suite.mjs", environment)
    return environment


def _cached(name: str, pins: bytes) -> Path:
    """Return the folder of an environment, whose name changes with its pins."""
    return CACHE / f"{name}-{hashlib.sha256(pins).hexdigest()[:12]}"


def _install(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        if UNREACHABLE.search(done.stderr):
            pytest.skip(f"{command[0]} cannot reach its registry")
        pytest.fail(f"{' '.join(command)}: {done.stdout}{done.stderr}")


def library_of(name: str) -> str:
    """Return the library and the version that a suite tests, such as `litellm 1.106.2`.

    The library is the first package that the folder of the client lists.
    """
    folder = CLIENTS / name
    if (folder / "package.json").exists():
        library, version = next(iter(json.loads(
            (folder / "package.json").read_text())["dependencies"].items()))  # fmt: skip
    else:
        pins = (folder / "requirements.txt").read_text()
        library, version = next(line for line in pins.splitlines() if "==" in line).split("==")
    return f"{library} {version}"


def variables(**given: str) -> dict[str, str]:
    """Return the environment variables of a suite, without those of the tests."""
    path = {"PATH": os.environ["PATH"], "PYTHONPATH": str(CLIENTS)}  # for the plugin `common`
    return {**path, "PYTHONDONTWRITEBYTECODE": "1", **given}
