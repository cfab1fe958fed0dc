"""Chat templates: the jinja2 programs that lay out a conversation as the model was trained on it.

They render to the characters that `transformers` 5 renders (its `apply_chat_template` with a
generation prompt), for a model knows no other layout.

Templates come with checkpoints, so they are strangers' code. The sandbox keeps them from the
process; the length of what they write, of a repetition and of a `range` is bounded. Their time and
the memory of their variables are not: a nest of loops that writes nothing, or a variable that
doubles, can only be stopped by not loading that checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence, Sized
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Scope
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from draftgate.backends.errors import CheckpointError, RequestRejected

MAX_PROMPT_CHARS: Final = 1 << 24
"""The longest prompt a template may write: about four million tokens, beyond any context."""

DEFAULT: Final = "default"
TOOL_USE: Final = "tool_use"
"""The names by which checkpoints with several templates tell which is for what."""

TEMPLATE_FILES: Final = ("chat_template.jinja", "additional_chat_templates/*.jinja")
"""Where a checkpoint has templates, beside its `tokenizer_config.json`."""


class ChatTemplate:
    """The chat template of a checkpoint, and its sibling for tools where it has one.

    Immutable, so it may render in any thread.

    Attributes:
        for_tools: text of the template that renders tools; None if there is none at all.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile it.

        Args:
            sources: template text by name; templates of other names than the two are never used.
            special_tokens: token text by role, e.g. `bos_token`, as variables of the template.
            now: the clock, in local time; some templates write today's date.

        Raises:
            CheckpointError: a template does not compile.
        """
        environment = _environment(now)
        self._special_tokens = dict(special_tokens)
        self.for_tools = sources.get(TOOL_USE, sources.get(DEFAULT))
        self._templates: dict[str, jinja2.Template] = {}
        for name in (DEFAULT, TOOL_USE):
            if name in sources:
                self._templates[name] = _compiled(environment, name, sources[name])

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the prompt of a conversation, up to where the model's answer begins.

        Args:
            messages: plain JSON values; a key whose value is None counts as absent.
            tools: JSON schemas of the functions on offer; None where the request has none.

        Raises:
            RequestRejected: there is no template, or it refuses the messages.
        """
        template = self._templates.get(DEFAULT if tools is None else TOOL_USE)
        template = template or self._templates.get(DEFAULT)
        if template is None:
            raise RequestRejected("this model has no chat template", param="messages")
        # What is absent must be None, not undefined: templates ask `tools is not none`.
        pieces = template.generate(
            self._special_tokens,
            messages=[{k: v for k, v in m.items() if v is not None} for m in messages],
            tools=tools,
            documents=None,
            add_generation_prompt=True,
        )
        prompt, chars = [], 0
        try:
            for piece in pieces:
                prompt.append(piece)
                chars += len(piece)
                if chars > MAX_PROMPT_CHARS:
                    raise SecurityError(f"it writes more than {MAX_PROMPT_CHARS} characters")
        except Exception as error:  # whatever a stranger's code may raise
            raise RequestRejected(f"the chat template refuses: {error}", "messages") from error
        return "".join(prompt)


def template_sources(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of a checkpoint's chat templates by name; empty if it has none.

    `chat_template.jinja` and `additional_chat_templates/*.jinja` come before the settings.

    Args:
        directory: the checkpoint.
        settings: its `tokenizer_config.json`, whose `chat_template` is one text, or a list of
            objects with `name` and `template`.

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
    """The sandbox of jinja2, which lets no operator make a value of arbitrary size."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return `left operator right` if it has a size worth computing."""
        if _size(operator, left, right) > MAX_PROMPT_CHARS:
            raise SecurityError(f"a result of {operator} is too large")
        return super().call_binop(context, operator, left, right)


def _size(operator: str, left: Any, right: Any) -> int:
    """Return the length of a repeated sequence, or the bits of a power; 0 for small things."""
    if operator == "**":
        both = isinstance(left, int) and isinstance(right, int)
        return left.bit_length() * right if both else 0
    if isinstance(left, int):
        left, right = right, left
    return len(left) * right if isinstance(left, Sized) and isinstance(right, int) else 0


class _Generation(Extension):
    """`{% generation %}`: marks what the assistant wrote, for trainers; to us a mere scope."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> Scope:
        """Return the block's body in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body, lineno=line)


def _environment(now: Callable[[], datetime]) -> _Sandbox:
    """Return what `transformers` gives templates: trimmed blocks, loop controls, four names."""
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
    return environment


def _compiled(environment: _Sandbox, name: str, source: str) -> jinja2.Template:
    try:
        return environment.from_string(source)
    except Exception as error:  # jinja2 folds constants, so strangers' code runs here, too
        raise CheckpointError(f"damaged chat template {name!r}: {error}") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON for a model to read; jinja2's own filter escapes it for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    """What templates call to refuse messages."""
    raise jinja2.TemplateError(message)
