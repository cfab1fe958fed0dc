"""`tools` and `tool_choice`: checked, shown to the model, and forced where asked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from draftgate.backends.types import GrammarSpec
from draftgate.gateway.errors import InvalidRequest, Unsupported
from draftgate.gateway.http.requests.limits import FUNCTION_NAME, MAX_TOOLS
from draftgate.gateway.http.requests.schemas import ChatBody, Function, NamedTool, TextFormat, Tool
from draftgate.gateway.http.tools.dialects import Dialect, dialect_of
from draftgate.gateway.http.tools.forcing import calls_grammar

CHOICES: Final = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """What an answer may call.

    Attributes:
        names: of the functions.
        several: whether one answer may have more than one call.
        shown: as chat templates expect them.
        grammar: what forces a call; None leaves it to the model.
    """

    dialect: Dialect
    names: frozenset[str]
    several: bool
    shown: tuple[dict[str, Any], ...]
    grammar: GrammarSpec | None


def offered_tools(wire: ChatBody, template: str | None) -> OfferedTools | None:
    """Return what a chat offers; None without tools, and where none may be called.

    Raises:
        InvalidRequest: a tool or the choice is malformed; it is named.
        Unsupported: the model's template knows no tools, or not how they are called.
    """
    functions = [tool.function for tool in wire.tools or ()]
    chosen = _chosen(wire.tool_choice, functions)
    _check_functions(wire.tools or ())
    if not functions or wire.tool_choice == "none":
        return None
    dialect = dialect_of(template)
    if dialect is None:
        raise Unsupported("tools", " by this model's chat template")
    if wire.response_format is not None and not isinstance(wire.response_format, TextFormat):
        raise Unsupported("response_format", " together with tools")
    named = isinstance(wire.tool_choice, NamedTool)
    several = wire.parallel_tool_calls is not False and not named
    grammar = None
    if named or chosen == "required":
        wanted = [f for f in functions if not named or f.name == chosen]
        grammar = calls_grammar(dialect, {f.name: _schema(f) for f in wanted}, several=several)
    names = frozenset(function.name for function in functions)
    return OfferedTools(dialect, names, several, tuple(map(_shown, functions)), grammar)


def _chosen(choice: str | NamedTool | None, functions: Sequence[Function]) -> str:
    """Return `none`, `auto`, `required`, or the name of the function to call."""
    if choice is None:
        return "auto"
    if isinstance(choice, str):
        if choice not in CHOICES:
            known = ", ".join(CHOICES)
            raise InvalidRequest(
                f"tool_choice: must be one of {known}, or name a function, not {choice!r}",
                "tool_choice",
            )
        if choice == "required" and not functions:
            raise InvalidRequest("tool_choice: only together with tools", "tool_choice")
        return choice
    name = choice.function.name
    if all(name != function.name for function in functions):
        raise InvalidRequest(
            f"tool_choice.function.name: {name!r} is none of the tools", "tool_choice.function.name"
        )
    return name


def _check_functions(tools: Sequence[Tool]) -> None:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools: at most {MAX_TOOLS}, not {len(tools)}", "tools")
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        function, where = tool.function, f"tools[{i}].function"
        if not re.fullmatch(FUNCTION_NAME, function.name):
            raise InvalidRequest(
                f"{where}.name: must be 1 to 64 letters, digits, _ or -", f"{where}.name"
            )
        if function.name in seen:
            raise InvalidRequest(f"{where}.name: {function.name!r} twice", f"{where}.name")
        seen.add(function.name)
        if (function.parameters or {}).get("type", "object") != "object":
            raise InvalidRequest(
                f"{where}.parameters: must be the schema of an object", f"{where}.parameters"
            )


def _schema(function: Function) -> dict[str, Any]:
    """Return the schema of a function's arguments; without one there are none."""
    if function.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **function.parameters}


def _shown(function: Function) -> dict[str, Any]:
    """Return a tool as templates expect it: in the order in which models were trained to read."""
    shown: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        shown["description"] = function.description
    if function.parameters is not None:
        shown["parameters"] = function.parameters
    return {"type": "function", "function": shown}
