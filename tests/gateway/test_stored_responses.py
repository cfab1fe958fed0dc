"""Tests of stored responses: retrieval, deletion, input items and continuation."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from openai.types.responses import Response
from openai.types.responses.response_item_list import ResponseItemList

from draftgate.backends.types import Delta, FinishReason, GenerationRequest, TokenLogprob
from draftgate.gateway.app import Listening
from draftgate.gateway.http import generation
from draftgate.gateway.state.commands import ReadUsage, StoreCommand, T
from draftgate.gateway.state.memory.responses import MemoryResponses
from draftgate.gateway.state.redis.store import RedisStore
from draftgate.gateway.state.store import StoreError, fallback
from tests.gateway.clients import openai_client
from tests.gateway.harness import ScriptedBackend, accepted_request, client, events, running
from tests.gateway.redis_server import RedisServer
from tests.gateway.tool_models import NOW, WEATHER

PATH = "/v1/responses"
TOOLS = [{"type": "function", "strict": None, **tool["function"]} for tool in (WEATHER, NOW)]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 1}}\n</tool_call>'


@pytest.fixture
def node(qwen_node: Listening) -> Listening:
    """A node whose model has Qwen's template."""
    return qwen_node


async def respond(
    backend: ScriptedBackend, http: httpx.AsyncClient, text: str = "Yes.", **body: Any
) -> tuple[GenerationRequest, dict[str, Any]]:
    """Return what the worker gets, and the response object with this text as output."""
    headers = body.pop("headers", {})
    asked = http.post(PATH, json={"input": "hi", **body}, headers=headers)
    sending = asyncio.create_task(asked)
    request = await accepted_request(backend, sending)
    backend.emit(request, text, last=True)
    response = await sending
    assert response.status_code == 200, response.text
    return request, events(response.text)[-2]["response"] if body.get("stream") else response.json()


async def refusal(sending: Any) -> tuple[int, str | None, str]:
    """Return status, parameter and code of an error."""
    response = await sending
    error = response.json()["error"]
    return response.status_code, error["param"], error["code"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_response_can_be_retrieved_as_soon_as_it_has_ended(
    qwen: ScriptedBackend, http: httpx.AsyncClient, stream: bool
) -> None:
    """A retrieved response equals the response that the client got, also after a stream."""
    _, sent = await respond(qwen, http, stream=stream, metadata={"k": "v"})
    assert sent["store"] is True
    found = await http.get(f"{PATH}/{sent['id']}")
    assert (found.status_code, found.json()) == (200, sent)
    Response.model_validate(found.json())


async def test_response_with_store_false_is_not_stored(
    qwen: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """The server stores nothing of a request with `store: false`, and says so in the response."""
    for stream in (False, True):
        _, sent = await respond(qwen, http, store=False, stream=stream)
        assert sent["store"] is False
        unknown = (404, None, "response_not_found")
        assert await refusal(http.get(f"{PATH}/{sent['id']}")) == unknown
        body = {"input": "x", "previous_response_id": sent["id"]}
        missing = (400, "previous_response_id", "previous_response_not_found")
        assert await refusal(http.post(PATH, json=body)) == missing


async def test_events_say_that_the_response_is_stored(
    qwen: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """Every snapshot in a stream says whether the response is stored."""
    for store in (True, False):
        sending = asyncio.create_task(
            http.post(PATH, json={"input": "hi", "stream": True, "store": store})
        )
        qwen.emit(await accepted_request(qwen, sending), "ok", last=True)
        sent = [one["response"] for one in events((await sending).text) if "response" in one]
        assert [one["store"] for one in sent] == [store] * 3


async def test_failed_stream_is_not_stored(qwen: ScriptedBackend, http: httpx.AsyncClient) -> None:
    """A stream that fails reports that its response is not stored."""
    async with http.stream("POST", PATH, json={"input": "hi", "stream": True}) as response:
        request = await qwen.submitted.get()
        qwen.emit(request, "half")
        lines = response.aiter_lines()
        begun = [await anext(lines)]
        qwen.crash("device lost")
        text = "\n".join([*begun, *[line async for line in lines]])
    failed = events(text)[-2]["response"]
    assert (failed["status"], failed["store"]) == ("failed", False)
    assert (await http.get(f"{PATH}/{failed['id']}")).status_code == 404


async def test_continuation_has_the_prompt_of_the_whole_conversation(
    qwen: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """A continued response gets earlier inputs and outputs, and then its own input."""
    turns: list[dict[str, Any]] = []
    previous = None
    for asked, said in (("One?", "First."), ("Two?", "Second."), ("Three?", "Third.")):
        turns.append({"role": "user", "content": asked})
        continued, sent = await respond(
            qwen, http, said, input=asked, previous_response_id=previous
        )
        whole, _ = await respond(qwen, http, said, input=turns, store=False)
        assert continued.prompt_ids == whole.prompt_ids
        assert sent["previous_response_id"] == previous
        turns.append({"role": "assistant", "content": said})
        previous = sent["id"]


async def test_calls_are_continued_with_their_outputs_alone(
    qwen: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """An agent continues a response with function calls by sending only their outputs."""
    _, sent = await respond(qwen, http, f"Well.{CALL}", input="Weather?", tools=TOOLS)
    message, call = sent["output"]
    outputs = [{"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}]
    continued, _ = await respond(
        qwen, http, input=outputs, tools=TOOLS, previous_response_id=sent["id"]
    )
    items = [{"role": "user", "content": "Weather?"}, message, call, *outputs]
    whole, _ = await respond(qwen, http, input=items, tools=TOOLS)
    assert continued.prompt_ids == whole.prompt_ids
    without, _ = await respond(qwen, http, input=outputs, previous_response_id=sent["id"])
    assert "sunny" in qwen.tokenizer.decode(without.prompt_ids)


async def test_instructions_are_not_carried_over(
    qwen: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """A continued response has only its own instructions, in front of the conversation."""
    _, first = await respond(qwen, http, instructions="Be brief.")
    request, sent = await respond(
        qwen, http, instructions="Be polite.", previous_response_id=first["id"]
    )
    text = qwen.tokenizer.decode(request.prompt_ids)
    assert "Be brief." not in text
    assert text.index("Be polite.") < text.index("Yes.")
    assert sent["instructions"] == "Be polite."


async def test_input_tokens_include_the_continued_conversation(
    qwen: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """The count of input tokens includes the conversation that the request would continue."""
    _, first = await respond(qwen, http, input="A long first question.")
    body = {"input": "And?", "previous_response_id": first["id"]}
    counted = (await http.post(f"{PATH}/input_tokens", json=body)).json()["input_tokens"]
    request, _ = await respond(qwen, http, **body)
    assert counted == len(request.prompt_ids)


async def test_deleted_response_is_gone_and_its_continuations_stay(
    qwen: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """After a deletion, the response is unknown. Responses that continue it remain complete."""
    _, first = await respond(qwen, http, input="One?")
    _, second = await respond(qwen, http, input="Two?", previous_response_id=first["id"])
    deleted = await http.delete(f"{PATH}/{first['id']}")
    assert deleted.json() == {"id": first["id"], "object": "response", "deleted": True}
    for sending in (
        http.get(f"{PATH}/{first['id']}"),
        http.get(f"{PATH}/{first['id']}/input_items"),
        http.delete(f"{PATH}/{first['id']}"),
    ):
        assert await refusal(sending) == (404, None, "response_not_found")
    third, _ = await respond(qwen, http, previous_response_id=second["id"])
    assert "One?" in qwen.tokenizer.decode(third.prompt_ids)


async def test_responses_of_other_tenants_do_not_exist(qwen: ScriptedBackend) -> None:
    """A client can neither read, list, continue nor delete the response of another API key."""
    keys = ("sk-a", "sk-b")
    async with running(backends=[qwen], api_keys=keys) as gateway, client(gateway) as http:
        own, other = ({"authorization": f"Bearer {key}"} for key in keys)
        _, sent = await respond(qwen, http, headers=own)
        path = f"{PATH}/{sent['id']}"
        for sending in (
            http.get(path, headers=other),
            http.get(f"{path}/input_items", headers=other),
            http.delete(path, headers=other),
        ):
            assert await refusal(sending) == (404, None, "response_not_found")
        body = {"input": "x", "previous_response_id": sent["id"]}
        for endpoint in (PATH, f"{PATH}/input_tokens"):
            missing = (400, "previous_response_id", "previous_response_not_found")
            assert await refusal(http.post(endpoint, json=body, headers=other)) == missing
        assert (await http.get(path, headers=own)).json() == sent
        assert (await http.get(path)).status_code == 401


ITEMS: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "input_text", "text": "Time?"}]},
    {"type": "reasoning", "id": "rs_mine", "encrypted_content": "gAAA"},
    {"type": "message", "role": "assistant", "content": "Wait.", "phase": "commentary"},
    {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}", "id": None},
    {"type": "function_call_output", "call_id": "c", "output": "12:00"},
    {"role": "user", "content": [{"type": "text", "text": "And?"}], "id": "mine"},
]


async def test_input_items_have_the_form_of_openais_types(
    qwen: ScriptedBackend, node: Listening, http: httpx.AsyncClient
) -> None:
    """OpenAI's client reads all input items, page by page, in both orders."""
    _, sent = await respond(qwen, http, input=ITEMS)
    api = openai_client(node.url)
    pages = {
        order: [
            item async for item in api.responses.input_items.list(sent["id"], order=order, limit=2)
        ]
        for order in ("asc", "desc")
    }
    await api.close()
    assert [item.type for item in pages["asc"]] == [
        "message", "message", "reasoning", "message", "function_call", "function_call_output",
        "message",
    ]  # fmt: skip
    assert pages["desc"] == pages["asc"][::-1]
    found = (await http.get(f"{PATH}/{sent['id']}/input_items", params={"order": "asc"})).json()
    ResponseItemList.model_validate(found, strict=True)
    ids = [item["id"] for item in found["data"]]
    assert len(set(ids)) == len(ITEMS)
    assert (ids[2], ids[6]) == ("rs_mine", "mine")
    parts = [item["content"][0] for item in found["data"] if item["type"] == "message"]
    kinds = [part["type"] for part in parts]
    assert kinds == ["input_text", "input_text", "output_text", "input_text"]
    assert [part["text"] for part in parts] == ["Be brief.", "Time?", "Wait.", "And?"]
    assert found["data"][3]["phase"] == "commentary"  # fields that the prompt does not need stay


async def test_pages_of_input_items(qwen: ScriptedBackend, http: httpx.AsyncClient) -> None:
    """The newest items are first by default, and `after` and `has_more` connect the pages."""
    asked = [{"role": "user", "content": str(index), "id": f"i{index}"} for index in range(25)]
    _, sent = await respond(qwen, http, input=asked)

    async def page(**params: Any) -> tuple[list[str], bool, tuple[str | None, str | None]]:
        found = (await http.get(f"{PATH}/{sent['id']}/input_items", params=params)).json()
        assert found["object"] == "list"
        ids = [item["id"] for item in found["data"]]
        return ids, found["has_more"], (found["first_id"], found["last_id"])

    expected = [f"i{index}" for index in range(24, 4, -1)]
    assert await page() == (expected, True, ("i24", "i5"))
    rest = ["i4", "i3", "i2", "i1", "i0"]
    assert await page(after="i5") == (rest, False, ("i4", "i0"))
    assert await page(after="i0") == ([], False, (None, None))
    assert await page(order="asc", limit=3, after="i1") == (["i2", "i3", "i4"], True, ("i2", "i4"))
    assert await page(limit=100, after="i24", order="asc") == ([], False, (None, None))
    assert (await page(limit=25))[1] is False
    for params, param in (
        ({"limit": 0}, "limit"), ({"limit": 101}, "limit"), ({"limit": "x"}, "limit"),
        ({"order": "up"}, "order"), ({"after": "i25"}, "after"),
    ):  # fmt: skip
        refused = await refusal(http.get(f"{PATH}/{sent['id']}/input_items", params=params))
        assert refused == (400, param, "invalid_value")


async def test_input_items_include_the_continued_conversation(
    qwen: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """The input items of a continued response begin with those of the earlier responses."""
    _, first = await respond(qwen, http, "First.", input="One?")
    _, second = await respond(qwen, http, input="Two?", previous_response_id=first["id"])
    path = f"{PATH}/{second['id']}/input_items"
    items = (await http.get(path, params={"order": "asc"})).json()["data"]
    assert [item["content"][0]["text"] for item in items] == ["One?", "First.", "Two?"]
    assert items[1]["id"] == first["output"][0]["id"]
    assert len({item["id"] for item in items}) == 3


async def test_log_probabilities_stay_out_of_continuations(
    qwen: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """A stored response keeps its log probabilities, and its continuation does not copy them."""
    delta = Delta(0, (1,), "ok", (TokenLogprob(1, -0.5),), FinishReason.STOP)
    sending = asyncio.create_task(
        http.post(PATH, json={"input": "hi", "include": ["message.output_text.logprobs"]})
    )
    request = await accepted_request(qwen, sending)
    qwen.sinks.deliver([(request.request_id, delta)])
    sent = (await sending).json()
    found = (await http.get(f"{PATH}/{sent['id']}")).json()
    assert found == sent
    assert len(found["output"][0]["content"][0]["logprobs"]) == 1
    _, second = await respond(qwen, http, previous_response_id=sent["id"])
    items = (await http.get(f"{PATH}/{second['id']}/input_items")).json()["data"]
    assert items[1]["content"] == [{"type": "output_text", "text": "ok", "annotations": []}]


async def test_stream_of_a_stored_response_is_refused(
    qwen: ScriptedBackend, http: httpx.AsyncClient
) -> None:
    """The server refuses to stream a stored response, and accepts `stream=false`."""
    _, sent = await respond(qwen, http)
    path = f"{PATH}/{sent['id']}"
    refused = await refusal(http.get(path, params={"stream": "true"}))
    assert refused == (400, "stream", "unsupported_parameter")
    assert (await http.get(path, params={"stream": "false"})).json() == sent


async def test_conversation_above_the_body_limit_is_not_stored(qwen: ScriptedBackend) -> None:
    """A conversation above the limit of bodies is not stored, and the response says so."""
    async with running(backends=[qwen], max_body_bytes=6000) as gateway, client(gateway) as http:
        _, first = await respond(qwen, http, input="x " * 100)
        assert first["store"] is True
        _, second = await respond(
            qwen, http, input="x " * 100, metadata={str(i): "v" * 500 for i in range(9)},
            previous_response_id=first["id"],
        )  # fmt: skip
        assert second["store"] is False
        assert (await http.get(f"{PATH}/{second['id']}")).status_code == 404


async def test_node_without_memory_for_responses_stores_none(qwen: ScriptedBackend) -> None:
    """With `--response-store-bytes 0`, no response is stored, and responses say so."""
    async with running(backends=[qwen], response_store_bytes=0) as gateway, client(gateway) as http:
        _, sent = await respond(qwen, http, store=True)
        assert sent["store"] is False
        assert (await http.get(f"{PATH}/{sent['id']}")).status_code == 404


async def test_metrics_have_the_stored_responses(qwen: ScriptedBackend) -> None:
    """The metrics have the stored responses, their bytes and evictions. During an outage of the
    store, they keep the last values."""

    async def shown() -> list[float]:
        page = (await http.get("/metrics")).text.splitlines()
        names = ("stored_responses", "stored_response_bytes", "evicted_responses_total")
        starts = [f"draftgate_{name}{{" for name in names]
        return [float(one.split()[-1]) for start in starts for one in page if start in one]

    async with running(backends=[qwen]) as gateway, client(gateway) as http:
        assert await shown() == [0, 0, 0]
        _, sent = await respond(qwen, http)
        one_bytes = (await gateway.node.responses.call(ReadUsage())).bytes
        assert one_bytes > len(sent["id"])
        assert await shown() == [1, one_bytes, 0]
        # The measured times in a response have a varying number of digits.
        gateway.node.responses = MemoryResponses(5 * one_bytes // 2, 60.0)
        for _ in range(4):
            await respond(qwen, http)
        two_bytes = (await gateway.node.responses.call(ReadUsage())).bytes
        assert await shown() == [2, two_bytes, 2]
        gateway.node.responses = UnreachableStore(1, 1)
        assert (await shown())[:2] == [2, two_bytes]


class UnreachableStore(MemoryResponses):
    """A store that does not respond, as `guarded_responses` reports this."""

    async def call(self, command: StoreCommand[T]) -> T:
        return fallback(command, StoreError("unreachable"))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_outage_of_the_store_fails_only_requests_that_need_it(
    qwen: ScriptedBackend, node: Listening, http: httpx.AsyncClient, stream: bool
) -> None:
    """Without its store, a node still responds, and reports that the response is not stored."""
    node.node.responses = UnreachableStore(1, 1)
    _, sent = await respond(qwen, http, "Hello.", stream=stream)
    assert (sent["store"], sent["output"][0]["content"][0]["text"]) == (False, "Hello.")
    body = {"input": "x", "previous_response_id": sent["id"]}
    for sending in (
        http.get(f"{PATH}/{sent['id']}"),
        http.get(f"{PATH}/{sent['id']}/input_items"),
        http.delete(f"{PATH}/{sent['id']}"),
        http.post(PATH, json=body),
    ):
        refused = await sending
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")


async def test_another_gateway_continues_a_response(
    qwen: ScriptedBackend, redis_server: RedisServer
) -> None:
    """A response that one gateway has stored in Redis is continued and deleted on another."""
    async with (
        running(backends=[qwen]) as one,
        running(backends=[qwen]) as two,
        client(one) as first,
        client(two) as second,
    ):
        for gateway in (one, two):
            gateway.node.responses = RedisStore.of_responses(redis_server.url, "p", 1 << 20, 60.0)
        _, sent = await respond(qwen, first, "First.", input="One?")
        assert (await second.get(f"{PATH}/{sent['id']}")).json() == sent
        request, _ = await respond(qwen, second, previous_response_id=sent["id"])
        text = qwen.tokenizer.decode(request.prompt_ids)
        assert text.index("One?") < text.index("First.") < text.index("hi")
        assert (await second.delete(f"{PATH}/{sent['id']}")).status_code == 200
        assert (await first.get(f"{PATH}/{sent['id']}")).status_code == 404
        for gateway in (one, two):
            await gateway.node.responses.close()


async def test_large_conversation_is_parsed_in_a_thread(
    qwen: ScriptedBackend, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short request that continues a long conversation does not hold the event loop."""
    offloaded = []
    original = generation.offload

    async def offload(work: Any, *args: Any) -> Any:
        offloaded.append(work)
        return await original(work, *args)

    long = [{"role": "user", "content": "hi", "unknown": "x" * 20_000}]
    _, sent = await respond(qwen, http, input=long)
    monkeypatch.setattr(generation, "offload", offload)
    await respond(qwen, http, previous_response_id=sent["id"])
    assert len(offloaded) == 1
