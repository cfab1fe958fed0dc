"""A checkpoint's tokenizer and chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer

from backends.errors import CheckpointError, RequestRejected


class Tokenizer:
    """`tokenizer.json` and `tokenizer_config.json` of a Hugging Face directory.

    Immutable after loading, so every method may be called in any thread.
    """

    def __init__(self, directory: Path) -> None:
        """Load it.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"no tokenizer: {path} does not exist")
        try:
            self._fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"damaged tokenizer {path}: {error}") from error
        self._settings = read_json(directory / "tokenizer_config.json", missing={})
        self._template = self._compile(directory)
        self.vocab_size: int = self._fast.get_vocab_size()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        ids: list[int] = self._fast.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; ids outside the vocabulary are skipped."""
        text: str = self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """Return one token's text; a partial character shows as U+FFFD."""
        return self.decode([token_id], skip_special_tokens=False)

    def special_id(self, name: str) -> int | None:
        """Return the id of a special token by its role, e.g. `eos_token`, if it is set."""
        content = self._special_content(name)
        token_id: int | None = self._fast.token_to_id(content) if content else None
        return token_id

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the prompt that the model's chat template makes of the messages.

        Raises:
            RequestRejected: the model has no template, or the template refuses the messages.
        """
        if self._template is None:
            raise RequestRejected("this model has no chat template", param="messages")
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=True,
                bos_token=self._special_content("bos_token") or "",
                eos_token=self._special_content("eos_token") or "",
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise RequestRejected(f"the chat template refuses: {error}", "messages") from error

    def _special_content(self, name: str) -> str | None:
        value = self._settings.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        return content if isinstance(content, str) else None

    def _template_source(self, directory: Path) -> str | None:
        beside = directory / "chat_template.jinja"
        if beside.is_file():
            try:
                return beside.read_text(encoding="utf-8")
            except ValueError as error:
                raise CheckpointError(f"damaged chat template {beside}: {error}") from error
        source = self._settings.get("chat_template")
        return source if isinstance(source, str) else None

    def _compile(self, directory: Path) -> jinja2.Template | None:
        source = self._template_source(directory)
        if source is None:
            return None
        # Templates come with checkpoints, so they are strangers' code: sandboxed.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise_exception
        try:
            return environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"damaged chat template in {directory}: {error}") from error


def read_json(path: Path, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a JSON object from a file; `missing` if there is no such file and it is given.

    Raises:
        CheckpointError: the file is missing without a default, or is not a JSON object.
    """
    if not path.is_file():
        if missing is None:
            raise CheckpointError(f"{path} does not exist")
        return missing
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"damaged {path}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"damaged {path}: a JSON object was expected")
    return value


def _raise_exception(message: str) -> None:
    """What templates call to refuse messages."""
    raise jinja2.TemplateError(message)
