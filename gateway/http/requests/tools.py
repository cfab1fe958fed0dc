"""The parameters `tools` and `tool_choice`, from validation to the grammar of a forced call."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args

import msgspec

from draftgate.backends.call_form import CallForm, ContentForm, FunctionForm
from draftgate.backends.errors import RequestRejected
from draftgate.backends.types import GrammarKind, GrammarSpec
from draftgate.gateway.errors import Unsupported, invalid
from draftgate.gateway.http.requests.limits import FUNCTION_NAME, MAX_TOOLS
from draftgate.gateway.http.requests.schemas import (
    AllowedTool,
    AllowedToolChoice,
    AllowedTools,
    ChatBody,
    Function,
    NamedTool,
    Tool,
    ToolMode,
)
from draftgate.gateway.served_model import ServedModel
from draftgate.gateway.tools.dialects import Dialect
from draftgate.gateway.tools.parsing import CallParser

CHOICES: Final[tuple[str, ...]] = get_args(ToolMode)


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The functions that a response may call.

    Attributes:
        names: names of the functions.
        several: whether a response may have more than one call.
        shown: the tools in the form that chat templates expect.
        schemas: the JSON schemas of the arguments, by name of the function that may be called.
        strict: the field `strict` of each function, by its name.
        forced: whether the response must call one of the functions in `schemas`.
    """

    dialect: Dialect
    names: frozenset[str]
    several: bool
    shown: tuple[dict[str, Any], ...]
    schemas: Mapping[str, Mapping[str, Any]]
    strict: Mapping[str, bool | None]
    forced: bool

    def parser(self) -> CallParser:
        """Return a parser of the calls in a response."""
        names = self.schemas if self.forced else self.names
        return CallParser(self.dialect, names, several=self.several, forced=self.forced)

    def grammar(self, content: GrammarSpec | None) -> GrammarSpec | None:
        """Return the grammar of a response, or None without constraints.

        Args:
            content: the grammar of a response without calls, or None.
        """
        if self.forced:
            return calls_grammar(
                self.dialect, self.schemas, several=self.several, strict=self.strict
            )
        if content is None:
            return None
        return calls_grammar(
            self.dialect,
            self.schemas,
            several=self.several,
            content=content,
            strict=self.strict,
        )


def offered_tools(wire: ChatBody, served: ServedModel) -> OfferedTools | None:
    """Return the tools of a chat, or None if it has no tools or `tool_choice` is `none`.

    Raises:
        InvalidRequest: a tool or the choice is malformed.
        Unsupported: the model gets no tools.
        RequestRejected: the model has no chat template.
    """
    if wire.tools is None and wire.tool_choice is None:
        return None  # the usual case
    functions, choice = [tool.function for tool in wire.tools or ()], wire.tool_choice
    _check_functions(wire.tools or ())
    if isinstance(choice, AllowedToolChoice):
        functions = _allowed(choice.allowed_tools, functions)
        choice = choice.allowed_tools.mode
    chosen = _chosen(choice, functions)
    if not functions or choice == "none":
        return None
    dialect = served.dialect
    if dialect is None:
        if served.tokenizer.tool_template is None:
            raise RequestRejected("this model has no chat template", param="messages")
        raise Unsupported("tools", " by this model's chat template")
    named = isinstance(choice, NamedTool)
    return OfferedTools(
        dialect,
        frozenset(function.name for function in functions),
        wire.parallel_tool_calls is not False and not named,
        tuple(map(_shown, functions)),
        {f.name: _schema(f) for f in functions if not named or f.name == chosen},
        {f.name: f.strict for f in functions},
        named or chosen == "required",
    )


def calls_grammar(
    dialect: Dialect,
    functions: Mapping[str, Mapping[str, Any]],
    *,
    several: bool,
    content: GrammarSpec | None = None,
    strict: Mapping[str, bool | None] | None = None,
) -> GrammarSpec:
    """Return the grammar of a response that consists of calls, or of content.

    Args:
        functions: the JSON schemas of the arguments, which are objects, by name of the function.
        several: whether the response may have more than one call, if the dialect supports that.
        content: the grammar of a response without calls, or None to force a call.
        strict: the field `strict` of the functions, by name.
    """
    form = CallForm(
        tuple(
            FunctionForm(
                f'{{"name": {json.dumps(name)}, "{dialect.arguments}": ',
                dict(schema),
                "}",
                None if strict is None else strict.get(name),
            )
            for name, schema in functions.items()
        ),
        dialect.opened,
        dialect.between if several else None,
        dialect.closed,
        dialect.markers,
        None if content is None else ContentForm(content.kind, content.text, content.strict),
    )
    param = "tools" if content is None else content.param
    return GrammarSpec(GrammarKind.CALLS, msgspec.json.encode(form).decode(), param)


def _allowed(allowed: AllowedTools, functions: Sequence[Function]) -> list[Function]:
    """Return the functions that the client allows, in the order of `tools`.

    The prompt shows only these functions, because with `auto` nothing else keeps the model from
    calling the others.
    """
    _check_count(allowed.tools, "tool_choice.allowed_tools.tools")
    known, names = {function.name for function in functions}, set[str]()
    for i, tool in enumerate(allowed.tools):
        if tool.function.name not in known:
            where = f"tool_choice.allowed_tools.tools[{i}].function.name"
            raise invalid(where, f"{tool.function.name!r} is not one of the tools")
        names.add(tool.function.name)
    return [function for function in functions if function.name in names]


def _chosen(choice: str | NamedTool | None, functions: Sequence[Function]) -> str:
    """Return `none`, `auto`, `required`, or the name of the function to call."""
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if all(name != function.name for function in functions):
            raise invalid("tool_choice.function.name", f"{name!r} is not one of the tools")
        return name
    if choice not in {None, *CHOICES}:
        known = ", ".join(CHOICES)
        raise invalid("tool_choice", f"must be one of {known}, or name functions, not {choice!r}")
    if choice == "required" and not functions:
        raise invalid("tool_choice", "requires tools")
    return choice or "auto"


def _check_count(tools: Sequence[Tool | AllowedTool], where: str) -> None:
    if len(tools) > MAX_TOOLS:
        raise invalid(where, f"must have at most {MAX_TOOLS} entries, not {len(tools)}")


def _check_functions(tools: Sequence[Tool]) -> None:
    _check_count(tools, "tools")
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        function, where = tool.function, f"tools[{i}].function"
        if not re.fullmatch(FUNCTION_NAME, function.name):
            raise invalid(f"{where}.name", "must be 1 to 128 letters, digits, _ or -")
        if function.name in seen:
            raise invalid(f"{where}.name", f"{function.name!r} occurs twice")
        seen.add(function.name)
        if (function.parameters or {}).get("type", "object") != "object":
            raise invalid(f"{where}.parameters", "must be the schema of an object")


def _schema(function: Function) -> dict[str, Any]:
    """Return the schema of a function's arguments, or of an empty object without parameters."""
    if function.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **function.parameters}


def _shown(function: Function) -> dict[str, Any]:
    """Return a tool for the template, with its keys in the order of training data."""
    shown: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        shown["description"] = function.description
    if function.parameters is not None:
        shown["parameters"] = function.parameters
    return {"type": "function", "function": shown}
