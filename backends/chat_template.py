"""Chat templates: Jinja programs that format a conversation as in the model's training data.

The prompts are identical to those of `transformers` 5 (`apply_chat_template`).

Templates are untrusted code, because checkpoints contain them. A sandbox isolates them from the
process, and bounds the lengths of their output, of repetitions and of ranges. The sandbox bounds
neither their time nor the memory of their variables. Do not load a checkpoint whose template loops
without output or repeatedly doubles a variable.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any, Final

import jinja2
import jinja2.meta
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Scope
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from draftgate.backends.errors import CheckpointError, RequestRejected

MAX_PROMPT_CHARS: Final = 1 << 24
"""Maximum length of a template's prompt: about four million tokens, more than any context."""

_RAW: Final = "\udc80"
"""The stand-in for `RawJson` in written JSON. No decoded request contains a lone surrogate."""

DEFAULT: Final = "default"
TOOL_USE: Final = "tool_use"
"""Names of templates in checkpoints with several templates."""

_OWN: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables that the server sets."""

TEMPLATE_FILES: Final = ("chat_template.jinja", "additional_chat_templates/*.jinja")
"""Template files of a checkpoint, in addition to its `tokenizer_config.json`."""


class PromptEnding(Enum):
    """The end of a prompt."""

    RESPONSE = "the beginning of the model's response"
    MESSAGE = "the end of the last message"
    OPEN = "the text of the last message, which the model continues"


_OPEN_END: Final = "CONTINUE_FINAL_MESSAGE_TAG "
"""The end of a message to continue, which the prompt does not have, as in `transformers` 5. If a
template removes its space, it removes white space at the end of messages."""


@dataclass(frozen=True, slots=True)
class RawJson:
    """JSON that templates write unchanged, even if the text is incomplete or invalid."""

    text: str

    def __str__(self) -> str:
        return self.text


class ChatTemplate:
    """The chat template of a checkpoint, with an optional separate template for tools.

    The object is immutable, so it may render in any thread.

    Attributes:
        for_tools: text of the template that renders tools, or None without a template.
        variables: names that a request may set for the templates, such as `enable_thinking`. Some
            are also names that a template sets itself.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile the templates.

        Args:
            sources: template texts by name, of which only `DEFAULT` and `TOOL_USE` are used.
            special_tokens: token texts by role, such as `bos_token`, as variables of the templates.
            now: clock in local time, because some templates write today's date.

        Raises:
            CheckpointError: a template does not compile.
        """
        environment = _environment(now)
        self._special_tokens = dict(special_tokens)
        self.for_tools = sources.get(TOOL_USE, sources.get(DEFAULT))
        self._templates: dict[str, jinja2.Template] = {}
        names: set[str] = set()
        for name in (DEFAULT, TOOL_USE):
            if name in sources:
                self._templates[name] = _compiled(environment, name, sources[name])
                names |= jinja2.meta.find_undeclared_variables(environment.parse(sources[name]))
        self.variables = frozenset(names - {*environment.globals, *special_tokens, *_OWN})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        ending: PromptEnding = PromptEnding.RESPONSE,
    ) -> str:
        """Return the prompt of a conversation.

        Args:
            messages: JSON values and `RawJson`. A key with the value None counts as absent.
            tools: JSON schemas of functions, or None if the request has no tools.
            variables: values for some of `variables`.
            ending: the end of the prompt, usually that at which the model's response starts.

        Raises:
            RequestRejected: the model has no template, or the template raised an error or does not
                write the message to continue.
        """
        if ending is PromptEnding.OPEN:
            return self._open_prompt(messages, tools, variables)
        return self._rendered(messages, tools, variables, begins=ending is PromptEnding.RESPONSE)

    def _open_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
    ) -> str:
        """Return the prompt up to the end of the text of the last message."""
        *earlier, last = messages
        opened = {**last, "content": last["content"] + _OPEN_END}
        prompt = self._rendered([*earlier, opened], tools, variables, begins=False)
        end = prompt.rfind(_OPEN_END.rstrip())
        if end < 0:
            words = "the chat template does not write the message to continue"
            raise RequestRejected(words, "messages")
        kept = prompt.startswith(_OPEN_END, end)
        return prompt[:end] if kept else prompt[:end].rstrip()

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
        *,
        begins: bool,
    ) -> str:
        """Return the prompt, with the beginning of the response or up to the last message."""
        template = self._templates.get(DEFAULT if tools is None else TOOL_USE)
        template = template or self._templates.get(DEFAULT)
        if template is None:
            raise RequestRejected("this model has no chat template", param="messages")
        # Templates test `tools is not none`, so absent values must be None and not undefined.
        pieces = template.generate(
            {**self._special_tokens, **(variables or {})},
            messages=[{k: v for k, v in m.items() if v is not None} for m in messages],
            tools=tools,
            documents=None,
            add_generation_prompt=begins,
        )
        prompt, chars = [], 0
        try:
            for piece in pieces:
                prompt.append(piece)
                chars += len(piece)
                if chars > MAX_PROMPT_CHARS:
                    raise SecurityError(f"it writes more than {MAX_PROMPT_CHARS} characters")
        except Exception as error:  # untrusted code may raise any exception
            raise RequestRejected(f"error in the chat template: {error}", "messages") from error
        return "".join(prompt)


def template_sources(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of a checkpoint's chat templates by name.

    `chat_template.jinja` and `additional_chat_templates/*.jinja` take precedence over the settings.

    Args:
        directory: directory of the checkpoint.
        settings: its `tokenizer_config.json`, whose `chat_template` is a text, or a list of objects
            with `name` and `template`.

    Raises:
        CheckpointError: a template is not text.
    """
    files = {path.stem: path for path in (directory / "additional_chat_templates").glob("*.jinja")}
    beside = directory / "chat_template.jinja"
    if beside.is_file():
        files.setdefault(DEFAULT, beside)
    if files:
        return {name: _text(path) for name, path in files.items()}
    setting = settings.get("chat_template")
    named = [{"name": DEFAULT, "template": setting}] if isinstance(setting, str) else setting or []
    try:
        sources = {entry["name"]: entry["template"] for entry in named}
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"damaged {directory / 'tokenizer_config.json'}: chat_template must be a text "
            "or a list of objects with name and template"
        ) from error
    return sources


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except ValueError as error:
        raise CheckpointError(f"damaged chat template {path}: {error}") from error


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox of jinja2 with bounds on the results of operators."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return `left operator right`, unless the result would be too large."""
        if _size(operator, left, right) > MAX_PROMPT_CHARS:
            raise SecurityError(f"a result of {operator} is too large")
        return super().call_binop(context, operator, left, right)


def _size(operator: str, left: Any, right: Any) -> int:
    """Return the length of a repeated sequence, the number of bits of a power, or 0 otherwise."""
    if operator == "**":
        both = isinstance(left, int) and isinstance(right, int)
        return left.bit_length() * right if both else 0
    if isinstance(left, int):
        left, right = right, left
    return len(left) * right if isinstance(left, Sized) and isinstance(right, int) else 0


class _Generation(Extension):
    """The block `{% generation %}`, which marks the assistant's text for training.

    Here the block is only a scope.
    """

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> Scope:
        """Return the body of the block in its own scope."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body, lineno=line)


def _environment(now: Callable[[], datetime]) -> _Sandbox:
    """Return the environment of `transformers`: trimmed blocks, loop controls, four names."""
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
    return environment


def _compiled(environment: _Sandbox, name: str, source: str) -> jinja2.Template:
    try:
        template = environment.from_string(source)
    except Exception as error:  # jinja2 folds constants, so untrusted code runs here too
        raise CheckpointError(f"damaged chat template {name!r}: {error}") from error
    # Each rendering copies the globals, and a plain dict is the fastest to copy.
    template.globals = dict(template.globals)
    return template


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON for a model, without the HTML escapes of jinja2's own filter."""
    raw: list[str] = []

    def stand_in(part: Any) -> str:
        if not isinstance(part, RawJson):
            raise TypeError(f"{type(part).__name__} is not a JSON value")
        raw.append(part.text)
        return _RAW

    written = json.dumps(
        value,
        default=stand_in,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    pieces = written.split(json.dumps(_RAW, ensure_ascii=ensure_ascii))
    return "".join(text for pair in zip(pieces, [*raw, ""], strict=True) for text in pair)


def _raise_exception(message: str) -> None:
    """Raise an error for messages that the template does not support."""
    raise jinja2.TemplateError(message)
