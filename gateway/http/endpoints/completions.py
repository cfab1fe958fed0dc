"""`POST /v1/completions`."""

from __future__ import annotations

from typing import Final

from draftgate.gateway.http.generation import Api
from draftgate.gateway.http.replies.completion import CompletionRendering
from draftgate.gateway.http.requests.validation import completion_call

COMPLETIONS: Final = Api("/v1/completions", "text_completion", completion_call, CompletionRendering)
