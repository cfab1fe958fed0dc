"""Tests of the live page with the engine and the shipped model, and with the simulator."""

from __future__ import annotations

import re

import pytest
from playwright.async_api import expect

from tests.browser.browse import visiting
from tests.browser.states import adjust
from tests.gateway.harness import client, running

pytest.importorskip("torch")

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

PROMPT = "class Point:\n    def __init__(self, x, y):\n        self.x = x\n"
ENGINE = {"backend": "engine", "kv_bytes": 32 << 20, "threads": 1}
DONE = re.compile("^(Done in|Stopped after)")


@pytest.mark.parametrize("settings", [{"backend": "sim"}, ENGINE], ids=["sim", "engine"])
async def test_page_shows_the_response_and_updates_charts(browser, settings) -> None:
    """The page shows the same text as another client receives, and updates its charts."""
    async with running(**settings) as gateway, visiting(browser, gateway.url) as visit:
        page, live = visit.page, gateway.node.live
        live.take()
        tokens = page.get_by_role("img", name=re.compile("^Tokens.s:"))
        await expect(tokens).to_have_accessible_name(re.compile("^Tokens.s: [0-9]"))
        before = await tokens.locator(".line").get_attribute("d")
        await page.get_by_role("tab", name="Completion").click()
        await page.get_by_label("Prompt", exact=True).fill(PROMPT)
        await adjust(page, max_tokens="40", seed="7")
        await page.get_by_role("button", name="Generate").click()
        await expect(page.locator("#state-completion")).to_have_text(DONE)
        body = {"prompt": PROMPT, "max_tokens": 40, "seed": 7}
        async with client(gateway) as http:
            response = (await http.post("/v1/completions", json=body)).json()
        shown = page.locator("#said-completion .tokens")
        await expect(shown).to_have_js_property("textContent", response["choices"][0]["text"])
        live.take()
        await expect(tokens.locator(".line")).not_to_have_attribute("d", before or "")
        await expect(page.locator("#decisions tr.mine")).to_have_count(1)
        visit.check()


async def test_code_model_offers_no_chat(browser) -> None:
    """The shipped model has a chat template for tools, but completes code, so the page opens with
    the completion and has no chat."""
    async with running(**ENGINE) as gateway, visiting(browser, gateway.url) as visit:
        tabs = visit.page.get_by_role("tab")
        await expect(tabs).to_have_text(["Completion", "Compare"])
        await expect(tabs.first).to_have_attribute("aria-selected", "true")
        visit.check()


@pytest.mark.parametrize("settings", [{"backend": "sim"}, ENGINE], ids=["sim", "engine"])
async def test_drafted_tokens_are_marked(browser, settings) -> None:
    """The number of marked tokens equals the accepted tokens in the response's metrics."""
    async with running(**settings) as gateway, visiting(browser, gateway.url) as visit:
        page = visit.page
        await page.get_by_role("tab", name="Completion").click()
        await adjust(page, mode="ngram", seed="1")
        await page.get_by_role("button", name="Generate").click()
        await expect(page.locator("#state-completion")).to_have_text(DONE)
        words = await page.locator("#stats [data-stat=accepted]").text_content()
        accepted = int(words.split()[0])
        assert accepted > 0
        tokens = page.locator("#said-completion .tokens")
        await expect(tokens.locator(".from-unknown")).to_have_count(0, timeout=1000)
        await expect(tokens.locator(".from-ngram")).to_have_count(accepted, timeout=1000)
        await tokens.locator(".from-ngram").first.hover()
        await expect(page.get_by_role("tooltip")).to_contain_text("draft tokens verified")


@pytest.mark.parametrize("settings", [{"backend": "sim"}, ENGINE], ids=["sim", "engine"])
async def test_comparison_shows_equal_texts_and_a_speed_up(browser, settings) -> None:
    """Both texts are equal, only the run with speculation has drafts, and the page shows a
    factor."""
    async with running(**settings) as gateway, visiting(browser, gateway.url) as visit:
        page = visit.page
        await page.get_by_role("tab", name="Compare").click()
        await adjust(page, mode="ngram", seed="1")  # the text of some seeds ends in a loop
        await page.get_by_role("button", name="Compare").click()
        await expect(page.locator("#same-text")).to_have_text("Both texts are equal.")
        await expect(page.locator("#speed-up strong")).to_have_text(re.compile(r"^[\d.]+×$"))
        await expect(page.locator("#said-with .from-ngram").first).to_be_visible()
        await expect(page.locator("#said-without .from-ngram")).to_have_count(0)
        plain = await page.locator("#said-without .tokens").text_content()
        await expect(page.locator("#said-with .tokens")).to_have_js_property("textContent", plain)
        visit.check()
