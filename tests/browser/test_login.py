"""Tests of logging in to the pages with an API key, and of logging out."""

from __future__ import annotations

import pytest
from playwright.async_api import expect

from tests.browser.browse import visiting
from tests.browser.states import ENDED, KEY, logged_in, receive_sample
from tests.gateway.harness import running

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]


async def test_a_key_opens_the_page_until_the_logout(browser) -> None:
    """After the login, the page generates text and receives samples. Scripts see no cookie. After
    the logout, every page leads to the login, which returns to it."""
    async with logged_in(browser) as (visit, gateway):
        page = visit.page
        await page.get_by_role("tab", name="Completion").click()
        await page.get_by_role("button", name="Generate").click()
        await expect(page.locator("#state-completion")).to_have_text(ENDED)
        await receive_sample(page, gateway)
        assert await page.evaluate("() => document.cookie + Object.keys(localStorage)") == ""
        (cookie,) = await page.context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
        await page.get_by_role("button", name="Log out").click()
        await expect(page).to_have_url(f"{gateway.url}/login")
        assert await page.context.cookies() == []
        await page.goto(f"{gateway.url}/requests?ending=failed")
        await page.get_by_label("API key").fill(KEY)
        await page.get_by_role("button", name="Log in").click()
        await expect(page).to_have_url(f"{gateway.url}/requests?ending=failed")


async def test_a_node_without_keys_asks_for_none(browser) -> None:
    """The page for logging in says that no key is needed, and has no form."""
    async with running() as gateway:
        context = await browser.new_context()
        page = await context.new_page()
        await page.goto(f"{gateway.url}/login")
        await expect(page.get_by_text("This node has no API keys")).to_be_visible()
        await expect(page.get_by_label("API key")).to_be_hidden()
        await context.close()


async def test_an_unknown_key_is_refused(browser) -> None:
    """The login shows the server's error if the key is unknown, and does not leave the node."""
    async with running(api_keys=(KEY,)) as gateway:
        async with visiting(browser, f"{gateway.url}/login?next=//example.org", KEY) as visit:
            assert visit.page.url == f"{gateway.url}/"
        context = await browser.new_context()
        page = await context.new_page()
        await page.goto(gateway.url)
        await page.get_by_label("API key").fill("sk-wrong")
        await page.get_by_role("button", name="Log in").click()
        await expect(page.get_by_role("alert")).to_contain_text("the API key is not known")
        assert await context.cookies() == []
        await context.close()
