"""Generated GGUF models: sound files of each kind with up to four faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from draftgate.backends.gguf.block_types import BLOCK_TYPES
from tests.fuzz.gguf_trees import SIZES, Model, encoded, packed, parsed, sound_models
from tests.gguf.files import ARRAY, F32, NUMBERS, STRING, U32, Pair, split_model

EDGES = (
    0, 1, 2, 3, 4, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 1023, 1024, 1025, 4096,
    32767, 32768, 65535, 65536, 65537, 1 << 20, 1 << 22, (1 << 22) + 1, (1 << 31) - 1, 1 << 31,
    (1 << 32) - 1, 1 << 32, 1 << 40, 1 << 61, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1,
)  # fmt: skip
"""Numbers at the limits of types and of the reader."""

FLOATS = (
    0.0, -0.0, 1.0, -1.0, 0.5, 1e-5, 1e4, 5e5, 1e-38, 1e38, float("inf"), float("-inf"),
    float("nan"), 2.0, 8.0, 1e-45,
)  # fmt: skip

TEXTS = (
    "", "a", "\0", "\u2581", " ", "ab", "a b", "b a", "<|end|>", "<|im_end|>", "\U0001f600", "/",
    "..", "../../x", "llama", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3", "bert",
    "gpt2", "t5", "none", "linear", "yarn", "longrope", "gpt-2", "llama-bpe", "qwen2", "smollm",
    "gpt-4o", "tekken", "<0x0A>", "a" * 70, "a" * 1030, "{{ x", "{% for a in b %}", "phi-3",
    "token_embd.weight", "output.weight", "rope_freqs.weight", "<s>", "<unk>", "x" * 70000,
)  # fmt: skip

KEYS = (
    "general.alignment", "general.architecture", "general.name", "general.sampling.temp",
    "general.sampling.top_k", "general.sampling.top_p", "general.sampling.min_p", "split.no",
    "split.count", "split.tensors.count", "tokenizer.chat_template",
    "tokenizer.chat_template.tool_use", "tokenizer.chat_template./../x", "tokenizer.ggml.model",
    "tokenizer.ggml.pre", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type",
    "tokenizer.ggml.scores", "tokenizer.ggml.merges", "tokenizer.ggml.add_bos_token",
    "tokenizer.ggml.add_eos_token", "tokenizer.ggml.add_space_prefix",
    *(f"tokenizer.ggml.{role}_token_id" for role in ("bos", "eos", "eot", "eom", "unknown",
                                                     "padding")),
    *(f"ARCH.{name}" for name in (
        "block_count", "embedding_length", "feed_forward_length", "context_length", "vocab_size",
        "attention.head_count", "attention.head_count_kv", "attention.key_length",
        "attention.value_length", "attention.layer_norm_rms_epsilon", "attention.causal",
        "attention.scale", "attention.sliding_window", "attention.sliding_window_pattern",
        "rope.dimension_count", "rope.freq_base", "rope.freq_base_swa", "rope.scaling.type",
        "rope.scaling.factor", "rope.scale_linear", "rope.scaling.original_context_length",
        "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
        "expert_count", "expert_used_count", "expert_feed_forward_length", "expert_gating_func",
        "expert_shared_count", "expert_weights_norm", "attn_logit_softcapping",
        "final_logit_softcapping",
    )),
)  # fmt: skip
"""Keys that the reader looks up. `ARCH` stands for the architecture of the file."""

PARTS = (
    "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_qkv", "attn_q_norm",
    "attn_k_norm", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down", "ffn_gate_inp", "ffn_gate_exps",
    "ffn_up_exps", "ffn_down_exps", "post_attention_norm", "post_ffw_norm",
)  # fmt: skip
NAMES = (
    "token_embd.weight", "output.weight", "output_norm.weight", "rope_freqs.weight",
    "rope_factors_long.weight", "rope_factors_short.weight", "blk.9999.attn_q.weight",
    "blk.1.attn_q.weight", "blk.0.attn_q.bias", "blk.0.ffn_down.bias", "blk..attn_q.weight",
    *(f"blk.0.{part}.weight" for part in PARTS),
)  # fmt: skip

SPARSE_BYTES = (1 << 16, 1 << 20, 1 << 24)
"""Zeros after a file. They take no place on the disk, and a hostile header may refer to them."""


@dataclass
class Case:
    """The files of a model by name.

    Attributes:
        entry: the name of the file to serve.
        zeros: number of zeros after the entry.
    """

    files: dict[str, bytes]
    entry: str
    zeros: int = 0


_SOUND: list[bytes] = []


def case_of(seed: int) -> Case:
    """Return the case of a seed: a model with up to four faults."""
    random = Random(seed)
    if not _SOUND:
        _SOUND.extend(sound_models())
    if random.random() < 0.15:
        return _split_case(random)
    data = _mutated(random.choice(_SOUND), random)
    zeros = random.choice(SPARSE_BYTES) if random.random() < 0.15 else 0
    return Case({"model.gguf": data}, "model.gguf", zeros)


def _split_case(random: Random) -> Case:
    """Return a model in parts, some of which are damaged, renamed or missing."""
    sizes = random.choice(([5, 4, 2], [11], [1, 10], [3, 3, 3, 2]))
    parts = split_model(sizes)
    files = {}
    for number, data in enumerate(parts, start=1):
        changed = _mutated(data, random) if random.random() < 0.4 else data
        files[f"m-{number:05}-of-{len(parts):05}.gguf"] = changed
    names = list(files)
    if random.random() < 0.2:
        del files[random.choice(names)]
    if random.random() < 0.2:
        first, second = random.choice(names), random.choice(names)
        files[first] = parts[names.index(second)]
    entry = random.choice(names)
    if random.random() < 0.2:
        other = random.choice((0, 1, 2, 4096, 4097, 99999))
        entry = f"m-{random.choice((0, 1, 2)):05}-of-{other:05}.gguf"
    if entry not in files:
        files[entry] = random.choice(parts)
    return Case(files, entry)


def _mutated(data: bytes, random: Random) -> bytes:
    """Return a file with up to four faults: of its tree, of its numbers, and of its bytes."""
    model = parsed(data)
    for _ in range(random.choice((0, 1, 1, 1, 2, 3))):
        random.choice(_CHANGES)(model, random)
    out = encoded(model)
    for _ in range(random.choice((0, 0, 0, 0, 0, 0, 1, 1, 2))):
        at, layout = random.choice(out.places)
        left = len(out.data) - at
        near = (left, left - 8, left // 8, left // 13, left // 33, left + 1, len(out.data))
        wanted = random.choice(EDGES if random.random() < 0.7 else near)
        out.data[at : at + SIZES[layout]] = packed(layout, wanted)
    end = out.places[-1][0]
    if random.random() < 0.05:
        at = random.randrange(end)
        out.data[at] = random.randrange(256)
    if random.random() < 0.05:
        places = [at for at, _ in out.places] + [end, len(out.data) - 1, random.randrange(end)]
        del out.data[random.choice(places) :]
    return bytes(out.data)


def _number(kind: int, random: Random) -> Any:
    layout = NUMBERS.get(kind, "<I")
    if layout in {"<f", "<d"}:
        return random.choice(FLOATS)
    return random.choice(EDGES)


def _any_text(random: Random) -> Any:
    if random.random() < 0.1:
        return random.choice((b"\xff", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"a\xc3"))
    return random.choice(TEXTS)


def _any_value(random: Random, kind: int, depth: int = 0) -> Any:
    if kind == STRING:
        return _any_text(random)
    if kind != ARRAY:
        return _number(kind, random)
    nested = random.random() < 0.2 and depth < 40
    element = ARRAY if nested else random.choice([*NUMBERS, STRING])
    count = 1 if nested else random.choice((0, 1, 2, 4, 4, 5, 300))
    return element, [_any_value(random, element, depth + 1) for _ in range(count)]


def _changed_value(model: Model, random: Random) -> None:
    """Change a value, and keep its type most times."""
    place = random.randrange(len(model.pairs)) if model.pairs else 0
    for pair in model.pairs[place : place + 1]:
        kind = pair.kind if random.random() < 0.7 else random.choice([*NUMBERS, STRING, ARRAY, 13])
        value = _any_value(random, kind)
        if pair.kind == kind == ARRAY and random.random() < 0.8:
            value = _changed_list(*pair.value, random)
        model.pairs[place] = Pair(pair.key, kind, value)


def _changed_list(element: int, values: list[Any], random: Random) -> tuple[int, list[Any]]:
    values = list(values)
    other = _any_value(random, element)
    act = random.randrange(5)
    if act == 0 or not values:
        values.append(other)
    elif act == 1:
        values[random.randrange(len(values))] = other
    elif act == 2:
        del values[random.randrange(len(values))]
    elif act == 3:
        values *= random.choice((2, 30, 300))
    else:
        random.shuffle(values)
    return element, values


def _added_pair(model: Model, random: Random) -> None:
    kind = random.choice([*NUMBERS, U32, F32, STRING, ARRAY])
    names = [one.value for one in model.pairs if one.key == "general.architecture"]
    architecture = names[0] if names and isinstance(names[0], str) else "llama"
    key = random.choice(KEYS).replace("ARCH", architecture)
    found = [place for place, one in enumerate(model.pairs) if one.key == key]
    pair = Pair(key, kind, _any_value(random, kind))
    if found and random.random() < 0.9:
        model.pairs[found[0]] = pair
    else:
        model.pairs.append(pair)


def _moved_pair(model: Model, random: Random) -> None:
    """Delete, repeat or swap pairs."""
    if len(model.pairs) < 2:
        return
    first, second = (random.randrange(len(model.pairs)) for _ in range(2))
    act = random.randrange(4)
    if act == 0:
        del model.pairs[first]
    elif act == 1:
        model.pairs.insert(second, model.pairs[first])
    elif act == 2:
        one, other = model.pairs[first], model.pairs[second]
        model.pairs[first] = Pair(one.key, other.kind, other.value)
    else:
        model.pairs[first], model.pairs[second] = model.pairs[second], model.pairs[first]


def _changed_tensor(model: Model, random: Random) -> None:
    if not model.tensors:
        return
    place = random.randrange(len(model.tensors))
    one, other = model.tensors[place], random.choice(model.tensors)
    sizes = list(one.dimensions)
    act = random.randrange(8)
    if act == 0:
        one = one._replace(name=random.choice(NAMES))
    elif act == 1:
        one = one._replace(kind=random.choice([*BLOCK_TYPES, 9, 15, 39, 1 << 31]))
    elif act == 2:
        near = (other.offset, one.offset + 32, one.offset + 8, len(model.data), *EDGES)
        one = one._replace(offset=random.choice(near))
    elif act == 3 and sizes:
        size = random.choice(sizes)
        near = (size + 1, size - 1, size * 2, size // 2, 1, *EDGES)
        sizes[random.randrange(len(sizes))] = random.choice(near)
        one = one._replace(dimensions=sizes)
    elif act == 4:
        shapes = ([], sizes[::-1], [*sizes, 1], [*sizes, 2], sizes[:-1], [1, *sizes], sizes * 3)
        one = one._replace(dimensions=random.choice(shapes))
    elif act == 5:
        # As many rows or experts as zeros after the file have room for.
        shapes = ([1, 1, 1 << 22], [1, 1 << 22], [32, 1, 1 << 14], [1 << 22], [1, 1 << 11, 1 << 11])
        shape = random.choice(shapes)
        size = len(model.data) - len(model.data) % 32
        one = one._replace(dimensions=shape, kind=random.choice((1, 8)), offset=size)
    elif act == 6:
        model.tensors.insert(random.randrange(len(model.tensors)), one)
        return
    else:
        del model.tensors[place]
        return
    model.tensors[place] = one


def _resized_vocabulary(model: Model, random: Random) -> None:
    """Change the number of tokens, and that of the rows of the embedding with it."""
    count = random.choice((0, 1, 3, 5, 40, 400))
    makes: dict[str, Callable[[int], Any]] = {
        "tokenizer.ggml.tokens": lambda n: random.choice((chr(97 + n % 26) * (n % 40), f"t{n}")),
        "tokenizer.ggml.token_type": lambda _n: random.choice((0, 1, 1, 1, 2, 3, 4, 5, 6)),
        "tokenizer.ggml.scores": lambda n: random.choice((-float(n), 0.0, float("nan"))),
    }
    for place, pair in enumerate(model.pairs):
        if pair.key in makes and pair.kind == ARRAY:
            element, values = pair.value
            if (element == STRING) != pair.key.endswith("tokens") or element == ARRAY:
                continue
            values = [values[n] if n < len(values) else makes[pair.key](n) for n in range(count)]
            model.pairs[place] = pair._replace(value=(element, values))
    for place, one in enumerate(model.tensors):
        if one.name in {"token_embd.weight", "output.weight"} and len(one.dimensions) == 2:
            start = len(model.data) + -len(model.data) % 32
            model.data += bytes(start - len(model.data) + 34 * count)
            sizes = [one.dimensions[0], count]
            model.tensors[place] = one._replace(dimensions=sizes, offset=start)


def _other_version(model: Model, random: Random) -> None:
    model.version = random.choice((0, 1, 2, 2, 2, 3, 3, 4, 3 << 24))
    model.alignment = random.choice((8, 16, 32, 64))


_CHANGES: tuple[Callable[[Model, Random], None], ...] = (
    *(_changed_value, _added_pair, _added_pair, _changed_tensor) * 4,
    _moved_pair,
    _moved_pair,
    _resized_vocabulary,
    _other_version,
)
