"""lm-eval with local tasks, through its models `local-completions` and `local-chat-completions`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lm_eval
import pytest
from common import TOKENIZER
from lm_eval.tasks import TaskManager

TASKS = Path(__file__).parent / "tasks"


def evaluated(model: str, url: str, task: str, **options: Any) -> dict[str, Any]:
    """Return the metrics and the samples of a task.

    Args:
        url: URL of the endpoint.
    """
    found = lm_eval.simple_evaluate(
        model=model,
        model_args={
            "model": "draftgate-demo", "base_url": url, "tokenizer_backend": "huggingface",
            "tokenizer": str(TOKENIZER), "max_retries": 1, "num_concurrent": 2,
        },
        tasks=[task], task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        bootstrap_iters=0, **options,
    )  # fmt: skip
    return {**found["results"][task], "samples": found["samples"][task]}


@pytest.mark.parametrize("batch_size", [1, 4])
def test_loglikelihood_task(shipped: str, batch_size: int) -> None:
    """The right continuations are the likeliest, in batches of token lists."""
    url = f"{shipped}/completions"
    found = evaluated("local-completions", url, "draftgate_choices", batch_size=batch_size)
    assert found["acc,none"] >= 5 / 6
    assert len(found["samples"]) == 6


def test_generation_task(shipped: str) -> None:
    """Greedy completions up to a line break are the expected lines."""
    found = evaluated("local-completions", f"{shipped}/completions", "draftgate_lines")
    assert found["exact_match,none"] == 1


def test_generation_task_as_chats(shipped: str) -> None:
    """The same task runs as chats, which the template of the shipped model changes little."""
    found = evaluated(
        "local-chat-completions", f"{shipped}/chat/completions", "draftgate_lines",
        apply_chat_template=True,
    )  # fmt: skip
    assert len(found["samples"]) == 3
    assert all(sample["resps"][0][0] is not None for sample in found["samples"])
