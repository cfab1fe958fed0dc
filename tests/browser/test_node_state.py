"""Tests of the state of the node on the page: what its model supports, and outages."""

from __future__ import annotations

import re
import shutil
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from playwright.async_api import expect

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.tokenizer import Tokenizer
from tests.browser.browse import visiting
from tests.browser.conftest import Scene
from tests.browser.states import adjust, generate, reply, send
from tests.gateway.harness import ScriptedBackend, port_of, running
from tests.gateway.upstreams import forwarding, upstream

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]


async def test_stopped_server_is_shown_until_its_restart(browser) -> None:
    """The page says that a stopped server does not respond, and recovers when it is back."""
    async with AsyncExitStack() as stack:
        first = AsyncExitStack()
        gateway = await first.enter_async_context(running())
        visit = await stack.enter_async_context(visiting(browser, gateway.url))
        node, state = visit.page.locator("#node"), visit.page.locator("#live-state")
        gateway.node.live.take()
        await expect(state).to_have_text("last two minutes")
        await first.aclose()
        await expect(node).to_have_text("The server does not respond.")
        await expect(node).to_have_attribute("data-state", "failed")
        await expect(state).to_have_text("disconnected")
        await visit.page.get_by_role("tab", name="Completion").click()
        await visit.page.get_by_role("button", name="Generate").click()
        alert = visit.page.get_by_role("alert")
        await expect(alert).to_have_text("The server does not respond.")
        again = await stack.enter_async_context(running(port=port_of(gateway)))
        await expect(node).to_have_attribute("data-state", "ready")
        await expect(node).to_have_text("draftgate-demo")
        again.node.live.take()
        await expect(state).to_have_text("last two minutes")


async def test_failed_node_is_shown_with_its_reason(scene: Scene) -> None:
    """The page shows the reason of a node whose worker has failed."""
    scene.backend.crash("the device is gone")
    await scene.page.reload()
    node = scene.page.locator("#node")
    await expect(node).to_have_text("The node has failed: the device is gone")
    await expect(node).to_have_attribute("data-state", "failed")
    scene.visit.problems.clear()  # browsers log every 503


async def test_unreachable_upstream_is_shown(browser) -> None:
    """Both pages of operators show that the only upstream of a node does not respond."""
    async with AsyncExitStack() as stack:
        first = AsyncExitStack()
        engine = await first.enter_async_context(upstream())
        gateway = await stack.enter_async_context(forwarding(engine))
        visit = await stack.enter_async_context(visiting(browser, gateway.url))
        await first.aclose()
        for _ in range(3):  # single failures may be chance
            await gateway.node.fleet.workers[0].backend.probe()
        await visit.page.reload()
        node = visit.page.locator("#node")
        await expect(node).to_have_text(re.compile(r"^No worker serves: \S+: connection refused$"))
        await expect(node).to_have_attribute("data-state", "failed")
        await visit.page.goto(f"{gateway.url}/operations")
        await expect(visit.page.locator("#servers")).to_contain_text("connection refused")


async def test_only_the_proposers_of_the_node_are_offered(scene: Scene) -> None:
    """The form offers the proposers of the workers, and the legend shows their colours."""
    modes = scene.page.locator("#mode option")
    await expect(modes).to_have_text(["auto", "off", "n-gram"])
    legend = scene.page.get_by_role("list", name="Origin").get_by_role("listitem")
    await expect(legend).to_have_text(["target", "n-gram", "grammar"])


async def test_kinds_that_the_model_cannot_do_are_hidden(browser, tmp_path: Path) -> None:
    """A model without a chat template offers no chat, and one without proposers no comparison."""
    shutil.copy(SHIPPED_MODEL / "tokenizer.json", tmp_path)
    backend = ScriptedBackend()
    backend.tokenizer = Tokenizer(tmp_path)
    backend.proposers = ()
    async with running(backends=[backend]) as gateway, visiting(browser, gateway.url) as visit:
        tabs = visit.page.get_by_role("tab")
        await expect(tabs).to_have_text(["Completion"])
        await expect(visit.page.locator("#mode option")).to_have_count(2)
        await visit.page.get_by_role("tab", name="Completion").press("ArrowRight")
        await expect(tabs).to_have_attribute("aria-selected", "true")
        visit.check()


async def test_page_opens_with_the_chat_of_a_model_that_can_chat(browser) -> None:
    """The first tab is the chat if the model has a chat template, until the user chooses one."""
    backend = ScriptedBackend()
    async with running(backends=[backend]) as gateway, visiting(browser, gateway.url) as visit:
        tabs = visit.page.get_by_role("tab")
        await expect(tabs).to_have_text(["Chat", "Completion", "Compare"])
        await expect(tabs.first).to_have_attribute("aria-selected", "true")
        await expect(visit.page.get_by_label("Message", exact=True)).to_be_visible()
        await expect(visit.page.get_by_text("Simulator", exact=True)).to_be_hidden()
        visit.check()


async def test_each_tab_offers_the_models_that_can_do_it(browser, tmp_path: Path) -> None:
    """The menu of the chat has only models with a chat template, and the others have all models. A
    tab that offers the chosen model has it chosen again after a tab that does not."""
    shutil.copy(SHIPPED_MODEL / "tokenizer.json", tmp_path)
    plain = ScriptedBackend()
    plain.tokenizer = Tokenizer(tmp_path)
    both = {"plain": plain, "other": ScriptedBackend()}
    async with (
        running(backends=[ScriptedBackend()], further=both) as gateway,
        visiting(browser, gateway.url) as visit,
    ):
        options = visit.page.get_by_label("Model").locator("option")
        first = gateway.node.models[0].name
        await expect(options).to_have_text([first, "other"])
        await visit.page.get_by_role("tab", name="Completion").click()
        await expect(options).to_have_text([first, "plain", "other"])
        menu = visit.page.get_by_label("Model")
        await menu.select_option("plain")
        await visit.page.get_by_role("tab", name="Chat").click()
        await expect(menu).to_have_value(first)
        await visit.page.get_by_role("tab", name="Completion").click()
        await expect(menu).to_have_value("plain")
        visit.check()


async def test_answer_is_continued_by_the_model_that_began_it(browser) -> None:
    """The button of a cut answer asks the model that wrote it, whichever the menu shows."""
    backend, other = ScriptedBackend(), ScriptedBackend()
    async with (
        running(backends=[backend], further={"other": other}) as gateway,
        visiting(browser, gateway.url) as visit,
    ):
        scene = Scene(visit, gateway, backend)
        await send(visit.page, "tell me")
        await scene.answer_cut("Once upon a")
        await expect(visit.page.get_by_role("button", name="Continue")).to_be_visible()
        await visit.page.get_by_label("Model").select_option("other")
        await visit.page.get_by_role("button", name="Continue").click()
        assert (await reply(scene, " time.")).endswith("Once upon a")
        assert other.submitted.empty()
        visit.check()


async def test_simulator_is_labelled(browser) -> None:
    """The page says that a simulator stands in for the model."""
    async with running() as gateway, visiting(browser, gateway.url) as visit:
        await expect(visit.page.get_by_text("Simulator", exact=True)).to_be_visible()
        await expect(visit.page.get_by_text("its words are random")).to_be_visible()
        visit.check()


async def test_each_tab_has_its_own_state(scene: Scene) -> None:
    """The state, the statistics and the error of a tab do not appear on the other tabs."""
    await generate(scene)
    page = scene.page
    await expect(page.get_by_text(re.compile("^Done in"))).to_be_visible()
    for name in ("Chat", "Compare"):
        await page.get_by_role("tab", name=name).click()
        await expect(page.get_by_text(re.compile("^Done in"))).to_be_hidden()
        await expect(page.get_by_text("Statistics of the last run")).to_be_hidden()
    await adjust(page, max_tokens="9999")
    await page.get_by_role("button", name="Compare").click()
    await expect(page.get_by_role("alert")).to_be_visible()
    await page.get_by_role("tab", name="Completion").click()
    await expect(page.get_by_role("alert")).to_be_hidden()
    await expect(page.get_by_text(re.compile("^Done in"))).to_be_visible()
    scene.visit.problems.clear()  # browsers log every 400
