"""Tests of the comparison of one prompt with and without speculation.

The clock of the page stands still and advances only as a test says, so that speeds are exact.
"""

from __future__ import annotations

import re

import pytest
import pytest_asyncio
from playwright.async_api import Locator, Page, expect

from draftgate.backends.types import GenerationRequest, StepTrace
from tests.browser.conftest import Scene
from tests.browser.draft_steps import in_steps
from tests.browser.states import FAILURES, adjust, failing

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

TEXT = "return self.width * self.height"
ONE_TOKEN = (StepTrace(1),)
TWO_TOKENS = (StepTrace(1), StepTrace(2, "ngram", 1, (), 1, (0.9,), 0.25))
LOOP_START = "async (tokens) => (await import('/web/loops.js')).loopStart(tokens)"
WITH, WITHOUT = "#said-with .tokens", "#said-without .tokens"


@pytest_asyncio.fixture(loop_scope="module")
async def still_scene(scene: Scene) -> Scene:
    """A page whose clock the test advances, with the comparison chosen."""
    await scene.page.clock.install(time=0)
    await scene.page.clock.pause_at(1000)
    await scene.page.get_by_role("tab", name="Compare").click()
    return scene


async def start(scene: Scene) -> GenerationRequest:
    """Start the comparison, and return the request with speculation."""
    await scene.page.get_by_role("button", name="Compare").click()
    return await scene.backend.submitted.get()


async def stream(
    scene: Scene, request: GenerationRequest, steps: tuple[StepTrace, ...], text: str = TEXT
) -> None:
    """Deliver a text in steps of 100 ms, and check that the page shows each step."""
    side = WITH if request.speculation.mode != "off" else WITHOUT
    shown = ""
    for delta in in_steps(scene.backend.tokenizer, text, steps):
        if shown:
            await scene.page.clock.run_for(100)
        shown += delta.text
        scene.deliver(request, delta)
        await expect(scene.page.locator(side)).to_have_js_property("textContent", shown)


async def visible_text(tokens: Locator) -> str:
    """Return the text of the tokens that are not hidden."""
    return await tokens.evaluate(
        "(all) => [...all.children].filter((one) => !one.hidden)"
        ".map((one) => one.textContent).join('')"
    )


async def test_speed_up_is_the_ratio_of_both_rates(still_scene: Scene) -> None:
    """Both requests have the same prompt and seed, and the speed-up compares their rates."""
    scene, page = still_scene, still_scene.page
    await page.get_by_label("Prompt to compare").fill("def area(self):\n")
    drafted = await start(scene)
    await stream(scene, drafted, TWO_TOKENS)
    plain = await scene.backend.submitted.get()
    await stream(scene, plain, ONE_TOKEN)
    await page.clock.run_for(5000)
    assert (drafted.speculation.mode, plain.speculation.mode) == ("auto", "off")
    assert drafted.prompt_ids == plain.prompt_ids
    assert drafted.sampling.seed == plain.sampling.seed
    tokens = len(scene.backend.tokenizer.encode(TEXT))
    steps = len(in_steps(scene.backend.tokenizer, TEXT, TWO_TOKENS))
    # Both streams have one token at first. The steps of both streams are 100 ms apart.
    expected = (tokens - 1) / (steps - 1)
    speed_up = page.locator("#speed-up strong")
    await expect(speed_up).not_to_have_text("…")  # the last event may still be on its way
    shown = await speed_up.text_content()
    assert float(shown.removesuffix("×")) == pytest.approx(expected, abs=0.005)
    assert expected > 1.3
    await expect(page.locator("#same-text")).to_have_text("Both texts are equal.")
    rate = page.locator("#stats-without [data-stat=rate]")
    await expect(rate).to_have_text("10")
    await expect(page.locator("#decisions tr.mine")).to_have_count(2)


async def test_first_run_appears_again_at_its_measured_times(still_scene: Scene) -> None:
    """During the second run, the first one appears again step by step at its measured times."""
    scene, page = still_scene, still_scene.page
    drafted = await start(scene)
    deltas = in_steps(scene.backend.tokenizer, TEXT, TWO_TOKENS)
    await stream(scene, drafted, TWO_TOKENS)
    plain = await scene.backend.submitted.get()
    await expect(page.locator("#state-compare")).to_contain_text("Without speculation")
    tokens = page.locator(WITH)
    for count in range(1, len(deltas) + 1):
        expected = "".join(delta.text for delta in deltas[:count])
        assert await visible_text(tokens) == expected
        await page.clock.run_for(100)
    await stream(scene, plain, ONE_TOKEN)
    await expect(page.locator("#state-compare")).to_have_text("Done.")


async def test_stopped_comparison_shows_the_whole_first_run(still_scene: Scene) -> None:
    """The stop button cancels the second request and shows the first run as a whole."""
    scene, page = still_scene, still_scene.page
    await stream(scene, await start(scene), TWO_TOKENS)
    plain = await scene.backend.submitted.get()
    assert await visible_text(page.locator(WITH)) != TEXT
    await page.get_by_role("button", name="Stop").click()
    assert await scene.backend.abandoned.get() == plain.request_id
    await expect(page.locator("#state-compare")).to_have_text("Stopped.")
    assert await visible_text(page.locator(WITH)) == TEXT
    assert not re.search(r"\d", await page.locator("#speed-up").text_content())


@pytest.mark.parametrize("status", FAILURES.values(), ids=FAILURES)
async def test_failed_comparison_keeps_its_text_and_can_be_repeated(
    still_scene: Scene, status: int
) -> None:
    """If the second run fails, the page shows the reason and the whole first run, says which run
    did not end, and the button compares again."""
    scene, page = still_scene, still_scene.page
    drafted = await start(scene)
    async with failing(scene, "/v1/completions", status):
        await stream(scene, drafted, TWO_TOKENS)
    assert await visible_text(page.locator(WITH)) == TEXT
    words = "no speed-up: the run without speculation did not end"
    await expect(page.locator("#speed-up")).to_contain_text(words)
    await stream(scene, await start(scene), TWO_TOKENS)
    await stream(scene, await scene.backend.submitted.get(), ONE_TOKEN)
    await page.clock.run_for(5000)
    await expect(page.locator("#state-compare")).to_have_text("Done.")
    await expect(page.get_by_role("alert")).to_be_hidden()


@pytest.mark.parametrize(
    ("steps", "text", "note"),
    [
        (TWO_TOKENS, "return 0 * self.width", "The texts differ."),
        (ONE_TOKEN, TEXT, "Neither run had drafts."),
    ],
)
async def test_note_says_whether_the_runs_are_comparable(
    still_scene: Scene, steps: tuple[StepTrace, ...], text: str, note: str
) -> None:
    """The page says that the texts differ, or that no run had drafts."""
    scene = still_scene
    await stream(scene, await start(scene), steps)
    await stream(scene, await scene.backend.submitted.get(), ONE_TOKEN, text)
    await scene.page.clock.run_for(5000)
    await expect(scene.page.locator("#same-text")).to_have_text(note)


async def test_texts_in_one_piece_have_no_speed_up(still_scene: Scene) -> None:
    """The page says why texts that arrive in one piece have no speed-up."""
    scene = still_scene
    whole = (StepTrace(len(scene.backend.tokenizer.encode(TEXT))),)
    await stream(scene, await start(scene), whole)
    await stream(scene, await scene.backend.submitted.get(), whole)
    await scene.page.clock.run_for(5000)
    await expect(scene.page.locator("#speed-up")).to_contain_text("a text arrived in one piece")


async def test_speed_up_excludes_texts_that_end_in_a_loop(still_scene: Scene) -> None:
    """A text that ends in a loop is marked from the loop on, and has no speed-up."""
    scene, page = still_scene, still_scene.page
    text = "def area" + " + 1 - 2" * 12
    await stream(scene, await start(scene), TWO_TOKENS, text)
    await stream(scene, await scene.backend.submitted.get(), ONE_TOKEN)
    await page.clock.run_for(5000)
    await expect(page.locator("#speed-up")).to_contain_text("a text ends in a loop")
    note = re.compile("^Ends in a loop after [1-4] tokens?")
    await expect(page.locator("#loop-with")).to_have_text(note)
    await expect(page.locator("#loop-without")).to_be_hidden()
    await expect(page.locator("#said-with .token").first).not_to_have_class(re.compile("looped"))
    await expect(page.locator("#said-with .token").last).to_have_class(re.compile("looped"))
    await stream(scene, await start(scene), TWO_TOKENS)  # the next comparison has no marks
    await expect(page.locator("#loop-with")).to_be_hidden()


@pytest.mark.parametrize(
    ("tokens", "start"),
    [
        ("", 0),
        ("abcdefgh", 8),
        ("xy" + "abc" * 8, 2),
        ("xy" + "abc" * 7, 23),  # too short
        ("xy" + "abc" * 8 + "ab", 2),  # the last time is not complete
        ("xy" + "abc" * 9 + "z", 30),  # the text leaves the loop
        ("abcdefghijklmnopqrst" * 2, 40),  # repeated only once
        ("abcdefghijklmnopqrst" * 3, 0),
        ("." * 23, 23),
        ("." * 24, 0),
    ],
)
async def test_loops_are_repetitions_at_the_end(script_page: Page, tokens: str, start: int) -> None:
    """A loop is a sequence of tokens that the end of a text repeats at least three times."""
    found = await script_page.evaluate(LOOP_START, list(tokens))
    assert found == start


async def test_first_comparison_of_a_node_says_so(still_scene: Scene) -> None:
    """The first comparison says that no earlier requests are known, and the second does not."""
    scene, page = still_scene, still_scene.page
    note = page.get_by_text("No earlier requests are known.")
    for is_first in (True, False):
        drafted = await start(scene)
        await expect(note).to_be_hidden()
        await stream(scene, drafted, TWO_TOKENS)
        await stream(scene, await scene.backend.submitted.get(), ONE_TOKEN)
        await page.clock.run_for(5000)
        await expect(page.locator("#state-compare")).to_have_text("Done.")
        await expect(note).to_be_visible(visible=is_first)


async def test_chosen_proposer_runs_against_no_speculation(still_scene: Scene) -> None:
    """The first request has the mode and the seed of the form."""
    scene, page = still_scene, still_scene.page
    await adjust(page, mode="ngram", seed="7")
    request = await start(scene)
    assert (request.speculation.mode, request.sampling.seed) == ("ngram", 7)
    await expect(page.locator("#mode-with")).to_have_text("ngram")
