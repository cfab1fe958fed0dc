"""`POST /v1/responses`."""

from __future__ import annotations

from typing import Final

from draftgate.gateway.http.generation import Api
from draftgate.gateway.http.replies.response import ResponseRendering
from draftgate.gateway.http.requests.responses import PARAMS, responses_call

RESPONSES: Final = Api("/v1/responses", "chat", responses_call, ResponseRendering, PARAMS)
