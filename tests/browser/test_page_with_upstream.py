"""Tests of the live page of a node that forwards to a server without Draftgate's extensions."""

from __future__ import annotations

import json
import re

import pytest
from playwright.async_api import Browser, Page, expect

from tests.browser.states import CHAT, FINISHED, send, upstream_page
from tests.gateway.upstreams import DONE, LAST, TOKEN, USAGE

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

PARSE = """
async (streams) => {
  const { eventData } = await import("/web/client.js");
  const encoder = new TextEncoder();
  return Promise.all(streams.map(async (pieces) => {
    const stream = new ReadableStream({
      start(controller) {
        for (const piece of pieces) controller.enqueue(encoder.encode(piece));
        controller.close();
      },
    });
    const found = [];
    for await (const data of eventData(stream)) found.push(data);
    return found;
  }));
}
"""
EVENTS = ": comment\n\ndata: {}\n\ndata:a\ndata: b\n\nevent: x\ndata:  c\n\ndata: unfinished"


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
async def test_events_are_read_with_every_line_end(script_page: Page, line_end: str) -> None:
    """Events with LF, CRLF or CR are equal, wherever the network divides them."""
    text = EVENTS.replace("\n", line_end)
    streams = [[text[:cut], text[cut:]] for cut in range(len(text))] + [list(text)]
    found = await script_page.evaluate(PARSE, streams)
    assert found == [["{}", "a\nb", " c"]] * len(streams)


async def test_page_shows_what_a_plain_server_reports(browser: Browser) -> None:
    """The page shows text, tokens and times without metrics, and offers no proposers."""
    async with upstream_page(browser, TOKEN, TOKEN, LAST, USAGE, DONE) as (page, _):
        await page.get_by_role("button", name="Generate").click()
        await expect(page.locator("#state-completion")).to_have_text(FINISHED)
        output = page.locator("#said-completion .tokens")
        await expect(output).to_have_js_property("textContent", " a a.")
        await expect(page.locator("#stats [data-stat=tokens]")).to_have_text("3")
        await expect(page.locator("#stats [data-stat=ttft]")).to_have_text(re.compile(r"\d m?s$"))
        await expect(page.locator("#stats [data-stat=accepted]")).to_be_hidden()
        await expect(page.locator("#stats [data-stat=per-step]")).to_be_hidden()
        modes = page.get_by_label("Speculation", exact=True).locator("option")
        await expect(modes).to_have_text(["auto", "off"])
        await expect(page.get_by_role("list", name="Origin").get_by_role("listitem")).to_have_text(
            ["unknown"]
        )


async def test_page_names_what_a_plain_server_does_not_report(browser: Browser) -> None:
    """The page shows only charts with values, and the decision about each request."""
    async with upstream_page(browser, TOKEN, LAST, USAGE, DONE) as (page, _):
        missing = page.locator("#unreported")
        await expect(missing).to_have_text("Not reported by the workers: drafts, KV use.")
        charts = page.locator("#charts figure:visible .name")
        await expect(charts).to_have_text(["Tokens/s", "TTFT", "TPOT", "Running", "Waiting"])
        await expect(page.locator("#live-summary")).to_have_text("0 running, 0 waiting")
        await expect(page.locator("#no-decisions")).to_have_text("No decisions yet.")
        await page.get_by_role("button", name="Generate").click()
        await expect(page.locator("#causes")).to_have_text("1 request: the upstream decides")
        await expect(page.locator("#decisions tr")).to_contain_text("the upstream decides")


async def test_text_of_a_plain_server_differs_from_the_prompt(browser: Browser) -> None:
    """The text is darker than the prompt, although the origin of its tokens is unknown."""
    async with upstream_page(browser, TOKEN, LAST, USAGE, DONE) as (page, _):
        await page.get_by_role("button", name="Generate").click()
        await expect(page.locator("#state-completion")).to_have_text(FINISHED)
        colours = [
            await page.locator(part).first.evaluate("(part) => getComputedStyle(part).color")
            for part in (".given", ".from-unknown")
        ]
        assert colours[0] != colours[1]


async def test_stream_with_crlf_and_without_usage_is_shown(browser: Browser) -> None:
    """The page shows a stream with CRLF whose server ignores the request for usage."""
    blocks = [block.replace(b"\n", b"\r\n") for block in (TOKEN, LAST, DONE)]
    async with upstream_page(browser, *blocks) as (page, _):
        await page.get_by_role("button", name="Generate").click()
        await expect(page.locator("#state-completion")).to_have_text(FINISHED)
        output = page.locator("#said-completion .tokens")
        await expect(output).to_have_js_property("textContent", " a.")
        await expect(page.locator("#stats [data-stat=ttft]")).to_be_visible()
        await expect(page.locator("#stats [data-stat=tokens]")).to_be_hidden()


async def test_chat_with_a_plain_server(browser: Browser) -> None:
    """The page sends chats to a server that does not report whether its model can chat."""
    async with upstream_page(browser, CHAT, USAGE, DONE) as (page, _):
        await page.get_by_role("tab", name="Chat").click()
        await send(page, "hello")
        await expect(page.locator("#state-chat")).to_have_text(FINISHED)
        await expect(page.locator("#turns .tokens")).to_have_js_property("textContent", " a")


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
async def test_reasoning_is_beside_the_answer(browser: Browser, field: str) -> None:
    """The page folds the reasoning of an answer, and sends only the answer with the next turn."""
    thought = CHAT.replace(b'"content":" a"', b'"%s":"because"' % field.encode())
    thought = thought.replace(b'"stop"', b"null")
    async with upstream_page(browser, thought, CHAT, USAGE, DONE) as (page, engine):
        await page.get_by_role("tab", name="Chat").click()
        for turn in range(2):
            await send(page, "hello")
            await expect(page.locator(".answer")).to_have_count(turn + 1)
            await expect(page.locator("#state-chat")).to_have_text(FINISHED)
        await expect(page.locator(".answer .markdown").first).to_have_text("a")
        await page.get_by_text("Reasoning").first.click()
        await expect(page.locator(".answer details p").first).to_have_text("because")
        sent = json.loads(engine.bodies[1])["messages"]
        assert [message["content"] for message in sent] == ["hello", " a", "hello"]


async def test_comparison_of_a_plain_server_reports_its_limits(browser: Browser) -> None:
    """The comparison shows both texts of a server that reports neither drafts nor usage."""
    async with upstream_page(browser, TOKEN, LAST, DONE) as (page, _):
        await page.get_by_role("tab", name="Compare").click()
        await page.get_by_role("button", name="Compare").click()
        await expect(page.locator("#state-compare")).to_have_text(FINISHED)
        await expect(page.locator("#speed-up")).to_contain_text("the server reports no usage")
        for side in ("with", "without"):
            tokens = page.locator(f"#said-{side} .tokens")
            await expect(tokens).to_have_js_property("textContent", " a.")
