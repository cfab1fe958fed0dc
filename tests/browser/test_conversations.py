"""Tests of the history: storage in the browser, search, deletion, export and bounds."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from tests.browser.conftest import Scene
from tests.browser.draft_steps import in_steps
from tests.browser.states import adjust, begin, reply, say, send

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

DENY_STORAGE = (
    "() => Object.defineProperty(window, 'localStorage',"
    " { get() { throw new DOMException('denied', 'SecurityError'); } })"
)

KEEP = """
async (sizes) => {
  const chats = await import("/web/conversations.js");
  localStorage.clear();
  for (const [index, size] of sizes.entries()) {
    const one = chats.create();
    chats.add(one, chats.ROOT, { role: "user", content: `${index} ${"x".repeat(size)}` });
    chats.keep(one);
  }
  const found = chats.kept().map((one) => parseInt(one.messages[0].content));
  localStorage.clear();
  return found;
}
"""

GROW = """
async (operations) => {
  const chats = await import("/web/conversations.js");
  const one = chats.create();
  for (const [kind, number] of operations) {
    const all = [chats.ROOT, ...one.messages.keys()];
    const message = { role: "user", content: String(number) };
    if (kind === "add") chats.add(one, all[number % all.length], message);
    else if (kind === "remove") chats.removeFrom(one, Math.max(0, all.length - 1 - number % 3));
    else if (one.messages.length) {
      const at = number % one.messages.length;
      one.chosen[one.messages[at].parent] = at;
    }
    const path = chats.path(one);
    for (const [index, at] of path.entries()) {
      if (one.messages[at].parent !== (path[index - 1] ?? chats.ROOT)) return `broken at ${at}`;
    }
    const last = path.at(-1) ?? chats.ROOT;
    if (chats.versions(one, last).length) return `the path ends before the answers to ${last}`;
  }
  return "";
}
"""


async def test_conversations_are_kept_and_can_be_deleted(chat_scene: Scene) -> None:
    """A conversation returns after a reload, continues with its messages, and can be deleted."""
    page = chat_scene.page
    listed = page.locator("#conversations .open")
    await adjust(page, system="be brief")
    await say(chat_scene, "first question")
    await page.get_by_role("button", name="New conversation").click()
    await expect(page.locator("#system")).to_have_value("")
    await say(chat_scene, "other question")
    await page.reload()
    await expect(listed).to_have_text(["other question", "first question"])
    await listed.nth(1).click()
    await expect(page.locator("#turns .turn")).to_have_text("first question")
    await expect(page.locator(".answer .markdown strong")).to_have_text("one")
    await expect(page.locator("#system")).to_have_value("be brief")
    prompt = await say(chat_scene, "and then?")
    assert [prompt.count(text) for text in ("first question", "be brief", "other")] == [1, 1, 0]
    await page.get_by_role("button", name="Delete first question").click()
    await expect(listed).to_have_text(["other question"])
    await expect(page.locator("#turns > *")).to_have_count(0)
    page.once("dialog", lambda dialog: dialog.accept())
    await page.get_by_role("button", name="Delete all").click()
    await expect(listed).to_have_count(0)
    await page.reload()
    await expect(page.get_by_role("button", name="Delete all")).to_be_disabled()


async def test_conversations_are_found_by_their_words(chat_scene: Scene) -> None:
    """The search finds words of messages and answers in any case, and says how many it found."""
    page = chat_scene.page
    listed = page.locator("#conversations .open")
    await say(chat_scene, "about trees", "A Red-Black tree")
    await page.get_by_role("button", name="New conversation").click()
    await say(chat_scene, "about lists", "A linked list")
    search = page.get_by_label("Search conversations")
    for words, titles in (
        ("red-black", ["about trees"]),
        ("ABOUT", ["about lists", "about trees"]),
        ("heap", []),
    ):
        await search.fill(words)
        await expect(listed).to_have_text(titles)
    await expect(page.locator("#found")).to_have_text("0 conversations found")
    await search.fill("")
    await expect(listed).to_have_count(2)


async def test_conversation_is_exported(chat_scene: Scene, tmp_path: Path) -> None:
    """The export has the shown messages as Markdown, and all versions of messages as JSON."""
    page = chat_scene.page
    await adjust(page, system="be brief")
    await say(chat_scene, "What is it?", "first answer")
    await page.get_by_role("button", name="Regenerate").click()
    await reply(chat_scene, "second answer")
    name = await page.get_by_label("Model").input_value()
    files = {}
    for kind in ("Markdown", "JSON"):
        async with page.expect_download() as download:
            await page.get_by_role("button", name=f"Export {kind}").click()
        saved = await download.value
        await saved.save_as(tmp_path / saved.suggested_filename)
        files[kind] = tmp_path / saved.suggested_filename
    assert [path.name for path in files.values()] == ["What-is-it.md", "What-is-it.json"]
    assert files["Markdown"].read_text() == (
        "# What is it?\n\n## System prompt\n\nbe brief\n\n"
        f"## You\n\nWhat is it?\n\n## {name}\n\nsecond answer\n"
    )
    exported = json.loads(files["JSON"].read_text())
    contents = [message["content"] for message in exported["messages"]]
    assert contents == ["What is it?", "first answer", "second answer"]
    assert exported["title"] == "What is it?"


async def test_another_conversation_ends_the_answer(chat_scene: Scene) -> None:
    """Opening another conversation stops an answer, which stays in its own conversation."""
    page = chat_scene.page
    request = await begin(chat_scene, "first")
    await page.get_by_role("button", name="New conversation").click()
    assert await chat_scene.backend.abandoned.get() == request.request_id
    await expect(page.locator("#turns > *")).to_have_count(0)
    await expect(page.locator("#state-chat")).to_have_text("")
    await page.locator("#conversations .open", has_text="first").click()
    await expect(page.locator(".answer .markdown")).to_have_text("one")


async def test_message_without_an_answer_stays_in_its_conversation(chat_scene: Scene) -> None:
    """A message whose conversation is left before its answer stays, and can be edited."""
    page = chat_scene.page
    await send(page, "first")
    await chat_scene.backend.submitted.get()
    await page.get_by_role("button", name="New conversation").click()
    await expect(page.locator("#conversations .open")).to_have_text(["first"])
    await expect(page.get_by_label("Message", exact=True)).to_have_value("")
    await page.locator("#conversations .open").click()
    await expect(page.locator(".turn")).to_have_text("first")
    await expect(page.locator(".answer")).to_have_count(0)


async def test_deleted_conversation_does_not_return(chat_scene: Scene) -> None:
    """A conversation that is deleted during an answer stays deleted."""
    page = chat_scene.page
    await say(chat_scene, "first")
    await send(page, "second")
    request = await chat_scene.backend.submitted.get()
    chat_scene.deliver(request, in_steps(chat_scene.backend.tokenizer, "one two")[0])
    await page.get_by_role("button", name="Delete first").click()
    assert await chat_scene.backend.abandoned.get() == request.request_id
    await say(chat_scene, "other")
    await expect(page.locator("#conversations .open")).to_have_text(["other"])


async def test_answer_that_arrives_survives_the_end_of_the_page(chat_scene: Scene) -> None:
    """The text so far of an answer is kept if the user leaves the page."""
    page = chat_scene.page
    await begin(chat_scene, "first")
    await page.reload()
    await page.locator("#conversations .open").click()
    await expect(page.locator(".answer .markdown")).to_have_text("one")


async def test_chat_works_without_storage(chat_scene: Scene) -> None:
    """The chat works in a browser that keeps no data for the page."""
    await chat_scene.page.evaluate(DENY_STORAGE)
    await say(chat_scene, "hello")
    assert "hello" in await say(chat_scene, "again")


async def test_history_is_bounded(script_page: Page) -> None:
    """The browser keeps the latest 100 conversations, and at most 2 million characters."""
    assert await script_page.evaluate(KEEP, [10] * 103) == list(range(102, 2, -1))
    assert await script_page.evaluate(KEEP, [900_000] * 4) == [3, 2]
    assert await script_page.evaluate(KEEP, [10, 2_100_000]) == [1]


async def test_branches_stay_whole_after_any_changes(script_page: Page) -> None:
    """The shown messages are a path from the first to a last one, after any random changes."""
    rng = random.Random(3)
    for _ in range(200):
        kinds = rng.choices(("add", "remove", "choose"), (6, 1, 2), k=40)
        operations = [[kind, rng.randrange(100)] for kind in kinds]
        assert await script_page.evaluate(GROW, operations) == ""
