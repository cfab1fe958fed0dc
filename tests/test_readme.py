"""The examples of the README run.

Every fenced `bash` and `python` block runs against a server like the server of the README. A tag
after the language gives the needs of a block:

    ```bash serve      starts the server, not run because a fixture starts it
    ```bash install    changes the machine, not run
    ```bash docker     needs a Docker daemon, not run
    ```bash gpu        needs a CUDA device, not run
    ```bash hub        downloads a model, not run
    ```bash load       measures, may end as INVALID or be refused on a busy machine

All blocks run in the order of the page and share a working directory, so a block may read files of
earlier blocks. The directory links to the repository's files, which no example changes.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
TOO_BUSY = {3, 4}  # exit statuses when the load generator or the server is overloaded
NOT_RUN = {"serve", "install", "docker", "gpu", "hub"}
BLOCK_TIMEOUT_S = 180
READY_TIMEOUT_S = 90

FENCE = re.compile(r"^```(bash|python)\b([^\n]*)\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
PORT = re.compile(r"(?<=:)8000\b|(?<=--port )8000\b|(?<=--port=)8000\b|(?<=port=)8000\b")


@dataclass(frozen=True)
class Block:
    """A fenced block of the README."""

    language: str
    tags: frozenset[str]
    code: str
    line: int

    @property
    def uses_server(self) -> bool:
        return bool(PORT.search(self.code))

    def __str__(self) -> str:
        return f"line-{self.line}-{self.language}"


def _blocks(text: str) -> list[Block]:
    return [
        Block(
            language=match[1],
            tags=frozenset(match[2].split()),
            code=match[3],
            line=text.count("\n", 0, match.start()) + 1,
        )
        for match in FENCE.finditer(text)
    ]


BLOCKS = _blocks(README.read_text(encoding="utf-8")) if README.exists() else []
RUN = [block for block in BLOCKS if not block.tags & NOT_RUN]


def _environment() -> dict[str, str]:
    """Return the environment with the interpreter on the PATH and without Draftgate settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("DRAFTGATE_")}
    path = os.pathsep.join((str(Path(sys.executable).parent), kept.get("PATH", os.defpath)))
    return {**kept, "PATH": path, "PYTHONUNBUFFERED": "1"}


@pytest.fixture(scope="session")
def readme_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with links to the repository's files, where the examples write."""
    directory = tmp_path_factory.mktemp("readme")
    for entry in ROOT.iterdir():
        if entry.name != ".git":
            (directory / entry.name).symlink_to(entry)
    return directory


@pytest.fixture(scope="session")
def readme_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a running `draftgate serve` with the shipped model."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "server.log"
    program = Path(sys.executable).with_name("draftgate")
    # Without a network, the shipped model has the name of the chat model beside its own.
    names = ["--served-model-name", "draftgate-demo", "smollm2"]
    command = [program, "serve", "draftgate-demo", *names, "--port", str(port)]
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, env=_environment(), stdin=subprocess.DEVNULL, stdout=output, stderr=output
        ) as server,
    ):
        try:
            _wait_until_ready(server, port, log)
            yield port
        finally:
            server.terminate()
            try:
                server.wait(timeout=20)
            except subprocess.TimeoutExpired:
                server.kill()


def _wait_until_ready(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=60):
                return
        except OSError:  # The server refuses connections or is not ready.
            time.sleep(0.2)
    pytest.fail(f"the server did not become ready:\n{log.read_text(errors='replace')[-4000:]}")


@pytest.mark.skipif(not README.exists(), reason="there is no README.md yet")
def test_the_readme_has_examples_that_run() -> None:
    """The README contains blocks that the tests run."""
    assert RUN


@pytest.mark.skipif(not README.exists(), reason="there is no README.md yet")
@pytest.mark.parametrize("block", RUN, ids=str)
def test_readme_example_runs(
    block: Block, readme_directory: Path, request: pytest.FixtureRequest
) -> None:
    """Each executed block of the README succeeds."""
    code = block.code
    if block.uses_server:
        code = PORT.sub(str(request.getfixturevalue("readme_port")), code)
    interpreter = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}
    result = subprocess.run(
        [*interpreter[block.language], code],
        cwd=readme_directory,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BLOCK_TIMEOUT_S,
        check=False,
    )
    fine = {0, *TOO_BUSY} if "load" in block.tags else {0}
    assert result.returncode in fine, f"README.md:{block.line}\n{code}\n{result.stdout[-4000:]}"
