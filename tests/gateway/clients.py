"""Official clients of a node.

The clients do not load certificates, because the nodes of the tests speak plain HTTP. Loading takes
30 ms per client (one core, AMD EPYC, 2026-11-23). Tests import `anthropic` only when they use it,
because the import takes two seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import openai
from openai import AsyncOpenAI

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic


def openai_client(url: str, api_key: str = "none") -> AsyncOpenAI:
    """Return OpenAI's client of a node, without retries."""
    http = openai.DefaultAsyncHttpxClient(verify=False)
    return AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0, http_client=http)


def anthropic_client(url: str, api_key: str = "none") -> AsyncAnthropic:
    """Return Anthropic's client of a node, without retries."""
    import anthropic

    http = anthropic.DefaultAsyncHttpxClient(verify=False)
    return anthropic.AsyncAnthropic(base_url=url, api_key=api_key, max_retries=0, http_client=http)
