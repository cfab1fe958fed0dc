"""The tokenizer's bounds."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as FastTokenizer

from draftgate.backends.shipped import SHIPPED_MODEL
from draftgate.backends.tokenizer import Tokenizer


def test_the_vocabulary_ends_after_its_largest_id(tmp_path: Path) -> None:
    """Ids may have gaps: the bound counts ids, not tokens, and an id in a gap has no text."""
    fast = FastTokenizer(models.WordLevel({"a": 0, "b": 7, "?": 3}, unk_token="?"))
    fast.add_special_tokens([AddedToken("<s>")])
    fast.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    largest = max(fast.get_vocab().values())
    assert (tokenizer.vocab_size, fast.get_vocab_size()) == (largest + 1, 4)
    assert tokenizer.decode([0, 5, 7]) == "a b"
    assert tokenizer.token_text(5) == ""


@pytest.mark.parametrize("work", ["encode", "decode"])
def test_other_threads_run_while_a_long_text_is_worked_on(work: str) -> None:
    """Tokenising lets go of the interpreter: in a thread, it leaves the event loop alone."""
    tokenizer = Tokenizer(SHIPPED_MODEL)
    given = "def f(x): return x + 1\n" * 20_000 if work == "encode" else [1000] * 1_000_000
    ended = threading.Event()

    def run() -> None:
        getattr(tokenizer, work)(given)
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    turns = 0
    while not ended.is_set():
        time.sleep(0)  # lets go of the interpreter, and has to get it back
        turns += 1
    thread.join()
    assert turns > 1000  # were it held: some tens, before and after
