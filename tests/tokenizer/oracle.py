"""Test checkpoints that our tokenizer and `transformers` both load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from draftgate.backends.chat_template import PromptEnding
from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NOW = datetime(2026, 2, 28, 23, 59, 59)  # noqa: DTZ001  # templates use local time
REFUSED = "(refused)"


class Pair(NamedTuple):
    """A checkpoint in both tokenizers."""

    ours: Tokenizer
    theirs: PreTrainedTokenizerBase

    def render_both(
        self,
        messages: list[dict[str, Any]],
        tools: Any = None,
        ending: PromptEnding = PromptEnding.RESPONSE,
    ) -> tuple[str, str]:
        """Return our prompt and the prompt of `transformers`, or `REFUSED` for an error."""
        options = {
            "add_generation_prompt": ending is PromptEnding.RESPONSE,
            "continue_final_message": ending is PromptEnding.OPEN,
        }
        return (
            _outcome(lambda: self.ours.render_chat(messages, tools, ending=ending)),
            _outcome(
                lambda: self.theirs.apply_chat_template(
                    messages, tools=tools, tokenize=False, **options
                )
            ),
        )


def checkpoint(directory: Path, settings: dict[str, Any], **files: str) -> Path:
    """Write a tokenizer with these settings and templates and return its directory.

    Args:
        directory: the directory of the checkpoint, which is created if necessary.
        settings: the content of `tokenizer_config.json`, without the class.
        files: template texts by name: `chat_template`, or `more__rag` for an additional file.
    """
    directory.mkdir(exist_ok=True)
    shutil.copy(SHIPPED_MODEL / "tokenizer.json", directory)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, text in files.items():
        path = directory / f"{name.replace('more__', 'additional_chat_templates/')}.jinja"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return directory


def load(directory: Path) -> Pair:
    """Load a checkpoint with both tokenizers."""
    from transformers import AutoTokenizer

    return Pair(Tokenizer(directory, lambda: NOW), AutoTokenizer.from_pretrained(directory))


def _outcome(render: Callable[[], str]) -> str:
    try:
        return render()
    except Exception:  # noqa: BLE001  # transformers raises any error of a template
        return REFUSED
