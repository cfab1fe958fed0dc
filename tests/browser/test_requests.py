"""Tests of the list of requests, of the page of a request, and of the views for operators."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from tests.browser.browse import visiting
from tests.browser.conftest import Scene
from tests.browser.states import generate, moving, upstream_page
from tests.gateway.harness import ScriptedBackend, client, running
from tests.gateway.test_accounts import KEYS, bearer
from tests.gateway.upstreams import DONE, LAST, TOKEN, USAGE

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]


async def test_a_decision_leads_to_the_page_of_its_request(scene: Scene) -> None:
    """The page of a request shows its facts, phases, steps and the decision with its reason."""
    await generate(scene)
    (decision,) = scene.gateway.node.decisions.latest(1)
    page = scene.page
    await page.locator("#decisions a").click()
    await expect(page).to_have_url(f"{scene.gateway.url}/requests/{decision.request_id}")
    for words in ("finished", "/v1/completions", "scripted", "14 of 18 (78%)", " ms"):
        await expect(page.locator("#facts")).to_contain_text(words)
    await expect(page.locator("#phases li").first).to_contain_text("Queue of the gateway")
    await expect(page.locator("#decided li")).to_contain_text(decision.plan.reason)
    await expect(page.locator("#steps-summary")).to_contain_text("14 of 18 drafts accepted")
    await page.goto(f"{scene.gateway.url}/requests/none")
    await expect(page.get_by_role("alert")).to_contain_text("has the id 'none'")
    scene.visit.problems.clear()  # browsers log every 404


async def test_requests_are_searched_and_filtered(scene: Scene) -> None:
    """The list finds requests by a text and by their ending, and its address keeps both."""
    await generate(scene)
    async with client(scene.gateway) as http:
        await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 9999})
    page = scene.page
    await page.get_by_role("link", name="Requests").click()
    rows = page.locator("#requests tr")
    await expect(rows).to_have_count(2)
    await page.get_by_label("Ending").select_option("rejected")
    await expect(rows).to_have_count(1)
    await expect(rows).to_contain_text("rejected (400")
    await page.get_by_label("Search").fill("no such request")
    await expect(page.locator("#number")).to_have_text("No request matches.")
    await expect(page).to_have_url(re.compile(r"\?q=no\+such\+request&ending=rejected$"))
    (decision,) = scene.gateway.node.decisions.latest(1)
    await page.goto(f"{scene.gateway.url}/requests?q={decision.request_id[:12]}")
    await expect(rows).to_have_count(1)
    await expect(page.get_by_label("Search")).to_have_value(decision.request_id[:12])


async def test_moves_are_on_the_page_of_their_request(browser: Browser) -> None:
    """A move in the list of the live page leads to its request, whose page shows the move."""
    async with moving(browser) as (page, source, sink):
        await page.locator("#moves a").click()
        await expect(page.locator("#moves tr")).to_contain_text(source.worker_id)
        await expect(page.locator("#moves tr")).to_contain_text(sink.worker_id)
        await expect(page.locator("#facts")).to_contain_text("running")
        await page.goto(page.url.partition("/requests")[0])
        await page.wait_for_selector("#node[data-state=ready]")


async def test_requests_for_upstreams_have_a_page(browser: Browser) -> None:
    """The page shows the phases that a node sees of an upstream, and why it got the request."""
    async with upstream_page(browser, TOKEN, TOKEN, LAST, USAGE, DONE) as (page, _):
        await page.get_by_role("button", name="Generate").click()
        await page.locator("#decisions a").click()
        await expect(page.locator("#facts")).to_contain_text("finished")
        names = page.locator("#phases li > :first-child")
        await expect(names).to_have_text(["Queue of the gateway", "First token", "Stream"])
        await expect(page.locator("#decided li")).to_contain_text("the upstream decides")


async def test_operators_see_models_queue_usage_and_quotas(
    browser: Browser, tmp_path: Path
) -> None:
    """Operators see all tenants. Other keys see only models and workers."""
    keys, backend = tmp_path / "keys.yaml", ScriptedBackend()
    backend.max_sequences = 1
    keys.write_text(KEYS)
    body = {"prompt": "x", "max_tokens": 5, "priority": 3}
    async with (
        running(backends=[backend], api_keys_file=str(keys)) as gateway,
        client(gateway) as http,
        asyncio.TaskGroup() as sending,
    ):
        for key in ("sk-search", "sk-search", "sk-boss"):  # one fits at a time
            headers = bearer(key)
            sending.create_task(http.post("/v1/completions", json=body, headers=headers))
        requests = [await backend.submitted.get()]
        backend.emit(requests[0], "x", last=True)
        requests.append(await backend.submitted.get())
        async with visiting(browser, gateway.url, "sk-boss") as visit:
            page = visit.page
            await page.get_by_role("link", name="Operations").click()
            for row, words in (
                ("models", "scripted ready 1 of 1"),
                ("servers", "scripted ok any"),
                ("queue", "scripted 3 (boss|search) 1"),
                ("usage", "(boss|search) [0-9]+"),
                ("quotas", "batch scripted requests 2 2"),
            ):
                cells = page.locator(f"#{row} tbody tr").first.locator("td")
                pattern = re.compile(words.replace(" ", r"\s+"))
                await expect(page.locator(f"#{row} tbody tr").first).to_be_visible()
                assert pattern.search(" ".join(await cells.all_text_contents()))
            visit.check()
        async with visiting(browser, gateway.url, "sk-search") as visit:
            await visit.page.get_by_role("link", name="Operations").click()
            await expect(visit.page.locator("#servers tbody tr")).to_contain_text("ok")
            await expect(visit.page.locator("#role-note")).to_contain_text("role operator")
            await expect(visit.page.locator("#usage")).to_be_hidden()
            visit.check()
        backend.emit(requests[1], "x", last=True)
        backend.emit(await backend.submitted.get(), "x", last=True)
