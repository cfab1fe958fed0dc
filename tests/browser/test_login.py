"""Tests of logging in to the live page with an API key."""

from __future__ import annotations

import pytest
from playwright.async_api import expect

from tests.browser.states import ENDED, KEY, logged_in, receive_sample
from tests.gateway.harness import running

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]


async def test_key_as_password_opens_the_page(browser) -> None:
    """The browser's login with a key loads the page, generates text and receives samples."""
    async with logged_in(browser) as (visit, gateway):
        await visit.page.get_by_role("tab", name="Completion").click()
        await visit.page.get_by_role("button", name="Generate").click()
        await expect(visit.page.locator("#state-completion")).to_have_text(ENDED)
        await receive_sample(visit.page, gateway)


async def test_wrong_password_does_not_open_the_page(browser) -> None:
    """The browser shows the server's error if the password is not a key."""
    login = {"username": "anybody", "password": "sk-wrong"}
    async with running(api_keys=(KEY,)) as gateway:
        context = await browser.new_context(http_credentials=login)
        response = await (await context.new_page()).goto(gateway.url)
        await context.close()
    assert response.status == 401
