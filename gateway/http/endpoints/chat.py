"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Final

from draftgate.gateway.http.generation import Api
from draftgate.gateway.http.replies.chat import ChatRendering
from draftgate.gateway.http.requests.validation import chat_call

CHAT: Final = Api(
    "/v1/chat/completions", "chat", chat_call, ChatRendering, {"messages": "messages"}
)
