"""The headers with the state of a key's quota, as in OpenAI's and in Anthropic's API."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Mapping
from datetime import UTC, datetime
from typing import Final

from aiohttp import web

from draftgate.gateway.dispatch.quotas import Quotas
from draftgate.gateway.http.context import ACCOUNT, is_anthropic
from draftgate.gateway.http.direct import Request, Response
from draftgate.policies.quotas import Limit, QuotaLevel

QUOTAS: Final = web.RequestKey("quotas", Quotas)
"""The quotas of the model of a request. Only requests that count against quotas have this key."""

_FIELDS: Final = ("limit", "remaining", "reset")
_OPENAI_NAMES: Final = {
    limit: [f"x-ratelimit-{field}-{limit}" for field in _FIELDS] for limit in Limit
}
_ANTHROPIC_NAMES: Final = {
    limit: [f"anthropic-ratelimit-{limit}-{field}" for field in _FIELDS] for limit in Limit
}

RATE_LIMIT_HEADERS: Final = tuple(name for names in _OPENAI_NAMES.values() for name in names)


def add_rate_limits(request: Request, response: Response) -> Awaitable[None] | None:
    """Add the state of each limit of a key with a quota, or return what does so once awaited."""
    quotas, account = request.get(QUOTAS), request.get(ACCOUNT)
    if quotas is None or account is None or account.name not in quotas.limited:
        return None
    levels = quotas.levels_at_once(account.name)
    if levels is None:
        return _add_later(request, response, quotas.levels(account.name))
    _add(request, response, levels)
    return None


async def _add_later(
    request: Request, response: Response, levels: Awaitable[Mapping[Limit, QuotaLevel]]
) -> None:
    _add(request, response, await levels)


def _add(request: Request, response: Response, levels: Mapping[Limit, QuotaLevel]) -> None:
    names, shown = _OPENAI_NAMES, duration
    if is_anthropic(request):
        names, shown = _ANTHROPIC_NAMES, _time
    for limit, level in levels.items():
        most, remaining, reset = names[limit]
        response.headers[most] = str(level.most)
        response.headers[remaining] = str(level.remaining)
        response.headers[reset] = shown(level.reset_s)


def duration(seconds: float) -> str:
    """Return a time as OpenAI's API does, such as `1h0m3s`, `1.5s` or `20ms`, rounded up."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    shown = f"{rest / 1000:g}s"
    if hours:
        return f"{hours}h{minutes}m{shown}"
    return f"{minutes}m{shown}" if minutes else shown


def _time(seconds: float) -> str:
    """Return the time after some seconds in RFC 3339, rounded up to a second."""
    at = datetime.fromtimestamp(math.ceil(time.time() + seconds), UTC)
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")
