"""Answers in the shape of OpenAI's embeddings."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from draftgate.backends.errors import BackendFailed
from draftgate.gateway.http.replies.rendering import encode
from draftgate.gateway.http.replies.shapes import EmbeddingList, EmbeddingReply, EmbeddingUsage

_WIRE = np.dtype("<f4")


def unit_vector(state: bytes, dimensions: int | None) -> npt.NDArray[np.float32]:
    """Return a pooled hidden state as a vector of length 1.

    Cut to fewer dimensions it is normalised again: models trained for it (Matryoshka, arXiv
    2205.13147) keep most of their meaning in front.

    Args:
        state: float32 in little-endian order.
        dimensions: leading numbers to keep; None keeps all.

    Raises:
        BackendFailed: it is not finite.
    """
    vector = np.frombuffer(state, _WIRE)[:dimensions].astype(np.float64)
    length = float(np.linalg.norm(vector))
    if not np.isfinite(length):
        raise BackendFailed("a hidden state is not finite")
    return (vector / length if length else vector).astype(_WIRE)


def embeddings_reply(
    states: Sequence[bytes],
    *,
    dimensions: int | None,
    as_base64: bool,
    model: str,
    prompt_tokens: int,
) -> bytes:
    """Return the JSON of an answer. Vectors are encoded one by one: each holds the GIL for long.

    Args:
        states: pooled hidden states, in the order of the inputs.
        dimensions: leading numbers of each that are wanted; None is all.
        as_base64: as base64 of little-endian float32, not as lists of numbers.
        model: as clients call it.
        prompt_tokens: of all inputs.

    Raises:
        BackendFailed: a state is not finite.
    """
    data = []
    for index, state in enumerate(states):
        vector = unit_vector(state, dimensions)
        shown = base64.b64encode(vector.tobytes()).decode() if as_base64 else vector.tolist()
        data.append(EmbeddingReply(index, msgspec.Raw(encode(shown))))
    return encode(EmbeddingList(data, model, EmbeddingUsage(prompt_tokens, prompt_tokens)))
