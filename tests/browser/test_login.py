"""Tests of logging in to the live page with an API key."""

from __future__ import annotations

import re

import pytest
from playwright.async_api import expect

from tests.browser.browse import visiting
from tests.gateway.harness import running

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

KEYS = {"api_keys": ("sk-page",)}


async def test_key_as_password_opens_the_page(browser) -> None:
    """The browser's login with a key loads the page, generates text and receives samples."""
    login = {"username": "anybody", "password": "sk-page"}
    async with (
        running(**KEYS) as gateway,
        visiting(browser, gateway.url, http_credentials=login) as visit,
    ):
        await visit.page.get_by_role("button", name="Generate").click()
        await expect(visit.page.locator("#run-state")).to_have_text(re.compile("^Done in"))
        gateway.node.live.take()
        await expect(visit.page.locator("#live-state")).to_have_text("last two minutes")
        visit.check()


async def test_wrong_password_does_not_open_the_page(browser) -> None:
    """The browser shows the server's error if the password is not a key."""
    login = {"username": "anybody", "password": "sk-wrong"}
    async with running(**KEYS) as gateway:
        context = await browser.new_context(http_credentials=login)
        response = await (await context.new_page()).goto(gateway.url)
        await context.close()
    assert response.status == 401
