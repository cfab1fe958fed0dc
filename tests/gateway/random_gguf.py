"""A small random model as a GGUF file."""

from __future__ import annotations

import itertools
import string
from pathlib import Path

import numpy as np

WIDTH, LAYERS, HEADS, INNER, CONTEXT = 64, 2, 4, 128, 1 << 16

_SPECIAL = ["<unk>", "<s>", "</s>"]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]  # byte tokens encode any text
_PIECES = ["▁", *string.ascii_letters, *string.digits, *"()[]{}:;.,_=+-*/\"'#\n"]
_PAIRS = ["".join(pair) for pair in itertools.product(string.ascii_lowercase, repeat=2)]
_TOKENS = [*_SPECIAL, *_BYTES, *_PIECES, *_PAIRS]


def write_random_gguf(
    path: Path, seed: int = 0, kind: str = "F32", *, unpacked: bool = False
) -> None:
    """Write a model of about 300 kB with random weights, a byte tokenizer and a chat template.

    Args:
        kind: the type of the matrices, such as `Q4_1`.
        unpacked: whether the file has the values of these matrices in F32.
    """
    import gguf

    matrices = gguf.GGMLQuantizationType[kind]

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("random")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(_TOKENS))
    _add_tokenizer(writer)
    for name, tensor in _tensors(np.random.default_rng(seed)):
        if tensor.ndim > 1:
            blocks = gguf.quants.quantize(tensor, matrices)
            if unpacked:
                writer.add_tensor(name, gguf.quants.dequantize(blocks, matrices))
            else:
                writer.add_tensor(name, blocks, raw_dtype=matrices)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer) -> None:
    from gguf import TokenType

    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    kinds += [TokenType.BYTE] * len(_BYTES)
    kinds += [TokenType.NORMAL] * (len(_PIECES) + len(_PAIRS))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(_TOKENS)
    writer.add_token_scores([-float(len(_TOKENS) - i) for i in range(len(_TOKENS))])
    writer.add_token_types([int(kind) for kind in kinds])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for one in messages %}{{ one.content }}{% endfor %}")


def _tensors(draw: np.random.Generator):
    def random(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
        weights = draw.standard_normal((rows, columns)) * scale / columns**0.5
        return weights.astype(np.float32)

    ones = np.ones(WIDTH, dtype=np.float32)
    yield "token_embd.weight", random(len(_TOKENS), WIDTH, 8.0)
    yield "output.weight", random(len(_TOKENS), WIDTH, 4.0)
    yield "output_norm.weight", ones
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        yield f"{block}attn_norm.weight", ones
        yield f"{block}ffn_norm.weight", ones
        for part in ("q", "k", "v", "output"):
            yield f"{block}attn_{part}.weight", random(WIDTH, WIDTH)
        yield f"{block}ffn_gate.weight", random(INNER, WIDTH)
        yield f"{block}ffn_up.weight", random(INNER, WIDTH)
        yield f"{block}ffn_down.weight", random(WIDTH, INNER)
