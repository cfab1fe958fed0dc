"""Tests of pages from other servers in a browser, which may use a node only if it lists them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from tests.gateway.harness import ScriptedBackend, events, running
from tests.gateway.upstreams import upstream

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

STREAM = """async (url) => {
  const body = JSON.stringify({ prompt: "x", max_tokens: 3, stream: true });
  const headers = { "content-type": "application/json", authorization: "Bearer sk-page" };
  const response = await fetch(url + "/v1/completions", { method: "POST", headers, body });
  return [response.headers.get("x-request-id"), await response.text()];
}"""
BLIND_POST = """async (url) => {
  const body = JSON.stringify({ prompt: "x", max_tokens: 3 });
  return (await fetch(url + "/v1/completions", { method: "POST", mode: "no-cors", body })).type;
}"""
LIVE = """(url) => new Promise((resolve) => {
  const source = new EventSource(url + "/live");
  source.onopen = () => resolve("open");
  source.onerror = () => resolve("failed");
})"""


async def blank(_request: web.Request) -> web.Response:
    return web.Response(text="<title>another server</title>", content_type="text/html")


@pytest_asyncio.fixture(loop_scope="module")
async def foreign(browser) -> AsyncIterator[tuple[Any, str]]:
    """A page of another server, and its origin."""
    async with upstream(blank) as server:
        context = await browser.new_context()
        page = await context.new_page()
        await page.goto(f"{server.url}/page")
        yield page, server.url
        await context.close()


async def test_foreign_page_can_neither_post_nor_read_samples(foreign) -> None:
    """A POST of a foreign page reaches no worker, and `/live` does not open."""
    page, _ = foreign
    backend = ScriptedBackend()
    async with running(backends=[backend]) as gateway:
        assert await page.evaluate(BLIND_POST, gateway.url) == "opaque"
        assert await page.evaluate(LIVE, gateway.url) == "failed"
    assert backend.submitted.empty()


async def test_listed_page_reads_a_stream(foreign) -> None:
    """A page of a listed origin sends its key and reads a stream and the request id."""
    page, origin = foreign
    async with running(cors_origins=(origin,), api_keys=("sk-page",)) as gateway:
        request_id, text = await page.evaluate(STREAM, gateway.url)
    assert request_id
    assert events(text)[-1] == "[DONE]"
