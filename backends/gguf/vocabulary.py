"""Tokenizers of GGUF files as the files of a Hugging Face tokenizer.

`tokenizer.ggml.model` is `gpt2` for byte-level BPE, whose merges are in the file and whose split of
texts has a name in `tokenizer.ggml.pre`, or `llama` for the BPE of SentencePiece, which merges by
the scores of tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final

from draftgate.backends.gguf.keys import UPSTREAM_HINT
from draftgate.backends.gguf.reader import GgufModel

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
"""Types of tokens. Texts are split at control and user-defined tokens first."""

_SPACE: Final = "\u2581"
"""The character that stands for a space in the tokens of SentencePiece."""

_MAX_TOKEN_CHARS: Final = 1 << 10
"""Maximum length of a token that is merged from others. A longer one would take long to derive, and
no trained vocabulary has one."""

_TURN_ENDS: Final = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<EOT>",
)
"""Tokens that end a turn even if the file does not list them, because many files list only the end
of a text."""

_SAMPLING: Final = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Fields of `generation_config.json` by their names below `general.sampling`."""

_TEMPLATE: Final = "tokenizer.chat_template"
_TEMPLATE_NAME: Final = re.compile(r"\w{1,64}")

_WORDS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(after: str, digits: str) -> str:
    """Return a split that begins a word at each capital letter after a small one."""
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{after}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
        rf"{after}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDS}"
    )


def _uncased(digits: str) -> str:
    return (
        rf"{_WORDS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_ENDS}"
    )


@dataclass(frozen=True, slots=True)
class _Split:
    """How byte-level BPE splits a text into words.

    Attributes:
        pattern: the expression of words, or None for that of GPT-2.
        single_digits: whether each digit is a word, before the expression applies.
        whole_words: whether a word that is a token is not merged from its bytes.
        begins: whether the beginning of a text has a token if the file does not say so.
        composed: whether texts are normalised to composed characters (NFC).
    """

    pattern: str | None = None
    single_digits: bool = False
    whole_words: bool = False
    begins: bool = False
    composed: bool = False


_LLAMA3: Final = _Split(_uncased(r"\p{N}{1,3}"), whole_words=True, begins=True)
_QWEN2: Final = _Split(_uncased(r"\p{N}"), composed=True)
_GPT2: Final = _Split()
_DIGITS: Final = _Split(single_digits=True)
_GPT4O: Final = _Split(_cased(f"{_WORDS}?", r"\p{N}{1,3}"))

_SPLITS: Final[Mapping[str, _Split]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3
        ),
        **dict.fromkeys(("smaug-bpe", "dbrx"), _Split(_uncased(r"\p{N}{1,3}"))),
        **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
        "tekken": _Split(_cased("", r"\p{N}"), whole_words=True, begins=True),
        **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT4O),
        **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _DIGITS),
        **dict.fromkeys(("gpt-2", "phi-2", "default"), _GPT2),
    }
)
"""The splits by the names that llama.cpp gives them."""


class Vocabulary:
    """The tokenizer in the metadata of a model.

    Raises:
        CheckpointError: the metadata is damaged, or names a tokenizer that is not supported.
    """

    def __init__(self, model: GgufModel) -> None:
        self._metadata = metadata = model.metadata
        self._kind = metadata.text("tokenizer.ggml.model")
        if self._kind not in {"gpt2", "llama"}:
            raise metadata.error(
                "tokenizer.ggml.model",
                f"{self._kind} is not supported; supported: gpt2, llama; {UPSTREAM_HINT}",
            )
        self._architecture = metadata.text("general.architecture")
        self._gemma = self._architecture.startswith("gemma")
        self.tokens = metadata.texts("tokenizer.ggml.tokens")
        types = metadata.integers("tokenizer.ggml.token_type") or (_NORMAL,) * len(self.tokens)
        if len(types) != len(self.tokens):
            raise metadata.error("tokenizer.ggml.token_type", f"must list {len(self.tokens)} types")
        self._types = types
        self._split = self._named_split() if self._kind == "gpt2" else _Split(begins=True)
        if self._gemma:
            # Gemma's files write spaces as they are in tokens of spaces only.
            self.tokens = tuple(
                token.replace(" ", _SPACE) if not token.strip(" ") else token
                for token in self.tokens
            )

    def _named_split(self) -> _Split:
        key = "tokenizer.ggml.pre"
        name = self._metadata.text(key)
        if name not in _SPLITS:
            raise self._metadata.error(
                key, f"{name} is not supported; supported: {', '.join(_SPLITS)}; {UPSTREAM_HINT}"
            )
        return _SPLITS[name]

    def files(self) -> dict[str, Any]:
        """Return the files of the tokenizer by name: JSON objects, and the texts of templates."""
        tokenizer = self._byte_level() if self._kind == "gpt2" else self._sentencepiece()
        roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        found = {f"{role}_token": self._token(name) for role, name in roles.items()}
        settings = {role: token for role, token in found.items() if token is not None}
        return {
            "tokenizer.json": {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "added_tokens": list(self._added_tokens()),
                "post_processor": self._post_processor(),
                **tokenizer,
            },
            "tokenizer_config.json": settings,
            **self._templates(),
        }

    def generation_config(self) -> dict[str, Any]:
        """Return the tokens that end a response, and the recommended sampling parameters."""
        ends = {self._token_id(name) for name in ("eos", "eot", "eom")} - {None}
        named = zip(self.tokens, self._types, strict=True)
        special = {_CONTROL, _USER_DEFINED}
        ends |= {
            index
            for index, (token, kind) in enumerate(named)
            if kind in special and token in _TURN_ENDS
        }
        keys = {name: f"general.sampling.{key}" for key, name in _SAMPLING.items()}
        given = {n: self._metadata.number(key) for n, key in keys.items() if key in self._metadata}
        return {"eos_token_id": sorted(end for end in ends if end is not None), **given}

    def _token_id(self, role: str) -> int | None:
        key = f"tokenizer.ggml.{role}_token_id"
        if key not in self._metadata:
            return None
        number = self._metadata.count(key)
        # Some files have the largest 32-bit number for none.
        return number if 0 <= number < len(self.tokens) else None

    def _token(self, role: str) -> str | None:
        number = self._token_id(role)
        return None if number is None else self.tokens[number]

    def _added_tokens(self) -> Iterator[dict[str, Any]]:
        """Yield the tokens at which texts are split first, in the order of their ids."""
        roles = ("bos", "eos", "eot", "eom", "unknown", "padding")
        special = {self._token_id(role) for role in roles}
        strips = self._strips_spaces()
        for number, (token, kind) in enumerate(zip(self.tokens, self._types, strict=True)):
            control = kind in {_CONTROL, _UNKNOWN} or number in special
            spaces = not token.strip(_SPACE)  # the merges of Gemma make them
            if token and (control or (kind == _USER_DEFINED and not spaces)):
                yield {
                    "id": number,
                    "content": token,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": strips and control and token not in {"<unk>", "<s>", "<|endoftext|>"},
                    "normalized": False,
                    "special": control,
                }

    def _strips_spaces(self) -> bool:
        """Return whether special tokens remove spaces after them.

        Files do not state that Phi-3 does. llama.cpp, too, knows it by the name of the model.
        """
        name = self._metadata.text("general.name", "").lower()
        return self._kind == "llama" and ("phi-3" in name or "phi3" in name)

    def _post_processor(self) -> dict[str, Any] | None:
        """Return the rule that adds the tokens at the beginning and at the end of a text."""
        begins = self._metadata.count("tokenizer.ggml.add_bos_token", self._split.begins)
        ends = self._metadata.count("tokenizer.ggml.add_eos_token", 0)
        before = self._token("bos") if begins else None
        after = self._token("eos") if ends else None
        if before is None and after is None:
            return None

        def text(part: str, segment: int) -> list[dict[str, Any]]:
            first = [{"SpecialToken": {"id": before, "type_id": segment}}] if before else []
            last = [{"SpecialToken": {"id": after, "type_id": segment}}] if after else []
            return [*first, {"Sequence": {"id": part, "type_id": segment}}, *last]

        added = {
            token: {"id": token, "ids": [self._token_id(role)], "tokens": [token]}
            for role, token in (("bos", before), ("eos", after))
            if token
        }
        return {
            "type": "TemplateProcessing",
            "single": text("A", 0),
            "pair": text("A", 0) + text("B", 1),
            "special_tokens": added,
        }

    def _templates(self) -> dict[str, str]:
        """Return the chat templates by the names of their files."""
        found = {}
        for key in self._metadata:
            name = key.removeprefix(_TEMPLATE)
            if key == _TEMPLATE:
                found["chat_template.jinja"] = self._metadata.text(key)
            elif name.startswith(".") and name != key and _TEMPLATE_NAME.fullmatch(name[1:]):
                path = f"additional_chat_templates/{name[1:]}.jinja"
                found[path] = self._metadata.text(key)
        return found

    @cached_property
    def _ids(self) -> dict[str, int]:
        """The first id of each token."""
        ids: dict[str, int] = {}
        for number, token in enumerate(self.tokens):
            ids.setdefault(token, number)
        return ids

    def _model(self, merges: Iterable[Sequence[str]], **settings: Any) -> dict[str, Any]:
        model = {"type": "BPE", "vocab": self._ids, "merges": list(merges), **settings}
        return {"model": model}

    def _stored_merges(self) -> Iterator[tuple[str, str]]:
        """Yield the merges of the file. A space separates their parts."""
        for merge in self._metadata.texts("tokenizer.ggml.merges"):
            left, _, right = merge.partition(" ")
            if left not in self._ids or right not in self._ids or left + right not in self._ids:
                raise self._metadata.error(
                    "tokenizer.ggml.merges", f"has {merge!r}, which is not in the vocabulary"
                )
            yield left, right

    def _byte_level(self) -> dict[str, Any]:
        """Return byte-level BPE, in which each byte is a printable character."""
        split, byte_level = (
            self._split,
            {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
            },
        )
        steps: list[dict[str, Any]] = []
        if split.single_digits:
            steps.append({"type": "Digits", "individual_digits": True})
        if split.pattern is not None:
            pattern = {"Regex": split.pattern}
            rule = {"pattern": pattern, "behavior": "Isolated", "invert": False}
            steps.append({"type": "Split", **rule})
        steps.append({**byte_level, "use_regex": split.pattern is None})
        return {
            "normalizer": {"type": "NFC"} if split.composed else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
            "decoder": {**byte_level, "use_regex": True},
            **self._model(self._stored_merges(), ignore_merges=split.whole_words),
        }

    def _sentencepiece(self) -> dict[str, Any]:
        """Return the BPE of SentencePiece, which replaces spaces."""
        begins = bool(self._metadata.count("tokenizer.ggml.add_space_prefix", not self._gemma))
        replaced = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        prepended = [{"type": "Prepend", "prepend": _SPACE}] if begins else []
        restored = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
        stripped = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if begins else []
        decoders = [restored, {"type": "ByteFallback"}, {"type": "Fuse"}, *stripped]
        stored = "tokenizer.ggml.merges" in self._metadata
        merges = self._stored_merges() if stored else self._derived_merges()
        model = self._model(
            merges, unk_token=self._token("unknown"), byte_fallback=True, fuse_unk=True
        )
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*prepended, replaced]},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            **model,
        }

    def _derived_merges(self) -> Iterator[tuple[str, str]]:
        """Yield all pairs of tokens whose join is a token, the best tokens first.

        SentencePiece joins the neighbours whose token has the highest score. The scores of Gemma do
        not have the order of its merges, which is that of its tokens.
        """
        scores = self._metadata.numbers("tokenizer.ggml.scores")
        if len(scores) != len(self.tokens):
            raise self._metadata.error(
                "tokenizer.ggml.scores", f"must list {len(self.tokens)} numbers, not {len(scores)}"
            )
        merged = {_NORMAL, _USER_DEFINED} if self._gemma else {_NORMAL}
        ids = {token: n for token, n in self._ids.items() if self._types[n] in merged}
        order = sorted(ids.values(), key=None if self._gemma else lambda n: -scores[n])
        for number in order:
            token = self.tokens[number]
            if len(token) > _MAX_TOKEN_CHARS:
                continue
            cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
            pairs = [(ids[a], ids[b]) for a, b in cuts if a in ids and b in ids]
            for left, right in sorted(pairs):
                yield self.tokens[left], self.tokens[right]
