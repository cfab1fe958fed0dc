"""A checkpoint's tokenizer and chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any, Final

from tokenizers import Tokenizer as FastTokenizer

from draftgate.backends.chat_template import TEMPLATE_FILES, ChatTemplate, template_sources
from draftgate.backends.errors import CheckpointError
from draftgate.backends.token_texts import TokenTexts

FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    *TEMPLATE_FILES,
)
"""Of a checkpoint, what a tokenizer is made from; `*` stands for part of a name."""

BRIEF_TOKENS: Final = 1024
"""Decoding so many holds other threads up for 0.1 ms (one core, Zen 4, 2026-11-21)."""


class Tokenizer:
    """`tokenizer.json`, its settings and the chat template of a Hugging Face directory.

    Immutable after loading, so every method may be called in any thread.

    Attributes:
        vocabulary: ids by token, added ones too.
        vocab_size: one more than the largest token id; an id below it may name no token, where
            the vocabulary has gaps.
        texts: what tokens add to a text by themselves.
    """

    def __init__(self, directory: Path, now: Callable[[], datetime] = datetime.now) -> None:
        """Load it.

        Args:
            directory: the checkpoint.
            now: the clock, in local time, of chat templates that write today's date.

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
        self.vocabulary: dict[str, int] = self._fast.get_vocab()
        self.vocab_size: int = max(self.vocabulary.values(), default=-1) + 1
        # Its own state: that of the whole tokenizer holds the vocabulary, and takes long.
        decoder = self._fast.decoder and json.loads(self._fast.decoder.__getstate__())
        self.texts = TokenTexts(self.decode, decoder, self.encode("a", add_special_tokens=False))
        settings = read_json(directory / "tokenizer_config.json", missing={})
        self._special_tokens = _special_tokens(directory, settings)
        self._directory = directory
        sources = template_sources(directory, settings)
        try:
            self._template = ChatTemplate(sources, self._special_tokens, now)
        except CheckpointError as error:
            raise CheckpointError(f"{directory}: {error}") from error

    def to_json(self) -> str:
        """Return a `tokenizer.json` that neither truncates nor pads."""
        settings = json.loads(self._fast.to_str())
        return json.dumps({**settings, "truncation": None, "padding": None})

    def files(self) -> dict[str, bytes]:
        """Return the files that it was made from, by path: another process can make it of them.

        Raises:
            CheckpointError: they cannot be read any more.
        """
        paths = sorted(path for pattern in FILES for path in self._directory.glob(pattern))
        try:
            return {p.relative_to(self._directory).as_posix(): p.read_bytes() for p in paths}
        except OSError as error:
            raise CheckpointError(f"the tokenizer is gone: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        # As a batch: a single text is tokenised without letting other threads run.
        (found,) = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = found.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; ids that name no token are skipped."""
        ids = list(token_ids)
        if len(ids) <= BRIEF_TOKENS:
            text: str = self._fast.decode(ids, skip_special_tokens=skip_special_tokens)
        else:  # as a batch: see `encode`
            (text,) = self._fast.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """Return one token's text; a partial character shows as U+FFFD."""
        return self.decode([token_id], skip_special_tokens=False)

    def special_id(self, name: str) -> int | None:
        """Return the id of a special token by its role, e.g. `eos_token`, if it is set."""
        content = self._special_tokens.get(name)
        token_id: int | None = self._fast.token_to_id(content) if content else None
        return token_id

    @property
    def tool_template(self) -> str | None:
        """The text of the chat template that renders tools; None if there is no template."""
        return self._template.for_tools

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the prompt that the model's chat template makes of messages (and tools).

        Raises:
            RequestRejected: the model has no template, or the template refuses the messages.
        """
        return self._template.render(messages, tools)


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


def _special_tokens(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of each special token by its role, as templates know it.

    Checkpoints older than `added_tokens_decoder` keep the last word in `special_tokens_map.json`.
    """
    roles = dict(settings)
    if "added_tokens_decoder" not in settings:
        roles |= read_json(directory / "special_tokens_map.json", missing={})
    extra = roles.get("extra_special_tokens")
    named = {role: token for role, token in roles.items() if role.endswith("_token")}
    if isinstance(extra, dict):
        named |= extra
    contents = {
        role: token.get("content") if isinstance(token, dict) else token
        for role, token in named.items()
    }
    return {role: content for role, content in contents.items() if isinstance(content, str)}


def is_tokenizer_file(name: str) -> bool:
    """Return whether a relative path is one of `FILES`: a stranger's path may lead anywhere."""
    path = PurePosixPath(name)
    return any(
        len(path.parts) == len(PurePosixPath(pattern).parts) and path.match(pattern)
        for pattern in FILES
    )
