"""Files and batches through OpenAI's client, on simulated workers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI
from openai.types import Batch

from draftgate.gateway.app import Listening
from draftgate.gateway.batches.files import FileObject, Files
from draftgate.policies.types import OFFLINE_PRIORITY
from tests.gateway.harness import (
    PATIENCE_S,
    ScriptedBackend,
    accepted_request,
    client,
    eventually,
    running,
)
from tests.upstream_settings import at

CHATS = "/v1/chat/completions"
ENDED = {"completed", "failed", "expired", "cancelled"}


def chat(custom_id: str, **body: Any) -> dict[str, Any]:
    """Return a line with a chat."""
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, **body}
    return {"custom_id": custom_id, "method": "POST", "url": CHATS, "body": body}


@asynccontextmanager
async def client_of(gateway: Listening, key: str = "unused") -> AsyncIterator[AsyncOpenAI]:
    """Open OpenAI's client."""
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) as found:
        yield found


async def begin(
    api: AsyncOpenAI, lines: list[dict[str, Any] | str], endpoint: str = CHATS, **fields: Any
) -> Batch:
    """Upload lines and create a batch of them."""
    rows = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file = await api.files.create(file=("in.jsonl", "\n".join(rows).encode()), purpose="batch")
    fields = {"completion_window": "24h", **fields}
    return await api.batches.create(input_file_id=file.id, endpoint=endpoint, **fields)


async def end_of(api: AsyncOpenAI, batch: Batch) -> Batch:
    """Return a batch once it has ended."""

    async def has_ended() -> bool:
        nonlocal batch
        batch = await api.batches.retrieve(batch.id)
        return batch.status in ENDED

    await eventually(has_ended)
    return batch


async def waiting(api: AsyncOpenAI, batch: Batch) -> Any:
    """Return a batch once it says what it waits for."""
    found = batch

    async def waits() -> bool:
        nonlocal found
        found = await api.batches.retrieve(batch.id)
        return getattr(found, "waits", None) is not None

    await eventually(waits)
    return found


async def content(api: AsyncOpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    """Return the lines of a file by their custom ids, each of which occurs once."""
    assert file_id is not None
    rows = [json.loads(row) for row in (await api.files.content(file_id)).text.splitlines()]
    found = {row["custom_id"]: row for row in rows}
    assert len(found) == len(rows)
    return found


async def test_a_batch_says_that_it_waits_for_the_budget_of_its_key(tmp_path: Path) -> None:
    """The object of the batch has the error, and the records name the batch of each line."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(
        "prices: {'': {input: 1000000, output: 1000000}}\n"
        "keys: [{name: a, key: sk-a, budget_usd: 0.1}, {name: r, key: sk-r, role: operator}]"
    )
    files = {"files": str(tmp_path / "files"), "batch_concurrency": 1}
    settings = {**files, "api_keys_file": str(keys)}
    async with running(**settings) as gateway, client_of(gateway, "sk-a") as api:
        batch = await begin(api, [chat(f"line-{number}") for number in range(4)])
        found = await waiting(api, batch)
        assert found.status == "in_progress"
        assert found.waits["code"] == "rate_limit_exceeded"
        assert found.waits["message"].startswith("the budget of the key a of 0.1 USD per month")
        async with client(gateway) as http:
            headers = {"authorization": "Bearer sk-r"}
            query = {"q": batch.id}
            records = (await http.get("/records", params=query, headers=headers)).json()["records"]
        assert len(records) >= 2
        assert all(one["client_id"].startswith(f"{batch.id}-") for one in records)


async def test_a_waiting_batch_continues_at_once_when_its_budget_is_raised(tmp_path: Path) -> None:
    """The key file with a higher budget ends the wait, whose time would be minutes."""
    keys = tmp_path / "keys.yaml"
    text = (
        "prices: {'': {input: 1000000, output: 1000000}}\n"
        "keys: [{name: a, key: sk-a, budget_usd: 0.1}]"
    )
    keys.write_text(text)
    files = {"files": str(tmp_path / "files"), "batch_concurrency": 1}
    settings = {**files, "api_keys_file": str(keys)}
    async with running(**settings) as gateway, client_of(gateway, "sk-a") as api:
        batch = await begin(api, [chat(f"line-{number}") for number in range(4)])
        found = await waiting(api, batch)
        assert found.waits["until"] - time.time() > PATIENCE_S
        keys.write_text(text.replace("0.1", "100000"))
        gateway.reload()
        batch = await end_of(api, batch)  # within `PATIENCE_S`
        assert batch.request_counts.completed == 4


async def test_openai_client_runs_a_batch_with_results_and_errors(tmp_path: Path) -> None:
    """Each line gets the response of an online request, or its error in the error file. Files and
    batches can be listed, retrieved and deleted."""
    lines = [chat(f"line-{number}", seed=number) for number in range(12)]
    lines += [chat("bad", max_tokens="many"), chat("stream", stream=True)]
    async with running(files=str(tmp_path)) as gateway, client_of(gateway) as api:
        batch = await begin(api, [*lines, ""], metadata={"job": "nightly"})
        assert (batch.status, batch.expires_at - batch.created_at) == ("validating", 86400)
        batch = await end_of(api, batch)
        assert (batch.status, batch.metadata) == ("completed", {"job": "nightly"})
        counts = batch.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (14, 12, 2)
        output = await content(api, batch.output_file_id)
        for number in range(12):
            online = await api.chat.completions.create(
                model="draftgate-demo", **lines[number]["body"]
            )
            response = output[f"line-{number}"]["response"]
            assert response["status_code"] == 200
            assert response["body"]["choices"][0]["message"]["content"] == (
                online.choices[0].message.content
            )
        errors = await content(api, batch.error_file_id)
        assert {
            name: row["response"]["body"]["error"]["param"] for name, row in errors.items()
        } == {
            "bad": "max_tokens",
            "stream": "stream",
        }
        assert [found.id async for found in api.batches.list()] == [batch.id]
        files = [file async for file in api.files.list(purpose="batch")]
        assert [(file.id, file.filename) for file in files] == [(batch.input_file_id, "in.jsonl")]
        assert len([file async for file in api.files.list(limit=1)]) == 3
        retrieved = await api.files.retrieve(batch.input_file_id)
        sent = (await api.files.content(batch.input_file_id)).content
        assert len(sent) == retrieved.bytes
        assert (await api.files.delete(batch.input_file_id)).deleted
        with pytest.raises(openai.NotFoundError):
            await api.files.content(batch.input_file_id)
        assert gateway.node.files is not None
        assert not gateway.node.files.open_batches()


@pytest.mark.parametrize(
    ("endpoint", "body", "reply"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2}, "text_completion"),
        ("/v1/responses", {"input": "a", "max_output_tokens": 2}, "response"),
    ],
)
async def test_other_endpoints_run_in_batches(
    endpoint: str, body: dict[str, Any], reply: str, tmp_path: Path
) -> None:
    """Completions with several prompts, and responses, run as well."""
    line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}
    async with running(files=str(tmp_path)) as gateway, client_of(gateway) as api:
        batch = await end_of(api, await begin(api, [line], endpoint))
        output = await content(api, batch.output_file_id)
        assert output["a"]["response"]["body"]["object"] == reply


async def test_a_batch_with_invalid_lines_fails_with_all_their_errors(tmp_path: Path) -> None:
    """A line that is not a request, names another endpoint or repeats an id fails the batch."""
    other = {**chat("c"), "url": "/v1/images/generations"}
    lines = [chat("a"), "{", chat("a"), other, {**chat("d"), "method": "GET"}]
    async with running(files=str(tmp_path)) as gateway, client_of(gateway) as api:
        batch = await end_of(api, await begin(api, lines))
        assert batch.status == "failed"
        assert batch.errors is not None
        assert [(one.line, one.code) for one in batch.errors.data or ()] == [
            (2, "invalid_json_line"),
            (3, "duplicate_custom_id"),
            (4, "invalid_url"),
            (5, "invalid_method"),
        ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/images/generations"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "400h"}, "completion_window"),
        ({"metadata": {"a" * 65: "b"}}, "metadata"),
    ],
)
async def test_an_invalid_batch_is_refused_with_its_parameter(
    fields: dict[str, Any], param: str, tmp_path: Path
) -> None:
    """The error has OpenAI's format, and names the parameter."""
    async with running(files=str(tmp_path)) as gateway, client_of(gateway) as api:
        with pytest.raises(openai.BadRequestError) as caught:
            await begin(api, [chat("a")], **{"endpoint": CHATS, **fields})
        assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_a_page_of_files_reads_only_its_records(
    order: Literal["asc", "desc"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page costs the same however many files there are, and leaves out those just deleted."""
    reads, read = list[str](), Files.file

    def counted(self: Files, tenant: str, file_id: str) -> FileObject:
        reads.append(file_id)
        return read(self, tenant, file_id)

    async with running(files=str(tmp_path)) as gateway, client_of(gateway) as api:
        files = [
            await api.files.create(file=(f"{number}.jsonl", b"{}"), purpose="batch")
            for number in range(9)
        ]
        ids = sorted((file.id for file in files), reverse=order == "desc")
        monkeypatch.setattr(Files, "file", counted)
        page = await api.files.list(limit=3, order=order, after=ids[1])
        assert [file.id for file in page.data] == ids[2:5]
        assert reads == ids[2:6]
        assert page.has_more

        listed = Files.files

        def with_deleted(self: Files, tenant: str) -> list[str]:
            found = listed(self, tenant)
            self.delete(tenant, ids[3])
            return found

        monkeypatch.setattr(Files, "files", with_deleted)
        page = await api.files.list(limit=3, order=order, after=ids[1])
        assert [file.id for file in page.data] == [ids[2], *ids[4:6]]


async def test_limits_of_files_and_batches(tmp_path: Path) -> None:
    """A larger file is refused, and a batch with more lines fails."""
    settings = {"files": str(tmp_path), "max_file_bytes": 1000, "max_batch_lines": 2}
    async with running(**settings) as gateway, client_of(gateway) as api:
        with pytest.raises(openai.APIStatusError, match="exceeds 1000 bytes") as caught:
            await api.files.create(file=("in.jsonl", b"x" * 1001), purpose="batch")
        assert caught.value.status_code == 413
        with pytest.raises(openai.BadRequestError, match="purpose: must be batch"):
            await api.files.create(file=("in.jsonl", b"x"), purpose="fine-tune")
        batch = await end_of(api, await begin(api, [chat("a"), chat("b"), chat("c")]))
        assert batch.errors is not None
        assert [one.code for one in batch.errors.data or ()] == ["too_many_requests"]


async def test_files_and_batches_belong_to_the_tenant_of_the_key(tmp_path: Path) -> None:
    """For the key of another tenant, a file or batch does not exist."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: [{name: a, key: key-a}, {name: b, key: key-b}]")
    settings = {"files": str(tmp_path / "files"), "api_keys_file": str(keys)}
    async with running(**settings) as gateway, client_of(gateway, "key-a") as ours:
        batch = await end_of(ours, await begin(ours, [chat("a")]))
        assert batch.output_file_id is not None
        async with client_of(gateway, "key-b") as theirs:
            assert not [found async for found in theirs.files.list()]
            assert not [found async for found in theirs.batches.list()]
            for call in (
                theirs.batches.retrieve(batch.id),
                theirs.batches.cancel(batch.id),
                theirs.files.content(batch.output_file_id),
                theirs.files.delete(batch.output_file_id),
                theirs.batches.create(
                    input_file_id=batch.input_file_id, endpoint=CHATS, completion_window="24h"
                ),
            ):
                with pytest.raises(openai.NotFoundError):
                    await call
        assert await content(ours, batch.output_file_id)


async def test_a_cancelled_batch_keeps_its_results(tmp_path: Path) -> None:
    """A cancellation ends the lines that run, and the output file has the others. Until then, the
    input file cannot be deleted. The lines run with the priority of batches."""
    backend = ScriptedBackend()
    settings = {"backends": [backend], "files": str(tmp_path), "batch_concurrency": 2}
    async with running(**settings) as gateway, client_of(gateway) as api:
        lines = [
            {**chat(name), "url": "/v1/completions", "body": {"prompt": name, "max_tokens": 2}}
            for name in "abcd"
        ]
        batch = await begin(api, lines, "/v1/completions")
        first = await backend.submitted.get()
        second = await backend.submitted.get()
        assert first.service.priority == second.service.priority == OFFLINE_PRIORITY
        backend.emit(first, "done", last=True)
        await backend.submitted.get()
        assert backend.submitted.empty()  # two lines run at a time
        with pytest.raises(openai.ConflictError):
            await api.files.delete(batch.input_file_id)
        assert (await api.batches.cancel(batch.id)).status == "cancelling"
        batch = await end_of(api, batch)
        assert batch.status == "cancelled"
        assert list(await content(api, batch.output_file_id)) == ["a"]
        assert {await backend.abandoned.get() for _ in range(2)}
        assert gateway.node.in_flight == 0
        assert (await api.batches.cancel(batch.id)).status == "cancelled"


async def test_lines_leave_the_capacity_of_a_worker_to_others(tmp_path: Path) -> None:
    """While lines of a batch run on a worker with one sequence, an online request is sent."""
    backend = ScriptedBackend()
    backend.max_sequences = 1
    settings = {"backends": [backend], "files": str(tmp_path)}
    async with running(**settings) as gateway, client_of(gateway) as api, client(gateway) as http:
        line = {**chat("a"), "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 2}}
        await begin(api, [line, {**line, "custom_id": "b"}], "/v1/completions")
        for _ in range(2):
            await backend.submitted.get()
        body = {"prompt": "a", "max_tokens": 2}
        online = asyncio.create_task(http.post("/v1/completions", json=body))
        request = await accepted_request(backend, online)
        assert request.service.priority == 0
        backend.emit(request, "done", last=True)
        assert (await online).status_code == 200


async def test_a_server_without_a_folder_says_how_to_store_files() -> None:
    """Without --files, the endpoints respond with status 501 and the option."""
    async with running() as gateway, client_of(gateway) as api:
        with pytest.raises(openai.APIStatusError, match="--files FOLDER") as caught:
            await api.files.create(file=("in.jsonl", b"x"), purpose="batch")
        assert caught.value.status_code == 501


async def test_lines_run_on_upstream_servers(tmp_path: Path) -> None:
    """Lines are forwarded as online requests are, without the priority of batches, which other
    servers do not know."""
    async with running() as upstream:
        settings = {"backend": "openai", "upstream": at(upstream.url)}
        async with (
            running(files=str(tmp_path), **settings) as gateway,
            client_of(gateway) as api,
        ):
            batch = await end_of(api, await begin(api, [chat("a"), chat("b", max_tokens="x")]))
            output = await content(api, batch.output_file_id)
            assert output["a"]["response"]["body"]["object"] == "chat.completion"
            errors = await content(api, batch.error_file_id)
            assert errors["b"]["response"]["body"]["error"]["param"] == "max_tokens"
