"""Tools of models whose chat template has none in a known format.

The prompt describes the tools in text, in the format of `dialects.DESCRIBED`. Calls and their
results in earlier messages become text too, because such a template knows neither.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from draftgate.backends.chat_template import RawJson

Messages = Sequence[Mapping[str, Any]]

_INSTRUCTIONS: Final = """\
# Tools

You can call functions. Their names, descriptions and the JSON schemas of their parameters are:
<tools>
{tools}
</tools>

To call a function, write a JSON object with its name and its arguments between tags, and nothing \
else:
<tool_call>
{{"name": "NAME OF THE FUNCTION", "arguments": {{"PARAMETER": "VALUE"}}}}
</tool_call>
{number}
The result of a call follows between <tool_response> and </tool_response>. Use it to answer the \
user. If no function is needed, answer without a call."""

_NUMBERS: Final = {
    True: "For several calls, repeat the tags for each one.",
    False: "Call at most one function.",
}


def instructions(tools: Messages, *, several: bool) -> str:
    """Return the description of tools for a prompt.

    Args:
        tools: functions on offer, in the form that templates expect.
        several: whether a response may have more than one call.
    """
    shown = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return _INSTRUCTIONS.format(tools=shown, number=_NUMBERS[several])


def without_calls(messages: Messages) -> list[dict[str, Any]]:
    """Return messages whose calls and results are texts of the assistant and of the user.

    Many templates require that both alternate, so such a text becomes part of a neighbour with the
    same role.
    """
    found: list[dict[str, Any]] = []
    last_is_text = False  # whether the last message was a call or a result
    for message in messages:
        calls = message.get("tool_calls")
        is_text = message["role"] == "tool" or bool(calls)
        plain = {key: message[key] for key in message if key not in {"tool_calls", "tool_call_id"}}
        if message["role"] == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            plain = {"role": "user", "content": result}
        elif calls:
            plain["content"] = "\n".join([*_texts(message["content"]), *map(_call, calls)])
        if found and (is_text or last_is_text) and found[-1]["role"] == plain["role"]:
            plain["content"] = "\n".join([*_texts(found.pop()["content"]), plain["content"]])
        found.append(plain)
        last_is_text = is_text
    return found


def placements(messages: Messages, text: str) -> Iterator[list[dict[str, Any]]]:
    """Yield messages with a text of the system, and then with the text in the user's first message.

    Some templates reject or omit messages of the system.
    """
    plain = [dict(message) for message in messages]
    if plain[0]["role"] == "system":
        yield [{**plain[0], "content": _joined(plain[0]["content"], text)}, *plain[1:]]
    else:
        yield [{"role": "system", "content": text}, *plain]
    for index, message in enumerate(plain):
        if message["role"] == "user":
            changed = {**message, "content": _joined(text, message["content"])}
            yield [*plain[:index], changed, *plain[index + 1 :]]
            return


def _joined(first: str, second: str) -> str:
    return "\n\n".join([*_texts(first), *_texts(second)])


def _texts(content: str) -> tuple[str, ...]:
    return (content,) if content else ()


def _call(call: Mapping[str, Any]) -> str:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    # Arguments that are no JSON object stay as the model wrote them.
    is_raw = isinstance(arguments, RawJson)
    written = str(arguments) if is_raw else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {written}}}\n</tool_call>'
