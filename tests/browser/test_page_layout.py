"""Tests of the page's layout on wide and narrow screens, and of gaps in its charts."""

from __future__ import annotations

import re

import pytest
from playwright.async_api import Browser, Page, expect

from tests.browser.browse import visiting
from tests.browser.conftest import Scene
from tests.browser.draft_steps import in_steps
from tests.browser.states import DOCUMENT, chat, generate, say, send
from tests.gateway.harness import running

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

SIZES = [(1400, 900), (1280, 900), (1020, 800), (768, 1024), (390, 844)]

POINT = """
async ([times, places]) => {
  const { Chart } = await import("/web/charts.js");
  const lines = [{ name: "", of: (sample) => sample.value }];
  const chart = new Chart({ title: "t", hint: "", lines, show: String });
  document.body.append(chart.element);
  chart.update(times.map(([at_s, value]) => ({ at_s, value })));
  const plot = chart.element.querySelector(".plot");
  const { left, width } = plot.getBoundingClientRect();
  const found = places.map((place) => {
    const move = new PointerEvent("pointermove", { clientX: left + width * place });
    plot.dispatchEvent(place === null ? new PointerEvent("pointerleave") : move);
    return chart.element.querySelector(".value").textContent;
  });
  chart.element.remove();
  return found;
}
"""

DRAW = """
async (times) => {
  const { Chart } = await import("/web/charts.js");
  const lines = [{ name: "", of: (sample) => sample.value }];
  const chart = new Chart({ title: "t", hint: "", lines, show: String });
  chart.update(times.map(([at_s, value]) => ({ at_s, value })));
  const drawn = (name) => chart.element.querySelector(name).getAttribute("d");
  return [drawn(".line"), drawn(".area")];
}
"""


@pytest.mark.parametrize(("width", "height"), SIZES)
async def test_every_cell_of_a_decision_is_visible(scene: Scene, width: int, height: int) -> None:
    """The list of decisions does not scroll sideways, and no cell is cut off."""
    await scene.page.set_viewport_size({"width": width, "height": height})
    await generate(scene)
    box = scene.page.locator("#decided .scroll")
    inner, outer = await box.evaluate("(box) => [box.scrollWidth, box.clientWidth]")
    assert inner <= outer
    cells = scene.page.locator("#decisions td")
    await expect(cells).to_have_count(9)
    cut_off = "(all) => all.filter((one) => one.scrollWidth > one.clientWidth).length"
    assert await cells.evaluate_all(cut_off) == 0


@pytest.mark.parametrize("path", ["/", "/operations"])
async def test_a_long_name_of_a_model_fits_a_phone(browser: Browser, path: str) -> None:
    """No page scrolls sideways because of the name of a model without spaces."""
    names = ("organisation/" + "Model_With_A_Long_Name_" * 6, "other_model_" * 12)
    async with running(served_model_name=names) as gateway, visiting(browser, gateway.url) as visit:
        await visit.page.set_viewport_size({"width": 390, "height": 844})
        await visit.page.goto(gateway.url + path)
        place = "#node" if path == "/" else "#models tbody"
        await expect(visit.page.locator(place)).to_contain_text(names[0])
        wide = "() => [document.documentElement.scrollWidth, innerWidth]"
        inner, outer = await visit.page.evaluate(wide)
        assert inner <= outer
        visit.check()


async def test_decisions_are_cards_on_a_phone(scene: Scene) -> None:
    """On a phone, a decision is a card whose cells have the names of their columns."""
    await scene.page.set_viewport_size({"width": 390, "height": 844})
    await generate(scene)
    names = await scene.page.locator("#decisions td").evaluate_all(
        "(all) => all.map((one) => getComputedStyle(one, '::before').content)"
    )
    assert [re.match(r'"(.*?)"', name)[1] for name in names] == [
        "Time", "Request", "Policy", "Proposer", "Max drafts", "Slot price", "Reason", "Outcome",
        "Load",
    ]  # fmt: skip
    tops = await scene.page.locator("#decisions td").evaluate_all(
        "(all) => all.map((one) => one.getBoundingClientRect().top)"
    )
    assert len(set(tops)) == 5  # two lines with three cells, and three lines with one
    # The roles keep the table a table for screen readers.
    table = scene.page.get_by_role("table", name="Recent decisions")
    await expect(table.get_by_role("columnheader")).to_have_count(9)
    await expect(table.get_by_role("row").last.get_by_role("cell")).to_have_count(9)


async def test_tables_of_a_chat_keep_words_whole_on_a_phone(browser: Browser) -> None:
    """On a phone, the words of a table stay whole and its box scrolls, but not the page. The edges
    of a box that scrolls have shades, which its content covers at the end."""
    async with chat(browser) as page:
        await page.set_viewport_size({"width": 390, "height": 844})
        words = page.locator(".markdown td", has_text="1,000,000")
        lines = "(cell) => (cell.clientHeight - 6) / parseFloat(getComputedStyle(cell).lineHeight)"
        assert round(await words.evaluate(lines)) == 1
        box = page.locator(".markdown .wide")
        assert await box.evaluate("(box) => box.scrollWidth >= box.clientWidth")
        shades = "(box) => getComputedStyle(box).backgroundAttachment"
        assert await box.evaluate(shades) == "local, local, scroll, scroll, scroll"
        assert await page.evaluate("() => document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("fails", [False, True])
async def test_figures_of_a_new_answer_are_on_a_phones_screen(
    chat_scene: Scene, fails: bool
) -> None:
    """The box scrolls to the figures below a new answer, also if an error makes the box smaller."""
    page = chat_scene.page
    await page.set_viewport_size({"width": 390, "height": 844})
    await send(page, "What is binary search?")
    request = await chat_scene.backend.submitted.get()
    steps = in_steps(chat_scene.backend.tokenizer, DOCUMENT * 2)
    chat_scene.deliver(request, *(steps[:-1] if fails else steps))
    if fails:
        await expect(page.locator(".answer table")).to_have_count(2)
        chat_scene.backend.crash("the device is gone")
        await expect(page.get_by_role("alert")).to_be_visible()
    facts = page.locator(".facts")
    await expect(facts).to_contain_text("TTFT")
    turns, box = await page.locator("#turns").bounding_box(), await facts.bounding_box()
    assert box["y"] + box["height"] <= turns["y"] + turns["height"] + 1  # rounded by the browser


async def test_composer_is_on_the_screen_at_every_size(chat_scene: Scene) -> None:
    """A long conversation scrolls in its own box, so that the message stays on the screen."""
    page = chat_scene.page
    await say(chat_scene, "What is binary search?", DOCUMENT * 2)
    for width, height in SIZES:
        await page.set_viewport_size({"width": width, "height": height})
        box = await page.locator("#form-chat").bounding_box()
        turns = await page.locator("#turns").bounding_box()
        assert turns["y"] + turns["height"] <= box["y"]
        assert turns["height"] > 200
        assert box["y"] + box["height"] <= height
        assert await page.evaluate("() => document.documentElement.scrollWidth") <= width


async def test_history_button_belongs_to_the_chat(chat_scene: Scene) -> None:
    """On a phone, the chat has a button for the history, which folds away after a choice."""
    page = chat_scene.page
    await say(chat_scene, "hello")
    await page.set_viewport_size({"width": 390, "height": 844})
    history = page.get_by_role("button", name="History")
    await expect(page.get_by_label("Search conversations")).to_be_hidden()
    await history.click()
    await expect(history).to_have_attribute("aria-expanded", "true")
    await page.locator("#conversations .open").click()
    await expect(page.get_by_label("Search conversations")).to_be_hidden()
    await expect(page.locator(".turn")).to_have_text("hello")
    await page.get_by_role("tab", name="Completion").click()
    await expect(history).to_be_hidden()


async def test_useful_charts_are_first(scene: Scene) -> None:
    """The first charts show what clients feel: throughput and latencies."""
    titles = await scene.page.locator("#charts .name").all_text_contents()
    assert titles[:3] == ["Tokens/s", "TTFT", "TPOT"]
    assert len(titles) == 9


async def test_chart_shows_the_values_under_the_pointer(script_page: Page) -> None:
    """Pointing at a chart shows the values of that time, and of the latest sample otherwise."""
    samples = [(second, second * 10) for second in range(121)]
    found = await script_page.evaluate(POINT, [samples, [1, 0.75, 0, None]])
    assert found == ["0 s ago1200", "30 s ago900", "120 s ago0", "1200"]
    gap = [(0, 1), (1, 2), (119, 3), (120, 4)]
    assert await script_page.evaluate(POINT, [gap, [0.5]]) == ["no sample–"]
    assert await script_page.evaluate(POINT, [[], [0.5, None]]) == ["no sample–", "–"]


@pytest.mark.parametrize(
    ("samples", "parts"),
    [
        ([(0, 1), (1, 2), (2, 3)], 1),
        ([(0, 1), (1, 2), (9, 3), (10, 4)], 2),  # the node did not respond
        ([(0, 1), (1, None), (2, None), (3, None), (4, 4), (5, 4)], 2),  # no requests
        ([(0, 1), (2, 1), (4, 1)], 1),  # late samples
        ([(0, 1), (30, 1), (60, 1)], 3),
    ],
)
async def test_charts_do_not_bridge_gaps(
    script_page: Page, samples: list[tuple[int, int | None]], parts: int
) -> None:
    """A line and its area end at missing samples, and begin again with the next sample."""
    line, area = await script_page.evaluate(DRAW, samples)
    assert line.count("M") == parts
    assert area.count("M") == area.count("Z") == sum(one.count("L") > 0 for one in line.split("M"))
