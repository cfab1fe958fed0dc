"""The tokens of a response of upstreams, as far as they are known."""

from __future__ import annotations

from typing import Final

from draftgate.backends.base import Exchange, TokenUsage
from draftgate.gateway.dispatch.admission import Entry
from draftgate.gateway.dispatch.upstreams.kept_stream import KeptStream

NO_TOKENS: Final = TokenUsage(0, 0, 0)


def usage_so_far(
    exchange: Exchange | None, entry: Entry, kept: KeptStream | None, *, streaming: bool
) -> TokenUsage:
    """Return the reported or estimated tokens of a response that is no error.

    Args:
        exchange: the response of the present upstream, or None without one.
        kept: the stream that can be continued, or None.
    """
    need = entry.needs[0]
    if kept is not None and kept.tokens is not None:
        return kept.usage(None if exchange is None else exchange.usage())
    if exchange is None:
        return NO_TOKENS
    usage = exchange.usage()
    if usage.prompt:
        return usage
    is_counted = streaming or usage.output > 0
    output = usage.output if is_counted else need.sequences * entry.max_tokens
    return TokenUsage(need.prompt_tokens, 0, output)
