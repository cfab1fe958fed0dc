"""The tokenizer's bounds."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as FastTokenizer

from backends.tokenizer import Tokenizer


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
