"""Tests of the headline that says how much time drafts saved."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.async_api import Browser, Page, expect

from tests.browser.conftest import Scene
from tests.browser.states import generate, plain_upstream

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

WORDS = """
async (drafts) => (await import("/web/saved.js")).headline(drafts)
"""


@pytest.mark.parametrize(
    ("tenant", "drafted_tokens", "saved_share", "words"),
    [
        (None, 90, 0.376, "Drafts saved 38% of decoding time in the last 5 minutes"),
        ("a", 90, 0.376, "Drafts saved 38% of your decoding time in the last 5 minutes"),
        (None, 90, -0.0412, "Drafts cost 4% extra decoding time in the last 5 minutes"),
        ("a", 0, -0.0412, "Drafts cost you 4% extra decoding time in the last 5 minutes"),
        (None, 90, 0.004, "Drafts changed decoding time by less than 1% in the last 5 minutes"),
        ("a", 9, -0.004, "Drafts changed your decoding time by less than 1% in the last 5 minutes"),
        (None, 0, 0.0, "No drafts in the last 5 minutes"),
        ("a", 0, 0.0, "No drafts for your requests in the last 5 minutes"),
    ],
)
async def test_the_headline_says_what_drafts_brought(
    script_page: Page, tenant: str | None, drafted_tokens: int, saved_share: float, words: str
) -> None:
    """The headline says whether drafts saved or cost time, whose time, and in which period."""
    drafts: dict[str, Any] = {"period_s": 300.0, "tenant": tenant}
    drafts |= {"drafted_tokens": drafted_tokens, "saved_share": saved_share}
    assert await script_page.evaluate(WORDS, drafts) == words


async def test_the_headline_appears_with_the_first_request(scene: Scene) -> None:
    """The page has no headline without requests, and shows that of the last sample with its
    seconds."""
    headline = scene.page.locator("#saved")
    await generate(scene)  # the scripted worker reports no times
    await expect(headline).to_be_hidden()
    scene.gateway.node.metrics.recent.draft_times.add("", 2.45, 4.0, 60)
    scene.gateway.node.take_sample()
    words = "Drafts saved 38% of decoding time in the last 5 minutes"
    await expect(headline).to_have_text(
        f"{words} Summed over requests: 2.45 s saved, 4 s spent on decoding"
    )


async def test_nodes_that_cannot_know_the_time_show_no_headline(browser: Browser) -> None:
    """An upstream does not report how much time its drafts saved, so there is no headline."""
    async with plain_upstream(browser) as page:
        await expect(page.locator("#saved")).to_be_hidden()
