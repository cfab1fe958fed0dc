"""Tests of the lanes of workers on the page: requests, moves between lanes, and their reasons."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from tests.browser.conftest import Scene
from tests.browser.states import moving

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]


def lane(page: Page, worker_id: str):
    """Return the lane of a worker."""
    return page.locator("#lanes li").filter(has_text=worker_id)


async def test_request_moves_to_the_lane_of_its_new_worker(browser: Browser) -> None:
    """The dot of a request is in the lane of its worker. After a move, it is in the lane of the
    other worker, the card explains the move, and the table lists it."""
    async with moving(browser) as (page, source, sink):
        dot = lane(page, sink.worker_id).get_by_role("img", name="Request")
        await expect(dot).to_have_class(re.compile("moved"))
        await expect(lane(page, source.worker_id)).to_contain_text("leaving")
        await dot.hover()
        card = page.get_by_role("tooltip")
        await expect(card).to_contain_text(f"on {sink.worker_id}")
        await expect(card).to_contain_text(f"To {sink.worker_id}: moved")
        await expect(card).to_contain_text("its worker is leaving")
        cells = page.get_by_role("table", name="Latest moves").get_by_role("cell")
        await expect(cells.nth(2)).to_have_text(source.worker_id)
        await expect(cells.nth(3)).to_have_text(sink.worker_id)
        await expect(cells.nth(5)).to_have_text(
            re.compile(r"^moved, \d+ blocks, .* MB, gap .* ms$")
        )
        await expect(page.locator("#decisions")).to_contain_text(f"To {sink.worker_id}: moved")


async def test_lanes_can_be_used_with_the_keyboard(scene: Scene) -> None:
    """The lanes are one tab stop. Arrow keys move between requests, and Escape hides the card."""
    scene.backend.max_sequences = 8
    for _ in range(3):
        await scene.page.evaluate(
            """() => void fetch("/v1/completions", {
                 method: "POST",
                 headers: { "content-type": "application/json" },
                 body: JSON.stringify({ prompt: "x", max_tokens: 5 }),
               })"""
        )
        await scene.backend.submitted.get()
    dots = scene.page.locator("#lanes .own .dot")
    await expect(dots).to_have_count(3)
    await expect(scene.page.locator("#lanes [tabindex='0']")).to_have_count(1)
    await dots.first.focus()
    card = scene.page.get_by_role("tooltip")
    names = []
    for key in ("Home", "ArrowRight", "ArrowRight", "ArrowRight"):
        await scene.page.keyboard.press(key)
        names.append(await scene.page.locator(":focus").get_attribute("aria-label"))
        await expect(card).to_contain_text(names[-1].split(",")[0])
    assert len(set(names)) == 3
    assert names[2] == names[3]  # the last request of the lane
    await scene.page.keyboard.press("Escape")
    await expect(card).to_be_hidden()
    await scene.page.keyboard.press("Tab")
    await expect(scene.page.locator(":focus")).to_have_count(1)
    await expect(scene.page.locator("#lanes :focus")).to_have_count(0)


DRAW = """
async ([workers, streams]) => {
  const { draw } = await import("/web/lanes.js");
  const view = workers.map(([worker_id, running]) => (
    { worker_id, status: "ok", running, waiting: 0, kv_usage: 0.25 }));
  const found = streams.map(([request_id, worker_id]) => (
    { request_id, prompt: 0, tenant: "", worker_id, tokens: 9, sequences: 1, moving: false }));
  draw({ at_s: 1, workers: view, streams: found, moves: [] });
  const count = (lane, kind) => lane.querySelectorAll(`${kind} .dot`).length;
  return [...document.querySelectorAll("#lanes li")].map((lane) => (
    [count(lane, ".own"), count(lane, ".others"), lane.querySelector(".more").textContent]));
}
"""
"""Draws workers with their running sequences, and streams with their workers, without moves."""


@pytest_asyncio.fixture(loop_scope="module")
async def paused_page(script_page: Page) -> AsyncIterator[Page]:
    """A page that draws only what the test passes."""
    pause = script_page.get_by_role("button", name="Pause")
    await pause.click()
    yield script_page
    await pause.click()


async def test_lanes_show_other_sequences_and_their_number(paused_page: Page) -> None:
    """A lane shows the requests of this node, other sequences as empty dots, and at most 64 dots.
    Lanes have the order of the ids, and those of workers that have left disappear."""
    own = [[f"r{number}", "a"] for number in range(60)]
    found = await paused_page.evaluate(DRAW, [[["b", 2], ["a", 80]], [*own, ["s", "b"]]])
    assert found == [[60, 4, "+16"], [1, 1, ""]]
    found = await paused_page.evaluate(
        DRAW, [[["b", 61]], [["s", "b"], *([r, "b"] for r, _ in own)]]
    )
    assert found == [[61, 0, ""]]


@pytest.mark.parametrize("width", [360, 768, 1440])
async def test_sixteen_lanes_fit_on_every_screen(paused_page: Page, width: int) -> None:
    """Sixteen full lanes neither scroll sideways nor cut off a name."""
    await paused_page.set_viewport_size({"width": width, "height": 900})
    ids = [f"gpu-node-{number:02}.example.internal:8000-0" for number in range(16)]
    await paused_page.evaluate(DRAW, [[[one, 90] for one in ids], []])
    assert await paused_page.evaluate("() => document.documentElement.scrollWidth") <= width
    cut_off = "(all) => all.filter((one) => one.scrollWidth > one.clientWidth + 1).length"
    assert await paused_page.locator("#lanes li, #lanes .track").evaluate_all(cut_off) == 0
    await expect(paused_page.locator("#lanes li")).to_have_count(16)
