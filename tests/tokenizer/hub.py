"""A local model hub that responds to the three requests of `huggingface_hub` for a snapshot."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from tests.gguf.files import U32, Pair, split_model, tiny_model

COMMIT = "5" * 40
PARTS = split_model((6, 5))
ROOT = Path(__file__).resolve().parents[2]

MODELS: dict[str, dict[str, bytes]] = {
    "org/model-0.1": {
        "config.json": b"{}",
        "tokenizer.json": b"[]",
        "chat_template.jinja": b"Hello",
        "additional_chat_templates/tool_use.jinja": b"Hello!",
        "model-00001-of-00002.safetensors": b"abc",
        "model-00002-of-00002.safetensors": b"def",
        "consolidated.safetensors": b"abcdef",
        "pytorch_model.bin": b"pickle",
        "README.md": b"# model",
        "original/params.json": b"{}",
        "1_Pooling/config.json": b'{"pooling_mode_lasttoken": true}',
        "original/consolidated.00.pth": b"abcdef",
        "onnx/model.safetensors": b"abcdef",
    },
    "org/pickles": {"config.json": b"{}", "pytorch_model.bin": b"pickle"},
    "org/tiny-GGUF": {
        "README.md": b"# model",
        "tiny-Q4_K_M.gguf": tiny_model([Pair("general.file_type", U32, 15)]),
        "tiny-Q8_0.gguf": tiny_model([Pair("general.file_type", U32, 7)]),
        "tiny-IQ4_XS.gguf": b"GGUF",
        "mmproj-tiny-Q8_0.gguf": b"GGUF",
        "BF16/tiny-BF16-00001-of-00002.gguf": PARTS[0],
        "BF16/tiny-BF16-00002-of-00002.gguf": PARTS[1],
    },
    "org/gated": {"config.json": b"{}", "model.safetensors": b"abc"},
}


class Hub(NamedTuple):
    """A running hub.

    Attributes:
        url: the address of the hub.
        requests: the method, path and token of every request.
    """

    url: str
    requests: list[tuple[str, str, str | None]]


@contextmanager
def serving() -> Iterator[Hub]:
    """Run the hub in a thread."""
    requests: list[tuple[str, str, str | None]] = []

    class Handler(_Handler):
        received = requests

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield Hub(f"http://127.0.0.1:{server.server_port}", requests)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


_CHILD = """
import json, sys
from draftgate.backends.checkpoints import find_checkpoint
from draftgate.backends.errors import CheckpointError
found = []
for name, weights in json.loads(sys.argv[1]):
    try:
        found.append(str(find_checkpoint(name, weights=weights)))
    except CheckpointError as error:
        found.append(f"error: {error}")
print(json.dumps(found))
"""


def find(home: Path, *names: str | tuple[str, bool], **environment: str) -> tuple[list[str], str]:
    """Find checkpoints in a new process, because the library reads its environment only once.

    Args:
        home: directory of the cache.
        names: names of checkpoints. A pair of a name and False requests no weights.
        environment: further variables for the library.

    Returns:
        The directory of each name, or `error: ` and the message, and the output to stderr.
    """
    pairs = [name if isinstance(name, tuple) else (name, True) for name in names]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k}
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, json.dumps(pairs)],
        cwd=ROOT,
        env=clean | {"HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout), done.stderr


class _Handler(BaseHTTPRequestHandler):
    """Request handler that serves the repositories, trees and files of `MODELS`."""

    received: list[tuple[str, str, str | None]]

    def do_HEAD(self) -> None:
        self._respond()

    def do_GET(self) -> None:
        self._respond()

    def log_message(self, *args: object) -> None:
        """Discard the message."""

    def _respond(self) -> None:
        token = self.headers.get("Authorization")
        path = unquote(urlsplit(self.path).path)
        self.received.append((self.command, path, token))
        parts = path.strip("/").removeprefix("api/models/").split("/")
        repo, verb, revision = "/".join(parts[:2]), *(parts[2:4] or ["revision", "main"])
        files = MODELS.get(repo)
        if files is None:
            self._refuse(404, "RepoNotFound")
        elif repo == "org/gated" and token != "Bearer hf_good":
            self._refuse(403 if token else 401, "GatedRepo")
        elif revision not in {"main", "v1", COMMIT}:
            self._refuse(404, "RevisionNotFound")
        elif verb == "revision":
            self._send(json.dumps({"id": repo, "modelId": repo, "sha": COMMIT}).encode())
        elif verb == "tree":
            self._send(json.dumps([_entry(name, body) for name, body in files.items()]).encode())
        else:
            self._send(files["/".join(parts[4:])])

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("ETag", f'"{_digest(body)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _entry(name: str, body: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(body), "oid": _digest(body)}


def _digest(body: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()
