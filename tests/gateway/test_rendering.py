"""Chunks are put together from parts, and are the JSON that their struct would give."""

from __future__ import annotations

import json

import hypothesis.strategies as st
import pytest
from hypothesis import given

from draftgate.backends.types import Delta, FinishReason
from draftgate.gateway.http.replies.chat import ChatRendering
from draftgate.gateway.http.replies.completion import CompletionRendering
from draftgate.gateway.http.replies.rendering import Frame
from draftgate.gateway.http.requests.validation import Call

TEXTS = st.text(st.characters(exclude_categories=("Cs",)))


@pytest.mark.parametrize(
    ("rendering", "kind"),
    [(ChatRendering, "chat.completion.chunk"), (CompletionRendering, "text_completion")],
)
@given(
    model=TEXTS,
    text=TEXTS.filter(bool),
    choice=st.integers(0, 200),
    end=st.sampled_from([*FinishReason, None]),
)
def test_a_chunk_is_whole_json(rendering, kind, model, text, choice, end) -> None:
    """Whatever is in a text or a name, a chunk parses, and says what delta and frame say."""
    frame = Frame("1f", 7, model, None, logprobs=False)  # type: ignore[arg-type]
    call = Call(None, stream=True, include_usage=False)  # type: ignore[arg-type]
    sent = rendering(frame, call).chunk(Delta(choice, (1,), text, (), end))
    assert sent.startswith(b"data: ")
    assert sent.endswith(b"\n\n")
    chunk = json.loads(sent.removeprefix(b"data: "))
    (said,) = chunk.pop("choices")
    assert chunk.pop("id").endswith("-1f")
    assert chunk == {"object": kind, "created": 7, "model": model}
    content = said.pop("text", None) or said.pop("delta")["content"]
    assert content == text
    assert said == {"index": choice, "logprobs": None, "finish_reason": end and end.value}
