"""Prompts for the shipped model from held-out files of the standard library."""

from __future__ import annotations

import random
from collections.abc import Iterator

from draftgate.backends.tokenizer import Tokenizer
from training.corpus import held_out_files

_LEAST_CHARACTERS = 2000
_WINDOW_CHARACTERS = 1000


def held_out_prompts(
    tokenizer: Tokenizer, count: int, *, seed: int = 0, least: int = 40, most: int = 240
) -> list[tuple[int, ...]]:
    """Return `count` prompts of `least` to `most` tokens, identical for the same seed."""
    rng = random.Random(seed)
    windows = held_out_windows(rng)
    prompts = []
    for _ in range(count):
        tokens = tokenizer.encode(next(windows))
        prompts.append(tuple(tokens[: rng.randint(least, most)]))
    return prompts


def held_out_windows(rng: random.Random) -> Iterator[str]:
    """Yield windows of 1,000 characters of the held-out files, without end."""
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in held_out_files()]
    texts = [text for text in texts if len(text) > _LEAST_CHARACTERS]
    while True:
        text = rng.choice(texts)
        begin = rng.randrange(len(text) - _WINDOW_CHARACTERS)
        yield text[begin : begin + _WINDOW_CHARACTERS]
