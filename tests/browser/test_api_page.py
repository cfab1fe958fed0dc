"""Tests of the page that describes the API."""

from __future__ import annotations

import pytest
from playwright.async_api import expect

from draftgate.gateway.http.openapi.operations import OPERATIONS
from tests.browser.browse import visiting
from tests.gateway.harness import running

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]


async def test_the_page_describes_and_tries_every_kind_of_operation(browser) -> None:
    """The page lists all operations, finds a field, shows the schema of an object, and sends an
    example. It loads nothing from other servers, under the same policy as the other pages."""
    async with running() as gateway, visiting(browser, gateway.url) as visit:
        page = visit.page
        await page.get_by_role("navigation").get_by_role("link", name="API").click()
        operations = page.locator(".operation:visible")
        await expect(operations).to_have_count(len(OPERATIONS))
        await page.get_by_label("Find an operation or a field").fill("logit_bias")
        assert 1 < await operations.count() < len(OPERATIONS)
        one = page.locator("#post_completions")
        await one.locator("summary").first.click()
        await one.locator("summary", has_text="SpeculationOptions").first.click()
        await expect(one.locator(".schema")).to_contain_text(["max_draft_tokens"])
        await one.get_by_role("button", name="evaluation").click()
        await one.get_by_role("button", name="Send", exact=True).click()
        await expect(one.locator(".response")).to_contain_text("200 OK")
        await expect(one.locator(".response")).to_contain_text("prompt_logprobs")
        visit.check()


async def test_the_page_describes_the_fields_of_a_form(browser) -> None:
    """An upload has the fields of its form, by which it is found."""
    async with running() as gateway, visiting(browser, gateway.url) as visit:
        await visit.page.goto(f"{gateway.url}/docs")
        await visit.page.get_by_label("Find an operation or a field").fill("purpose")
        one = visit.page.locator("#post_files")
        await one.locator("summary").first.click()
        await expect(one.locator("h3").first).to_have_text("Body (multipart/form-data)")
        await expect(one.locator(".fields").first).to_contain_text(
            "A file with one request per line"
        )
        visit.check()
