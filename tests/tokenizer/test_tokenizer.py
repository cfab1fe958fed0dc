"""Tests of a tokenizer's vocabulary and of its behaviour in threads."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as FastTokenizer

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.tokenizer import Tokenizer


def test_vocab_size_is_largest_id_plus_one(tmp_path: Path) -> None:
    """The vocabulary size is the largest id plus one, and an unused id has no text."""
    fast = FastTokenizer(models.WordLevel({"a": 0, "b": 7, "?": 3}, unk_token="?"))
    fast.add_special_tokens([AddedToken("<s>")])
    fast.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    largest = max(fast.get_vocab().values())
    assert (tokenizer.vocab_size, fast.get_vocab_size()) == (largest + 1, 4)
    assert tokenizer.decode([0, 5, 7]) == "a b"
    assert tokenizer.token_text(5) == ""


@pytest.mark.parametrize("work", ["encode", "decode"])
def test_other_threads_run_during_long_encode_or_decode(work: str) -> None:
    """Encoding and decoding release the GIL, so other threads run during long calls."""
    tokenizer = Tokenizer(SHIPPED_MODEL)
    argument = "def f(x): return x + 1\n" * 20_000 if work == "encode" else [1000] * 1_000_000
    ended = threading.Event()

    def run() -> None:
        getattr(tokenizer, work)(argument)
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    turns = 0
    while not ended.is_set():
        time.sleep(0)  # releases the GIL and acquires it again
        turns += 1
    thread.join()
    assert turns > 1000  # a call that holds the GIL allows only some tens of turns
