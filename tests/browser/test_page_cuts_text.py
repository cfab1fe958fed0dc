"""Tests of `align.js`, which cuts text at the borders of tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest
from playwright.async_api import Page

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.core.detokenize import TextStream
from draftgate.backends.tokenizer import Tokenizer

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

ALIGN = """
async (streams) => {
  const { Aligner } = await import("/web/align.js");
  return streams.map((chunks) => {
    const aligner = new Aligner();
    return chunks.map(({ text, steps }) =>
      aligner.add(text, steps).map((piece) => [piece.text, piece.step && piece.step.number]));
  });
}
"""

LETTERS = "ab \n\t(é漢😀👩‍👩‍👧'\"x.="
STREAMS = 300


def chunks_of(tokenizer: Tokenizer, text: str, rng: random.Random, stop: str) -> list[dict]:
    """Return a text as chunks of random steps, with text held back for stop strings."""
    ids, texts = tokenizer.encode(text), TextStream(tokenizer.decode, (stop,))
    chunks: list[dict[str, Any]] = []
    while ids and not texts.stopped:
        count = rng.randint(1, 4)
        taken, ids = ids[:count], ids[count:]
        step = {"tokens": [tokenizer.token_text(token) for token in taken], "accepted": 0}
        step["number"] = len(chunks)
        chunks.append({"text": "".join(map(texts.add, taken)), "steps": [step]})
    chunks.append({"text": texts.flush(), "steps": []})
    return chunks


async def test_pieces_join_to_the_text_of_the_chunks(script_page: Page) -> None:
    """The pieces of each chunk join to its text, even if text is held back or cut."""
    rng = random.Random(8)
    tokenizer = Tokenizer(SHIPPED_MODEL)
    texts = ["".join(rng.choices(LETTERS, k=rng.randint(1, 40))) for _ in range(STREAMS)]
    streams = [chunks_of(tokenizer, text, rng, "xx") for text in texts]
    for chunks, pieces in zip(streams, await script_page.evaluate(ALIGN, streams), strict=True):
        for chunk, cut in zip(chunks, pieces, strict=True):
            assert "".join(text for text, _ in cut) == chunk["text"]
            assert all(text for text, _ in cut)


async def test_each_token_with_whole_characters_is_one_piece(script_page: Page) -> None:
    """Each token with whole characters becomes one piece of its own step."""
    rng = random.Random(9)
    tokenizer = Tokenizer(SHIPPED_MODEL)
    texts = ["".join(rng.choices("ab (\n.=x'", k=rng.randint(1, 60))) for _ in range(STREAMS)]
    streams = [chunks_of(tokenizer, text, rng, "never") for text in texts]
    for chunks, pieces in zip(streams, await script_page.evaluate(ALIGN, streams), strict=True):
        expected = [(text, s["number"]) for c in chunks for s in c["steps"] for text in s["tokens"]]
        cut = [tuple(piece) for chunk in pieces for piece in chunk]
        assert cut == expected


@pytest.mark.parametrize(
    ("chunks", "pieces"),
    [
        ([{"text": "ab", "steps": []}], [["ab", None]]),
        ([{"text": "", "steps": [["a", "b"]]}, {"text": "ab", "steps": []}], [["a", 0], ["b", 0]]),
        ([{"text": "a", "steps": [["ab"]]}, {"text": "b", "steps": []}], [["a", 0], ["b", 0]]),
        ([{"text": "Hello x", "steps": [[" Hello"], [" x"]]}], [["Hello", 0], [" x", 1]]),
        ([{"text": "é!", "steps": [["\ufffd"], ["\ufffd", "!"]]}], [["é", 0], ["!", 1]]),
        ([{"text": "ab", "steps": [["a", "<|end|>", "b"]]}], [["a", 0], ["b", 0]]),
    ],
)
async def test_special_cases(script_page: Page, chunks: list[dict], pieces: list) -> None:
    """The aligner handles unknown steps, held-back text, stripped spaces and split characters."""
    number = 0
    for chunk in chunks:
        steps = []
        for tokens in chunk["steps"]:
            steps.append({"tokens": tokens, "accepted": 0, "number": number})
            number += 1
        chunk["steps"] = steps
    (cut,) = await script_page.evaluate(ALIGN, [chunks])
    assert [piece for chunk in cut for piece in chunk] == pieces
