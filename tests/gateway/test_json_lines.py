"""Tests of files of records: missing folders, full disks, and the audit log."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest

from draftgate.gateway.app import Listening, StartError, build_node
from draftgate.gateway.cluster import heartbeat
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.json_lines import MOST_UNWRITTEN, JsonLinesFile
from draftgate.gateway.state.commands import PublishReport
from draftgate.gateway.state.memory.store import MemoryStore
from tests.gateway.harness import (
    PATIENCE_S,
    ScriptedBackend,
    client,
    port_of,
    post_raw,
    running,
    until,
)

PATH = "/v1/completions"
TLS_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
INCOMPLETE_HEADERS = b"GET /health HTTP/1.1\r\n"
LONG_HEADER = INCOMPLETE_HEADERS + b"a: " + b"x" * (33 << 10) + b"\r\n\r\n"
BODY = {"prompt": "secret prompt", "max_tokens": 2}
KEYS = """
keys:
  - {name: one, key: sk-one, requests_per_minute: 1}
  - {name: scraper, key: sk-scrape, role: metrics}
"""


class Record(msgspec.Struct):
    """A record with a number."""

    number: int


class Partial:
    """A file whose disk becomes full in the middle of the first write."""

    def __init__(self, real: Any, then: Callable[[], None]) -> None:
        self._real = real
        self._then = then
        self._full = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._real.close()

    def write(self, data: memoryview) -> int:
        if self._full:
            self._then()
            raise OSError(28, "No space left on device")
        self._full = True
        return int(self._real.write(data[: len(data) // 2]))


@contextmanager
def filling_disk(
    monkeypatch: pytest.MonkeyPatch, then: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Let the next file that is opened have a disk that becomes full.

    Args:
        then: what happens when the disk is full.
    """
    opened = Path.open
    with monkeypatch.context() as patch:

        def open_once(path: Path, mode: str, **options: Any) -> Any:
            if mode != "ab":
                return opened(path, mode, **options)
            patch.setattr(Path, "open", opened)
            return Partial(opened(path, mode, **options), then)

        patch.setattr(Path, "open", open_once)
        yield


def numbers(path: Path) -> list[int]:
    return [json.loads(line)["number"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("setting", ["decisions_file", "audit_file"])
def test_a_file_in_a_missing_folder_stops_the_start(tmp_path: Path, setting: str) -> None:
    """The start fails with one line that names the setting, the file and the problem."""
    path = tmp_path / "missing" / "file.jsonl"
    flag = "--" + setting.replace("_", "-")
    with pytest.raises(StartError, match=f"{flag} .*file.jsonl: No such file"):
        build_node(ServeConfig(backend="sim", **{setting: str(path)}))


async def test_a_full_disk_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """While the disk is full, one warning is logged and all records wait. They are written in order
    as soon as the disk has space."""
    caplog.set_level(logging.INFO, "draftgate")
    path, real = tmp_path / "link.jsonl", tmp_path / "real.jsonl"
    path.symlink_to("/dev/full")
    file = JsonLinesFile(path, "--decisions-file")
    for number in range(3):
        file.append(Record(number))
        await file.flush()
    path.unlink()
    path.symlink_to(real)
    await file.flush()
    await file.flush()
    assert numbers(real) == [0, 1, 2]
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "cannot write --decisions-file; records wait"),
        ("INFO", "--decisions-file is written again"),
    ]


def test_a_failed_write_leaves_no_part_of_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a write that stored only a part, the file ends with the last complete record."""
    path = tmp_path / "file.jsonl"
    file = JsonLinesFile(path, "--audit-file")
    file.append(Record(1))
    file.write()
    file.append(Record(2))
    with filling_disk(monkeypatch), pytest.raises(OSError, match="No space"):
        file.write()
    assert numbers(path) == [1]
    file.write()
    assert numbers(path) == [1, 2]


def test_a_record_begins_a_line_after_a_cut_line(tmp_path: Path) -> None:
    """A part of a line, which a crash of the machine leaves, does not spoil the next record."""
    path = tmp_path / "file.jsonl"
    path.write_bytes(b'{"number": 0}\n{"num')
    file = JsonLinesFile(path, "--audit-file")
    for number in (1, 2):
        file.append(Record(number))
        file.write()
    assert path.read_bytes().splitlines()[1] == b'{"num'
    assert [json.loads(line)["number"] for line in path.read_bytes().splitlines()[2:]] == [1, 2]


def test_a_failed_write_removes_no_record_of_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another process has written after the part, the part stays as a line of its own."""
    path = tmp_path / "file.jsonl"
    file, other = JsonLinesFile(path, "--audit-file"), JsonLinesFile(path, "--audit-file")
    other.append(Record(7))
    file.append(Record(1))
    with filling_disk(monkeypatch, other.write), pytest.raises(OSError, match="No space"):
        file.write()
    file.write()
    part, *lines = path.read_text().splitlines()
    assert part == '{"numb'
    assert [json.loads(line)["number"] for line in lines] == [7, 1]


def test_unwritten_records_are_bounded(tmp_path: Path) -> None:
    """A file that cannot be written keeps at most `MOST_UNWRITTEN` records, the latest ones."""
    path = tmp_path / "file.jsonl"
    file = JsonLinesFile(path, "--audit-file")
    for number in range(MOST_UNWRITTEN + 5):
        file.append(Record(number))
    file.write()
    found = numbers(path)
    assert (len(found), found[0]) == (MOST_UNWRITTEN, 5)


async def test_the_audit_log_has_refusals_and_the_use_of_keys(tmp_path: Path) -> None:
    """The audit log has a line for each request with a key and for each refusal, without keys and
    prompts."""
    audit, keys = tmp_path / "audit.jsonl", tmp_path / "keys.yaml"
    await asyncio.to_thread(keys.write_text, KEYS)
    settings = {"api_keys_file": str(keys), "audit_file": str(audit)}
    async with running(**settings) as gateway, client(gateway) as http:
        for key in ("sk-one", "sk-one", "sk-wrong", "sk-scrape", None):
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            await http.post(PATH, json=BODY, headers=headers)
        await http.get("/health")
        foreign = {"origin": "https://a.example", "x-request-id": "mine"}
        await http.get("/v1/models", headers=foreign)
        await gateway.node.heartbeat.write_files()
    text = await asyncio.to_thread(audit.read_text)
    found = [json.loads(line) for line in text.splitlines()]
    assert [(one["tenant"], one["status"], one["code"]) for one in found] == [
        ("one", 200, None),
        ("one", 429, "rate_limit_exceeded"),
        (None, 401, "invalid_api_key"),
        ("scraper", 403, "forbidden"),
        (None, 401, "invalid_api_key"),
        (None, 403, "forbidden_origin"),
    ]
    assert found[0]["key"] == found[1]["key"] != found[2]["key"]
    assert [one["key"] for one in found[4:]] == [None, None]
    assert {one["client"] for one in found} == {"127.0.0.1"}
    assert (found[0]["method"], found[0]["path"]) == ("POST", PATH)
    assert found[-1]["request_id"] == "mine"
    assert "sk-" not in text
    assert "secret prompt" not in text


async def test_the_audit_log_has_requests_whose_client_left(
    tmp_path: Path, scripted: ScriptedBackend
) -> None:
    """A request whose client disconnects is in the audit log with status 499."""
    audit = tmp_path / "audit.jsonl"
    settings = {"api_keys": ("sk-one",), "audit_file": str(audit)}
    async with running(backends=[scripted], **settings) as gateway:
        _, writer = await post_raw(gateway, PATH, BODY, "Authorization: Bearer sk-one\r\n")
        async with asyncio.timeout(PATIENCE_S):
            await scripted.submitted.get()
        writer.close()
        await until(lambda: gateway.node.in_flight == 0)
        await asyncio.sleep(0)
        await gateway.node.heartbeat.write_files()
    (line,) = (await asyncio.to_thread(audit.read_text)).splitlines()
    assert json.loads(line)["status"] == 499


async def test_the_audit_log_of_a_node_without_keys_has_its_refusals(tmp_path: Path) -> None:
    """The audit log has a line for each request that a node without keys refuses, and none for
    requests that it serves or that are malformed."""
    audit = tmp_path / "audit.jsonl"
    settings = {"audit_file": str(audit), "max_body_bytes": 1024, "allowed_hosts": ("a.example",)}
    async with running(**settings, keepalive_timeout_s=0.2) as gateway, client(gateway) as http:
        for body in (BODY, {"prompt": 5}, {"prompt": "x" * 2048}):
            await http.post(PATH, json=body)
        await http.get("/v1/models", headers={"origin": "https://b.example"})
        await http.get("/v1/models", headers={"host": "b.example"})
        for request in (TLS_HELLO, LONG_HEADER, INCOMPLETE_HEADERS):
            await send_bytes(gateway, request)
        await gateway.node.heartbeat.write_files()
    text = await asyncio.to_thread(audit.read_text)
    found = [json.loads(line) for line in text.splitlines()]
    assert [(one["status"], one["code"], one["path"]) for one in found] == [
        (413, "body_too_large", PATH),
        (403, "forbidden_origin", "/v1/models"),
        (403, "forbidden_host", "/v1/models"),
        (400, "invalid_value", None),
        (431, "headers_too_large", None),
        (408, "request_timeout", None),
    ]
    assert {(one["client"], one["tenant"], one["key"]) for one in found} == {
        ("127.0.0.1", None, None)
    }
    assert len({one["request_id"] for one in found}) == len(found)


async def send_bytes(gateway: Listening, data: bytes) -> None:
    """Send bytes, and read until the node closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(gateway))
    writer.write(data)
    await asyncio.wait_for(reader.read(), PATIENCE_S)
    writer.close()


async def test_a_disk_that_hangs_stops_no_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers are reported and leases renewed while a write to a file does not return."""
    reports, hangs, released = Counter[str](), threading.Event(), threading.Event()

    class CountingStore(MemoryStore):
        def publish(self, command: PublishReport) -> bool:
            reports["all"] += 1
            return super().publish(command)

    def hang(_file: JsonLinesFile, _data: bytes) -> None:
        hangs.set()
        released.wait(PATIENCE_S)

    monkeypatch.setattr(JsonLinesFile, "_write", hang)
    monkeypatch.setattr(heartbeat, "HEARTBEAT_S", 0.01)
    path = str(tmp_path / "decisions")
    async with (
        running(store=CountingStore(), decisions_file=path) as gateway,
        client(gateway) as http,
        gateway.node.beating(),
    ):
        assert (await http.post(PATH, json={"prompt": "x", "max_tokens": 2})).status_code == 200
        await until(hangs.is_set)
        before = reports["all"]
        await until(lambda: reports["all"] > before + 2)
        released.set()
