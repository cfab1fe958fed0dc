"""Tokenizers of GGUF files, compared with transformers and with known tokenizers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from draftgate.backends.engine.config import read_model_config
from draftgate.backends.generation_defaults import read_generation_defaults
from draftgate.backends.gguf.folder import settings_folder
from draftgate.backends.tokenizer import Tokenizer
from tests.gguf.files import ARRAY, BOOL, F32, STRING, U32, Pair, Tensor, tiny_model

REAL = Path(os.environ.get("REAL_MODELS", ""))
FILES = {"smollm2": "smollm2-q4_1.gguf", "gemma3": "gemma3-270m-q4_k_m.gguf"}

TEXTS = [
    "Hello, world! It's 25°C; I'LL don't.",
    "  two spaces first, and\ta tab",
    " one",
    "\n\n\tdef add(a, b):\n        return a + b  # ok\r\n",
    "1234567890 3.14159 2026-11-29 x=42y",
    "日本語のテキスト、中文，한국어",
    "\U0001f600\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308",
    "naïve café \u00df\u2211\u2202 \U0001d518\U0001d52b \x00\x7f",
    "a     b\t\t\tc" + " " * 40 + "d\n\n\n\n",
    "<|im_start|>user\nHi<|im_end|>\n<start_of_turn>model\nHi<end_of_turn>\n<table><b>x</b>",
    "[multimodal]<unused7><repo_name>",
]


@pytest.mark.parametrize("name", FILES)
def test_token_ids_of_real_models_equal_transformers(name: str, tmp_path: Path) -> None:
    """Ids of every kind of text, and of all special tokens, are those of transformers."""
    if not (REAL / FILES[name]).is_file():
        pytest.skip("no real models")
    folder = settings_folder(REAL / FILES[name], tmp_path)
    tokenizer, expected = Tokenizer(folder), Tokenizer(REAL / name)
    added = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    special = [one["content"] for one in added if one["special"]]
    texts = [*TEXTS, "".join(special), " x ".join(special)]
    for special_tokens in (True, False):
        for text in texts:
            ids = tokenizer.encode(text, add_special_tokens=special_tokens)
            assert ids == expected.encode(text, add_special_tokens=special_tokens), text
            assert tokenizer.decode(ids, skip_special_tokens=False) == expected.decode(
                ids, skip_special_tokens=False
            )


def test_digits_of_smollm2_are_split_before_words(tmp_path: Path) -> None:
    """Spaces before a digit are one token, as in the model's own tokenizer.

    `transformers` ignores the name of the split, and puts the last space before the digit.
    """
    if not (REAL / FILES["smollm2"]).is_file():
        pytest.skip("no real models")
    tokenizer = Tokenizer(settings_folder(REAL / FILES["smollm2"], tmp_path))
    tokens = [tokenizer.token_text(one) for one in tokenizer.encode("x  1 and  22")]
    assert tokens == ["x", "  ", "1", " and", "  ", "2", "2"]


ALPHABET = [chr(n) for n in [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]]
"""The characters of byte-level BPE."""

SPACE = ALPHABET[188 + 32]


def vocabulary_file(
    folder: Path, tokens: list[str], pairs: list[Pair], types: list[int] | None = None
) -> Path:
    """Write a tiny model with a vocabulary."""
    more = [
        Pair("tokenizer.ggml.tokens", ARRAY, (STRING, tokens)),
        Pair("tokenizer.ggml.token_type", ARRAY, (5, types or [1] * len(tokens))),
        *pairs,
    ]
    # The embedding comes last, so that its size does not move the other tensors.
    embedding = Tensor("token_embd.weight", [32, len(tokens)], 8, 1 << 15)
    path = folder / "model.gguf"
    given = {pair.key for pair in pairs}
    without = [key for key in ["tokenizer.ggml.merges"] if key not in given]
    data = tiny_model(more, without, tensors=[embedding])
    path.write_bytes(data + bytes((1 << 15) + 34 * len(tokens)))
    return path


WORDS = {
    "llama-bpe": ["1234567", "123|456|7", " 12", " |12", "don't", "don|'t"],
    "qwen2": ["1234", "1|2|3|4", "a\u0301b", "\u00e1b"],
    "gpt-4o": ["helloWorld", "hello|World", "don't", "don't", "1234", "123|4"],
    "tekken": ["helloWorld", "hello|World", "1234", "1|2|3|4"],
    "smollm": ["12", "1|2", "  3", "  |3"],
    "gpt-2": ["12345", "12345", "  3", " | 3", "don't", "don|'t"],
}
"""Texts, and the words into which each split divides them."""


@pytest.mark.parametrize("split", WORDS)
def test_texts_are_split_as_the_file_names(split: str, tmp_path: Path) -> None:
    """Merges never cross the words of the split that `tokenizer.ggml.pre` names."""
    texts, expected = WORDS[split][::2], WORDS[split][1::2]
    from tokenizers.pre_tokenizers import ByteLevel

    # Merge all neighbours from left to right, so that a word becomes one token.
    tokens, merges = list(ALPHABET), []
    level = ByteLevel(add_prefix_space=False, use_regex=False)
    for text in [*"".join(expected).split("|"), *(w for e in expected for w in e.split("|"))]:
        spelled = "".join(piece for piece, _ in level.pre_tokenize_str(text))
        for end in range(2, len(spelled) + 1):
            if spelled[:end] not in tokens:
                tokens.append(spelled[:end])
                merges.append(f"{spelled[: end - 1]} {spelled[end - 1]}")
    pairs = [
        Pair("tokenizer.ggml.pre", STRING, split),
        Pair("tokenizer.ggml.merges", ARRAY, (STRING, merges)),
        Pair("tokenizer.ggml.add_bos_token", BOOL, False),
    ]
    tokenizer = Tokenizer(settings_folder(vocabulary_file(tmp_path, tokens, pairs), tmp_path / "c"))
    for text, words in zip(texts, expected, strict=True):
        ids = tokenizer.encode(text)
        assert "|".join(tokenizer.token_text(one) for one in ids) == words


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256))]
LETTERS = ["\u2581", "h", "i", "t", "e", "\u2581h", "\u2581hi", "th", "the", "\u2581the", "hi"]


def sentencepiece(folder: Path, *pairs: Pair, extra: tuple[str, ...] = ()) -> Tokenizer:
    """Return a tokenizer of SentencePiece without stored merges."""
    tokens = [*PIECES, *LETTERS, *extra]
    types = [2, 3, 3, *[6] * 256, *[1] * len(LETTERS), *[4] * len(extra)]
    scores = [0.0] * len(PIECES) + [-float(n) for n in range(len(LETTERS) + len(extra))]
    stored = [
        Pair("tokenizer.ggml.model", STRING, "llama"),
        Pair("tokenizer.ggml.scores", ARRAY, (F32, scores)),
        Pair("tokenizer.ggml.unknown_token_id", U32, 0),
        Pair("tokenizer.ggml.bos_token_id", U32, 1),
        Pair("tokenizer.ggml.eos_token_id", U32, 2),
        *pairs,
    ]
    path = vocabulary_file(folder, tokens, stored, types)
    return Tokenizer(settings_folder(path, folder / "cache"))


def named(tokenizer: Tokenizer, text: str) -> list[str]:
    names = {number: token for token, number in tokenizer.vocabulary.items()}
    return [names[one] for one in tokenizer.encode(text)]


def test_pairs_with_the_highest_score_are_joined_first(tmp_path: Path) -> None:
    """SentencePiece joins by the score of the result, and bytes stand for unknown characters."""
    tokenizer = sentencepiece(tmp_path)
    assert named(tokenizer, "hi") == ["<s>", "\u2581hi"]
    assert named(tokenizer, " hi") == ["<s>", "\u2581", "\u2581hi"]
    # "the" beats "▁the" only as a part of it, and "th" + "e" beats "h" + "i".
    assert named(tokenizer, "thehi") == ["<s>", "\u2581the", "hi"]
    assert named(tokenizer, "h\u00e9") == ["<s>", "\u2581h", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("hi the\u00e9")) == "hi the\u00e9"


def test_flags_choose_the_first_and_last_tokens_and_the_space(tmp_path: Path) -> None:
    """The file says whether a text gets a beginning, an end and a space."""
    flags = {"add_bos_token": False, "add_eos_token": True, "add_space_prefix": False}
    pairs = [Pair(f"tokenizer.ggml.{name}", BOOL, flag) for name, flag in flags.items()]
    tokenizer = sentencepiece(tmp_path, *pairs)
    assert named(tokenizer, "hi") == ["hi", "</s>"]
    assert tokenizer.decode(tokenizer.encode("hi the")) == "hi the"


def test_special_tokens_of_phi3_remove_the_space_after_them(tmp_path: Path) -> None:
    """As in its own tokenizer, text after a special token of Phi-3 begins without spaces."""
    plain = sentencepiece(tmp_path, Pair("general.name", STRING, "Other"))
    assert named(plain, "</s> \nhi") == ["<s>", "</s>", "\u2581", "\u2581", "<0x0A>", "hi"]
    phi = sentencepiece(tmp_path, Pair("general.name", STRING, "Phi-3-mini"))
    assert named(phi, "</s> \nhi") == ["<s>", "</s>", "\u2581hi"]


def test_tokens_that_end_a_turn_are_complete(tmp_path: Path) -> None:
    """Ends are those of the file, and control tokens that are known to end a turn."""
    tokens = [*ALPHABET, "he", "<|end|>", "<|im_end|>", "<eom>", "<EOT>"]
    types = [1] * len(ALPHABET) + [1, 3, 3, 3, 1]
    pairs = [
        Pair("tokenizer.ggml.merges", ARRAY, (STRING, ["h e"])),
        Pair("tokenizer.ggml.eos_token_id", U32, tokens.index("he")),
        Pair("tokenizer.ggml.eom_token_id", U32, tokens.index("<eom>")),
        Pair("tokenizer.ggml.eot_token_id", U32, 0xFFFFFFFF),
    ]
    folder = settings_folder(vocabulary_file(tmp_path, tokens, pairs, types), tmp_path / "cache")
    expected = {"he", "<|end|>", "<|im_end|>", "<eom>"}  # <EOT> is ordinary text here
    assert read_model_config(folder).eos_ids == {tokens.index(token) for token in expected}


def test_suggested_sampling_becomes_the_default_of_requests(tmp_path: Path) -> None:
    """The sampling of the metadata applies, and a file beside the model takes precedence."""
    path = tmp_path / "model.gguf"
    values = {"temp": 0.6, "top_p": 0.95, "penalty_repeat": 1.05}
    pairs = [Pair(f"general.sampling.{name}", F32, value) for name, value in values.items()]
    path.write_bytes(tiny_model([*pairs, Pair("general.sampling.top_k", 5, 20)]))
    folder = settings_folder(path, tmp_path / "cache")
    given = read_generation_defaults("auto", folder).given()
    expected = {"temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.05, "top_k": 20}
    assert given == pytest.approx(expected)

    (tmp_path / "generation_config.json").write_text('{"temperature": 0.2, "eos_token_id": 1}')
    other = settings_folder(path, tmp_path / "cache")
    assert read_generation_defaults("auto", other).given()["temperature"] == 0.2
    assert read_model_config(other).eos_ids == {1, 3}


def test_chat_templates_of_the_file_render(tmp_path: Path) -> None:
    """The template of the metadata renders chats, and a named one renders tools."""
    path = tmp_path / "model.gguf"
    tools = Pair("tokenizer.chat_template.tool_use", STRING, "{{ tools | length }} tools")
    escape = Pair("tokenizer.chat_template.../../x", STRING, "")
    path.write_bytes(tiny_model([tools, escape]))
    tokenizer = Tokenizer(settings_folder(path, tmp_path / "cache"))
    messages = [{"role": "user", "content": "abc"}]
    assert tokenizer.render_chat(messages) == "abc"
    assert tokenizer.render_chat(messages, [{}, {}]) == "2 tools"
    assert not list(tmp_path.rglob("x.jinja"))
