"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Final

from gateway.http.generation import Api
from gateway.http.replies.chat import ChatRendering
from gateway.http.requests.validation import chat_call

CHAT: Final = Api(
    "/v1/chat/completions", "chat", chat_call, ChatRendering, {"messages": "messages"}
)
