"""The query tower: word vectors from a linear regression, and a layer that starts as the identity.

Shapes: B is the number of texts, L their longest length, V the size of the vocabulary, D the size
of an embedding, H the hidden size, which is D + `FILLERS`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from scipy import linalg, sparse
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertConfig, BertModel

PAD, UNKNOWN, START = "[PAD]", "[UNK]", "[CLS]"
SPECIAL: Final = (PAD, UNKNOWN, START)
"""Each text begins with `START`, so that no text is empty."""

FILLERS: Final = 32
"""Hidden dimensions, one head, that give all words one mean and one norm (`_set_words`)."""

MODULES: Final = (
    ("", "Transformer"),
    ("1_Pooling", "Pooling"),
    ("2_Dense", "Dense"),
    ("3_Normalize", "Normalize"),
)

Texts = Sequence[Sequence[int]]
Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class Shape:
    """The shape of a query tower.

    Attributes:
        words: entries of the vocabulary.
        inner: neurons of the feed-forward network of each layer.
        max_tokens: maximum length of a text.
    """

    words: int = 6144
    layers: int = 1
    head: int = 32
    inner: int = 384
    max_tokens: int = 256


def cut_tokenizer(teacher: Tokenizer, texts: Iterable[str], size: int) -> Tokenizer:
    """Return a WordPiece tokenizer with the teacher's most frequent entries.

    Words that it lacks are divided into more pieces. Single characters stay, so that every word in
    ASCII can be divided.
    """
    counts = Counter[int]()
    for encoding in teacher.encode_batch_fast(list(texts), add_special_tokens=False):
        counts.update(encoding.ids)
    ids = teacher.get_vocab()
    letters = [t for t in ids if len(t.removeprefix("##")) == 1 and t.isascii()]
    ranked = sorted(ids.keys() - {*letters, *SPECIAL}, key=lambda t: (-counts[ids[t]], ids[t]))
    kept = [*SPECIAL, *sorted(letters, key=ids.__getitem__), *ranked][:size]
    tokenizer = Tokenizer(models.WordPiece({t: n for n, t in enumerate(kept)}, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    starts = [(START, kept.index(START))]
    tokenizer.post_processor = processors.TemplateProcessing(f"{START} $A", None, starts)
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def regress_words(texts: Texts, vectors: Vectors, words: int, ridge: float) -> Vectors:
    """Return the word vectors, [V, D], whose means are nearest to the vectors of texts.

    Args:
        vectors: vectors of the texts, [texts, D].
        ridge: weight of the squared norms of the word vectors (ridge regression).
    """
    lengths = [len(text) for text in texts]
    rows = np.repeat(np.arange(len(texts)), lengths)
    shares = np.repeat([1 / length for length in lengths], lengths).astype(np.float32)
    means = sparse.csr_matrix((shares, (rows, np.concatenate(texts))), (len(texts), words))
    gram = (means.T @ means).toarray()
    gram[np.diag_indices(words)] += ridge
    found: Vectors = linalg.solve(gram, means.T @ vectors, assume_a="pos", overwrite_a=True)
    return found


class Student(nn.Module):
    """A BERT model with mean pooling and a dense layer.

    At first, a text is the mean of its word vectors.
    """

    def __init__(self, shape: Shape, words: Vectors) -> None:
        super().__init__()
        self.shape = shape
        size = words.shape[1]
        self.bert = BertModel(_config(shape, len(words), size + FILLERS), add_pooling_layer=False)
        self.dense = nn.Linear(size + FILLERS, size, bias=False)
        self._set_words(torch.from_numpy(words))

    @torch.no_grad()
    def _set_words(self, words: Tensor) -> None:
        """Make the mean of word vectors the vector of a text.

        Layer normalisation would remove the norm of a word, which is its weight in the mean. The
        fillers give all words the mean 0 and one norm, so that it changes nothing. The dense layer
        drops the fillers.
        """
        size = words.shape[1]
        shift = -words.sum(1, keepdim=True) / FILLERS
        square = words.pow(2).sum(1, keepdim=True) + FILLERS * shift.pow(2)
        norm = 1.05 * square.max()
        signs = torch.tensor([1.0, -1.0]).repeat(FILLERS // 2)
        fillers = shift + ((norm - square) / FILLERS).sqrt() * signs
        embeddings = self.bert.embeddings
        embeddings.word_embeddings.weight.copy_(torch.cat([words, fillers], 1))
        embeddings.position_embeddings.weight.zero_()
        embeddings.token_type_embeddings.weight.zero_()
        norms = [embeddings.LayerNorm]
        for layer in self.bert.encoder.layer:
            layer.attention.output.dense.weight.zero_()
            layer.output.dense.weight.zero_()
            norms += [layer.attention.output.LayerNorm, layer.output.LayerNorm]
        for each in norms:
            each.weight.fill_(float((norm / (size + FILLERS)).sqrt()))
        self.dense.weight.copy_(torch.eye(size, size + FILLERS))

    def forward(self, texts: Texts) -> Tensor:
        """Return the vectors of texts, [B, D], which are not normalised."""
        found: Tensor = self.dense(pooled(self.bert, texts))
        return found

    def groups(self, rate: float) -> list[dict[str, object]]:
        """Return the parameters for an optimiser, with weight decay for the matrices of layers."""
        matrices = [p for p in self.bert.encoder.parameters() if p.ndim == 2]
        chosen = {id(p) for p in matrices}
        rest = [p for p in self.parameters() if id(p) not in chosen]
        return [
            {"params": matrices, "lr": rate, "weight_decay": 0.01},
            {"params": rest, "lr": rate, "weight_decay": 0.0},
        ]

    def save(self, tokenizer: Tokenizer, folder: Path) -> None:
        """Write a checkpoint with float16 weights in the layout of sentence-transformers."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: value.half() for name, value in self.bert.state_dict().items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        config = {
            **self.bert.config.to_diff_dict(),
            "architectures": ["BertModel"],
            "model_type": "bert",
            "dtype": "float16",
        }
        _write(folder / "config.json", config)
        tokenizer.save(str(folder / "tokenizer.json"))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": PAD,
            "unk_token": UNKNOWN,
            "cls_token": START,
            "model_max_length": self.shape.max_tokens,
        }
        _write(folder / "tokenizer_config.json", settings)
        _write(folder / "sentence_bert_config.json", {"max_seq_length": self.shape.max_tokens})
        hidden, size = self.dense.in_features, self.dense.out_features
        pooling = {"word_embedding_dimension": hidden, "pooling_mode_mean_tokens": True}
        _write(folder / "1_Pooling" / "config.json", pooling)
        dense = {
            "in_features": hidden,
            "out_features": size,
            "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
        }
        _write(folder / "2_Dense" / "config.json", dense)
        stored = {"linear.weight": self.dense.weight.detach().half()}
        save_file(stored, folder / "2_Dense" / "model.safetensors")
        listed = [
            {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for n, (path, kind) in enumerate(MODULES)
        ]
        _write(folder / "modules.json", listed)


def pooled(model: BertModel, texts: Texts) -> Tensor:
    """Return the means of the states of texts, [B, H].

    The products are in bfloat16, which is many times as fast on CPUs with such instructions.
    """
    longest = max(map(len, texts))
    ids, mask = torch.zeros(2, len(texts), longest, dtype=torch.long)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
        mask[row, : len(text)] = 1
    with torch.autocast("cpu", torch.bfloat16):
        states = model(input_ids=ids, attention_mask=mask).last_hidden_state
    weights = mask[..., None].float()
    found: Tensor = (states.float() * weights).sum(1) / weights.sum(1)
    return found


def distillation(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the squared error of vectors plus one minus their cosine.

    Args:
        student: vectors of queries, [B, D].
        teacher: unit vectors of the same queries.
    """
    error = (student - teacher).pow(2).sum(-1)
    return (error + 1 - functional.cosine_similarity(student, teacher)).mean()


def _config(shape: Shape, words: int, hidden: int) -> BertConfig:
    return BertConfig(
        vocab_size=words,
        hidden_size=hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=hidden // shape.head,
        intermediate_size=shape.inner,
        max_position_embeddings=shape.max_tokens,
        type_vocab_size=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=0,
        attn_implementation="sdpa",
    )


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
