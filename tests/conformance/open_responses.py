"""The required fields of Open Responses, version 2026-04-24, and checks of objects and events."""

from __future__ import annotations

from typing import Any, Final

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

NULL = type(None)

RESPONSE_FIELDS: Final[dict[str, type | tuple[type, ...]]] = {
    "id": str, "object": str, "created_at": int, "completed_at": (int, NULL), "status": str,
    "incomplete_details": (dict, NULL), "model": str, "previous_response_id": (str, NULL),
    "instructions": (str, NULL), "output": list, "error": (dict, NULL), "tools": list,
    "tool_choice": (str, dict), "truncation": str, "parallel_tool_calls": bool, "text": dict,
    "top_p": float, "presence_penalty": float, "frequency_penalty": float, "top_logprobs": int,
    "temperature": float, "reasoning": (dict, NULL), "usage": (dict, NULL),
    "max_output_tokens": (int, NULL), "max_tool_calls": (int, NULL), "store": bool,
    "background": bool, "service_tier": str, "metadata": dict, "safety_identifier": (str, NULL),
    "prompt_cache_key": (str, NULL),
}  # fmt: skip
"""The required fields of the response object and the types of their values."""

ITEM_FIELDS: Final = {
    "message": {"id", "status", "role", "content"},
    "function_call": {"id", "status", "call_id", "name", "arguments"},
}
"""The required fields of output items, by type."""

_AT_ITEM: Final = {"output_index"}
_IN_PART: Final = {"item_id", "output_index", "content_index"}

EVENT_FIELDS: Final[dict[str, set[str]]] = {
    "response.created": {"response"},
    "response.in_progress": {"response"},
    "response.completed": {"response"},
    "response.incomplete": {"response"},
    "response.failed": {"response"},
    "response.output_item.added": {"item", *_AT_ITEM},
    "response.output_item.done": {"item", *_AT_ITEM},
    "response.content_part.added": {"part", *_IN_PART},
    "response.content_part.done": {"part", *_IN_PART},
    "response.output_text.delta": {"delta", *_IN_PART},
    "response.output_text.done": {"text", *_IN_PART},
    "response.function_call_arguments.delta": {"delta", "item_id", *_AT_ITEM},
    "response.function_call_arguments.done": {"arguments", "item_id", *_AT_ITEM},
}
"""The required fields of events, by type, in addition to `type` and `sequence_number`."""

_events: Final = TypeAdapter(ResponseStreamEvent)


def check_response(body: dict[str, Any]) -> None:
    """Assert that a response object and its items have every required field."""
    Response.model_validate(body)
    wrong = {
        name: body.get(name, "missing")
        for name, types in RESPONSE_FIELDS.items()
        if name not in body or not isinstance(body[name], types)
    }
    assert wrong == {}
    assert body["object"] == "response"
    assert set(body["reasoning"]) == {"effort", "summary"}
    assert (body["completed_at"] is not None) == (body["status"] == "completed")
    for item in body["output"]:
        assert ITEM_FIELDS[item["type"]] <= item.keys()
        assert item.get("phase") in {None, "commentary", "final_answer"}


def check_stream(events: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Assert that events are complete and in order, and return the final response.

    Args:
        events: the name and the data of each event.
    """
    for number, (name, data) in enumerate(events):
        assert data["type"] == name
        assert EVENT_FIELDS[name] <= data.keys()
        assert data["sequence_number"] == number
        _events.validate_python(data)
        if "response" in data:
            check_response(data["response"])
    assert [name for name, _ in events[:2]] == ["response.created", "response.in_progress"]
    name, last = events[-1]
    assert name == f"response.{last['response']['status']}"
    return last["response"]
