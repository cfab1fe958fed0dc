"""A checkpoint's tokenizer, with its chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Final

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel, WordPiece

from draftgate.backends.chat_template import (
    TEMPLATE_FILES,
    ChatTemplate,
    PromptEnding,
    template_sources,
)
from draftgate.backends.errors import CheckpointError
from draftgate.backends.pair_encoder import PairEncoder
from draftgate.backends.token_bounds import parts_of, token_bound
from draftgate.backends.token_bytes import TokenBytes

FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    *TEMPLATE_FILES,
)
"""Files of a checkpoint that define its tokenizer, where `*` matches part of a name."""

BRIEF_TOKENS: Final = 1024
"""Number of tokens up to which decoding keeps the GIL, which blocks other threads for 0.1 ms (one
core, Zen 4, 2026-11-21)."""

_INPUTS: Final = ("input_ids", "token_type_ids", "attention_mask")
"""Inputs of a model whose tokenizer does not list them, as of a BERT."""

_REPLACEMENT: Final = "\ufffd"

_LOCAL_DECODERS: Final = frozenset({"ByteLevel", "ByteFallback", "Fuse"})
"""Decoders of the `tokenizers` library that map the bytes of one token at a time. `ByteFallback`
replaces a whole run of invalid bytes, which does not matter after complete characters."""


class Tokenizer:
    """The `tokenizer.json`, settings and chat template of a Hugging Face directory.

    The object is immutable after loading, so every method may be called in any thread.

    Attributes:
        vocabulary: ids by token, including added tokens.
        vocab_size: the largest token id plus one, where ids below may be unused.
        texts: text that each token adds by itself, which is empty for special tokens.
        texts_with_special: the same with the texts of special tokens.
        bytes: raw bytes that each token adds after other text, also for parts of characters.
    """

    def __init__(self, directory: Path, now: Callable[[], datetime] = datetime.now) -> None:
        """Load the tokenizer.

        Args:
            directory: directory of the checkpoint.
            now: clock in local time, for chat templates that write today's date.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"no tokenizer: {path} does not exist")
        self._fast = _loaded(path)
        self.vocabulary: dict[str, int] = self._fast.get_vocab()
        self.vocab_size: int = max(self.vocabulary.values(), default=-1) + 1
        self._bound = token_bound(self._fast, self.vocabulary)
        # Use only the state of the decoder, because that of the tokenizer includes the vocabulary
        # and is slow.
        decoder = self._fast.decoder and json.loads(self._fast.decoder.__getstate__())
        anchor = self.encode("a", add_special_tokens=False)
        self.texts = TokenTexts(self.decode, decoder, anchor)
        with_special = partial(self.decode, skip_special_tokens=False)
        self.texts_with_special = TokenTexts(with_special, decoder, anchor)
        self.bytes = TokenBytes(self._fast.id_to_token, with_special, decoder, anchor)
        settings = read_json(directory / "tokenizer_config.json", missing={})
        self._special_tokens = _special_tokens(directory, settings)
        inputs = settings.get("model_input_names") or _INPUTS
        if not isinstance(inputs, list | tuple):
            raise CheckpointError(f"{directory}: model_input_names must be a list, not {inputs!r}")
        self._marks_segments = "token_type_ids" in inputs
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
        """Return the files that define the tokenizer, by path, so that another process can load it.

        Raises:
            CheckpointError: the files can no longer be read.
        """
        paths = sorted(path for pattern in FILES for path in self._directory.glob(pattern))
        try:
            return {p.relative_to(self._directory).as_posix(): p.read_bytes() for p in paths}
        except OSError as error:
            raise CheckpointError(f"the tokenizer can no longer be read: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        # As a batch, because encoding a single text does not release the GIL.
        (found,) = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = found.ids
        return ids

    def pairs(self, first: str, max_tokens: int) -> PairEncoder:
        """Return an encoder of pairs that begin with a text, of at most `max_tokens` each."""
        return PairEncoder(self._fast, first, max_tokens, marks_segments=self._marks_segments)

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that a text has at least, without tokenising it.

        The result is 0 for tokenizers that may omit parts of a text.
        """
        return 0 if self._bound is None else self._bound.least_tokens(text)

    def beginning(self, text: str, tokens: int) -> str:
        """Return a beginning of a text with at least this number of tokens, or the whole text."""
        # A character has one or more bytes.
        return text if self._bound is None else text[: tokens * self._bound.most_bytes]

    def ending(self, text: str, tokens: int) -> str:
        """Return an end of a text with at least this number of tokens, or the whole text."""
        return text if self._bound is None else text[-tokens * self._bound.most_bytes :]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, skipping unused ids."""
        ids = list(token_ids)
        if len(ids) <= BRIEF_TOKENS:
            text: str = self._fast.decode(ids, skip_special_tokens=skip_special_tokens)
        else:  # as a batch, which releases the GIL
            (text,) = self._fast.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, in which an incomplete character becomes U+FFFD."""
        return self.bytes[token_id].decode(errors="replace")

    def special_id(self, name: str) -> int | None:
        """Return the id of a special token by its role, such as `eos_token`, or None."""
        content = self._special_tokens.get(name)
        token_id: int | None = self._fast.token_to_id(content) if content else None
        return token_id

    @property
    def tool_template(self) -> str | None:
        """The text of the chat template that renders tools, or None without a template."""
        return self._template.for_tools

    @property
    def template_variables(self) -> frozenset[str]:
        """The names that a request may set for the chat template, such as `enable_thinking`."""
        return self._template.variables

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        ending: PromptEnding = PromptEnding.RESPONSE,
    ) -> str:
        """Return messages, and tools, as a prompt in the format of the model's chat template.

        Raises:
            RequestRejected: the model has no template, or the template raised an error.
        """
        return self._template.render(messages, tools, variables, ending=ending)


class TokenTexts(dict[int, str | None]):
    """The text that a token adds after complete characters by id, or None if that varies.

    Entries are computed on first use, because most tokens of a large vocabulary are never used.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        decoder: Mapping[str, Any] | None,
        anchor: Sequence[int],
    ) -> None:
        """Start empty.

        Args:
            decode: computes the texts.
            decoder: settings of the decoder, as in `tokenizer.json`.
            anchor: tokens of complete characters to put before each token, because some decoders
                strip the start of a text.
        """
        super().__init__()
        self._decode = decode
        self._anchor = tuple(anchor)
        self._before = len(decode(anchor))
        self._local = self._before > 0 and decoder is not None and _is_local(decoder)

    def __missing__(self, token_id: int) -> str | None:
        """Compute the text of a token, once."""
        text: str | None = None
        if self._local:
            text = self._decode([*self._anchor, token_id])[self._before :]
            if _REPLACEMENT in text:
                text = None
        self[token_id] = text
        return text


def is_tokenizer_file(name: str) -> bool:
    """Return whether a relative path is one of `FILES`.

    Paths from a network may lead anywhere.
    """
    path = PurePosixPath(name)
    return any(
        len(path.parts) == len(PurePosixPath(pattern).parts) and path.match(pattern)
        for pattern in FILES
    )


def read_json(path: Path, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the JSON object in a file, or `missing` if the file does not exist.

    Raises:
        CheckpointError: the file is missing without a default, cannot be read, or holds no JSON
            object.
    """
    try:
        if not path.is_file():
            if missing is None:
                raise CheckpointError(f"{path} does not exist")
            return missing
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:  # a checkpoint may name files that no system can have
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"damaged {path}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"damaged {path}: a JSON object was expected")
    return value


def _special_tokens(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of each special token by its role, which is its name in templates.

    In checkpoints without `added_tokens_decoder`, `special_tokens_map.json` overrides the settings.
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
    texts = {role: content for role, content in contents.items() if isinstance(content, str)}
    try:
        "".join(texts.values()).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{directory}: a special token is not a text: {error}") from error
    return texts


def _loaded(path: Path) -> FastTokenizer:
    """Load a tokenizer that neither truncates nor pads, and encode texts to find damage.

    Raises:
        CheckpointError: the file is damaged.
    """
    try:
        fast = FastTokenizer.from_file(str(path))
        # Files of embedding models truncate and pad, but a text that is too long is an error here.
        fast.no_truncation()
        fast.no_padding()
        _check_unknown_token(fast)
        _check_replacements(fast)
        fast.encode("a")
        fast.encode("a", "a")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception, or panics
        raise CheckpointError(f"damaged tokenizer {path}: {error}") from error
    return fast


def _check_replacements(tokenizer: FastTokenizer) -> None:
    """Check that no rule adds text between all characters, because each one doubles a text.

    Raises:
        ValueError: a rule does.
    """
    normalizers = parts_of(tokenizer.normalizer, "normalizers")
    for part in [*normalizers, *parts_of(tokenizer.decoder, "decoders")]:
        if part.get("pattern") == {"String": ""}:
            raise ValueError("a rule replaces the empty text")


def _check_unknown_token(tokenizer: FastTokenizer) -> None:
    """Check that a vocabulary of words has the token of unknown words.

    Raises:
        ValueError: it lacks the token, so that some texts cannot be encoded.
    """
    model = tokenizer.model
    if not isinstance(model, WordPiece | WordLevel):
        return
    if model.unk_token not in tokenizer.get_vocab(with_added_tokens=False):
        raise ValueError(f"no token {model.unk_token!r}")


def _is_local(decoder: Mapping[str, Any]) -> bool:
    """Return whether the text of a token after complete characters depends on the token alone."""
    match decoder:
        case {"type": "Sequence", "decoders": parts}:
            return all(map(_is_local, parts))
        case {"type": "Replace", "pattern": {"String": pattern}}:
            return len(pattern) == 1
        case {"type": "Strip", "stop": stop}:
            return bool(stop == 0)
        case {"type": kind}:
            return kind in _LOCAL_DECODERS
    return False
