"""Tests of a node with several processes, as its operator runs it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest

from tests.cluster.nodes import NodeProcess, eventually

FLAGS = ("--processes", "2", "--backend", "sim")

SLOW = ("--profile", "h100-8b")
"""A device whose steps take milliseconds, so that a stream of 400 tokens takes seconds."""


@asynccontextmanager
async def running(folder: Path, *flags: str) -> AsyncIterator[NodeProcess]:
    """Start a node with two processes, and kill it at the end."""
    node = NodeProcess("node", folder, *FLAGS, *flags)
    await node.start()
    try:
        await eventually(lambda: _prints_banner(node))
        yield node
    finally:
        await node.close()


async def _prints_banner(node: NodeProcess) -> bool:
    assert node.is_running, node.log_text
    return "is ready" in node.log_text


def fronts(node: NodeProcess) -> list[int]:
    """Return the ids of the processes that accept connections, in the order of their start."""
    return [pid for pid in children_of(node) if _listens(pid, node.port)]


def children_of(node: NodeProcess) -> list[int]:
    """Return the ids of all child processes of a node."""
    text = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text()
    return [int(pid) for pid in text.split()]


def _listens(pid: int, port: int) -> bool:
    process = Path(f"/proc/{pid}")
    inodes: set[str] = set()
    links: set[str] = set()
    # A process may end, and a file be closed, after it was listed.
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in (process / "net/tcp").read_text().splitlines()[1:]:
            if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A":
                inodes.add(f"socket:[{line.split()[9]}]")
        for link in (process / "fd").iterdir():
            with suppress(FileNotFoundError):
                links.add(str(link.readlink()))
    return bool(inodes & links)


def client(node: NodeProcess) -> httpx.AsyncClient:
    """Return a client with a new connection."""
    return httpx.AsyncClient(base_url=node.url, verify=False, timeout=60)


async def completion(node: NodeProcess, tokens: int = 4) -> str:
    """Return the text of a completion over a new connection."""
    body = {"prompt": "def f(", "max_tokens": tokens, "seed": 1, "ignore_eos": True}
    async with client(node) as http:
        response = await http.post("/v1/completions", json=body)
    assert response.status_code == httpx.codes.OK, response.text
    return response.json()["choices"][0]["text"]


async def stream(node: NodeProcess, began: asyncio.Event, key: str) -> str:
    """Return the end of a stream of some seconds."""
    body = {"prompt": "x", "max_tokens": 400, "stream": True, "ignore_eos": True}
    last = ""
    try:
        async with (
            client(node) as http,
            http.stream("POST", "/v1/completions", json=body, headers={"x-api-key": key}) as sent,
        ):
            async for line in sent.aiter_lines():
                began.set()
                last = line or last
    except httpx.HTTPError:
        return "broken"
    return last


async def streams(node: NodeProcess, count: int, key: str = "") -> list[asyncio.Task[str]]:
    """Open streams over connections of their own, and wait until all of them have begun."""
    began = [asyncio.Event() for _ in range(count)]
    tasks = [asyncio.create_task(stream(node, event, key)) for event in began]
    await asyncio.gather(*(event.wait() for event in began))
    return tasks


pytestmark = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="the tests find processes in /proc"
)


async def test_all_processes_serve_and_show_the_whole_node(tmp_path: Path) -> None:
    """Both fronts serve the same worker, and metrics and decisions of either include both."""
    async with running(tmp_path) as node:
        assert len(fronts(node)) == 2
        texts = {await completion(node) for _ in range(16)}
        assert len(texts) == 1

        async def counted() -> bool:
            return await node.metric_sum("draftgate_requests_total") == 16

        await eventually(counted)

        async def listed() -> bool:
            found = [await _decisions(node) for _ in range(8)]
            return all(len(decisions) == 16 for decisions in found)

        await eventually(listed)
        assert await node.stop() == 0
        assert "Traceback" not in node.log_text


async def test_a_dead_front_loses_only_its_own_connections(tmp_path: Path) -> None:
    """The streams of the other front finish, and the dead front starts again."""
    async with running(tmp_path, *SLOW) as node:
        tasks = await streams(node, 16)
        victim, survivor = fronts(node)
        os.kill(victim, signal.SIGKILL)
        endings = await asyncio.gather(*tasks)
        assert set(endings) == {"broken", "data: [DONE]"}
        await eventually(lambda: _has_fronts(node, survivor))
        assert all([await completion(node) for _ in range(8)])
        before = await node.metric_sum("draftgate_requests_total")
        assert before >= endings.count("data: [DONE]")


async def test_new_connections_do_not_wait_for_a_front_that_does_not_run(tmp_path: Path) -> None:
    """The other front serves the connections that the kernel assigns to a stopped front, which
    never accepts them."""
    async with running(tmp_path) as node:
        stopped, _ = fronts(node)
        os.kill(stopped, signal.SIGSTOP)
        try:
            texts = await asyncio.gather(*(completion(node) for _ in range(16)))
        finally:
            os.kill(stopped, signal.SIGCONT)
        assert len(set(texts)) == 1
        assert await node.stop() == 0


async def test_a_front_that_is_stopped_alone_starts_again(tmp_path: Path) -> None:
    """A front that drains ignores new clients at its listener. Its successor accepts them again."""
    async with running(tmp_path) as node:
        stopped, survivor = fronts(node)
        os.kill(stopped, signal.SIGTERM)
        await eventually(lambda: _has_successor(node, stopped))
        os.kill(survivor, signal.SIGSTOP)
        try:
            await asyncio.gather(*(completion(node) for _ in range(16)))
        finally:
            os.kill(survivor, signal.SIGCONT)


async def _has_successor(node: NodeProcess, stopped: int) -> bool:
    found = fronts(node)
    return len(found) == 2 and stopped not in found


async def test_counters_never_decrease_while_requests_run(tmp_path: Path) -> None:
    """Consecutive scrapes reach both fronts while both count tokens, and one of them is killed. No
    scrape shows less than an earlier one."""
    async with running(tmp_path, *SLOW) as node:
        tasks = await streams(node, 8)
        shown = [await node.metric_sum("draftgate_generation_tokens_total") for _ in range(20)]
        os.kill(fronts(node)[0], signal.SIGKILL)
        await asyncio.gather(*tasks)
        shown += [await node.metric_sum("draftgate_generation_tokens_total") for _ in range(20)]
        assert shown == sorted(shown)
        assert shown[0] < shown[-1]


async def _has_fronts(node: NodeProcess, survivor: int) -> bool:
    found = fronts(node)
    return len(found) == 2 and survivor in found


async def test_streams_continue_when_the_worker_process_dies(tmp_path: Path) -> None:
    """Requests that lose their worker continue when its process has started again."""
    async with running(tmp_path, *SLOW) as node:
        (worker,) = set(children_of(node)) - set(fronts(node))
        tasks = await streams(node, 4)
        os.kill(worker, signal.SIGKILL)
        assert await asyncio.gather(*tasks) == ["data: [DONE]"] * 4


async def test_a_signal_drains_all_processes(tmp_path: Path) -> None:
    """SIGTERM lets the open streams of all fronts end, and refuses new connections."""
    async with running(tmp_path, *SLOW) as node:
        tasks = await streams(node, 8)
        children = children_of(node)
        status = await node.stop()
        assert await asyncio.gather(*tasks) == ["data: [DONE]"] * 8
        assert status == 0
        assert not any(_exists(pid) for pid in children)


@pytest.mark.parametrize("target", ["parent", "all"])
async def test_no_stream_ends_with_sighup(tmp_path: Path, target: str) -> None:
    """SIGHUP lets the fronts read their keys again, whether only the parent or each process gets
    it. No process ends, and all streams finish."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys:\n  - {name: one, key: sk-one}\n")
    async with running(tmp_path, *SLOW, "--api-keys-file", str(keys)) as node:
        children = children_of(node)
        tasks = await streams(node, 8, "sk-one")
        keys.write_text("keys:\n  - {name: two, key: sk-two}\n")
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            for pid in (node.pid, *(children if target == "all" else ())):
                os.kill(pid, number)

        async def reloaded() -> bool:
            return node.log_text.count("reloaded the API keys") >= 2

        await eventually(reloaded)
        assert await asyncio.gather(*tasks) == ["data: [DONE]"] * 8
        assert children_of(node) == children
        headers = {"authorization": "Bearer sk-two"}
        for _ in range(8):
            async with client(node) as http:
                assert (await http.get("/v1/models", headers=headers)).status_code == 200
        assert await node.stop() == 0


async def test_no_process_outlives_the_parent(tmp_path: Path) -> None:
    """All processes exit when the parent is killed."""
    async with running(tmp_path) as node:
        children = children_of(node)
        await node.kill()

        async def gone() -> bool:
            return not any(_exists(pid) for pid in children)

        await eventually(gone)


async def test_processes_share_stored_responses(tmp_path: Path) -> None:
    """Any front continues a response that another front has stored."""
    async with running(tmp_path) as node:
        previous = None
        for _ in range(8):
            body = {"input": "x", "max_output_tokens": 2, "previous_response_id": previous}
            async with client(node) as http:
                response = await http.post("/v1/responses", json=body)
            assert response.status_code == httpx.codes.OK, response.text
            previous = response.json()["id"]


async def test_processes_share_the_acceptance_of_drafts(tmp_path: Path) -> None:
    """All fronts decide with the acceptance of drafts in a request of one of them."""
    drafted = {"prompt": "x", "max_tokens": 64, "ignore_eos": True}
    async with running(tmp_path, "--speculation", "fixed:4") as node:
        async with client(node) as http:
            await http.post("/v1/completions", json=drafted)

        async def shared() -> bool:
            found = [await _agreed_drafts(node) for _ in range(8)]
            return all(agreed > 0 for agreed in found)

        await eventually(shared)


async def _agreed_drafts(node: NodeProcess) -> int:
    """Return how many accepted drafts a front knows when it decides about a request."""
    body = {"prompt": "x", "max_tokens": 4, "speculation": {"mode": "off"}}
    async with client(node) as http:  # the list of the same connection is up to date
        request_id = (await http.post("/v1/completions", json=body)).json()["id"]
        decisions = (await http.get("/decisions")).json()["decisions"]
    (decision,) = (one for one in decisions if request_id.endswith(one["request_id"]))
    return decision["request"]["tenant_drafts"]["agreed"]


async def _decisions(node: NodeProcess) -> list[dict]:
    """Return the decisions that a front lists, over a new connection."""
    async with client(node) as http:
        return (await http.get("/decisions")).json()["decisions"]


async def test_a_setting_that_cannot_work_is_one_line(tmp_path: Path) -> None:
    """The reason of a process that cannot start is the last line, and the node exits."""
    node = NodeProcess("node", tmp_path, *FLAGS, "--profile", "no-such-profile")
    await node.start()
    assert await node.exit_status() == 1
    assert "no-such-profile" in node.log_text.splitlines()[-1]
    assert "Traceback" not in node.log_text


def _exists(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


async def test_a_quota_holds_for_all_processes_together(tmp_path: Path) -> None:
    """A key of 30 requests a minute gets 30 requests at once, and one more every two seconds."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: [{name: t, key: sk-t, requests_per_minute: 30}]")
    headers = {"authorization": "Bearer sk-t"}
    body = {"prompt": "x", "max_tokens": 1}
    granted, status = -1, httpx.codes.OK
    async with running(tmp_path, "--api-keys-file", str(keys)) as node:
        begin_s = time.monotonic()
        while status == httpx.codes.OK:
            granted += 1
            async with client(node) as http:
                response = await http.post("/v1/completions", json=body, headers=headers)
            status = response.status_code
        elapsed_s = time.monotonic() - begin_s
    assert status == httpx.codes.TOO_MANY_REQUESTS
    assert 30 <= granted <= 30 + elapsed_s / 2
