"""States of the page that tests check and screenshots show."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Final

from playwright.async_api import Browser, Page, Route, expect

from draftgate.backends.types import GenerationRequest, StepTrace
from draftgate.gateway.app import Listening
from draftgate.gateway.fleet import FleetWorker
from tests.browser.browse import Visit, visiting
from tests.browser.conftest import Scene, open_scene
from tests.browser.draft_steps import PATTERN, TEXT, in_steps
from tests.gateway.harness import ScriptedBackend, client, running, until
from tests.gateway.upstreams import (
    DONE,
    LAST,
    TOKEN,
    USAGE,
    ScriptedUpstream,
    forwarding,
    stream_of,
    upstream,
)

SIZES: Final = {390: 844, 768: 1024, 1400: 900}
"""Heights of screens by their width: a phone, a tablet and a notebook."""

SCHEMES: Final = ("light", "dark")
FINISHED: Final = re.compile("^Done")
ENDED: Final = re.compile("^(Done|Stopped after)")
KEY: Final = "sk-page"
ANSWER: Final = "A list:\n\n- **one**\n- `two`\n"
DOCUMENT: Final = """# Binary search

Binary search *halves* a **sorted** list in each step, see [the article](https://example.org/).

1. Compare `x` with the middle.
2. Continue in one half:
   - left, if `x` is smaller
   - right, if `x` is greater

```python
def search(items, x, low=0, high=None):
    high = len(items) if high is None else high  # a comment that is wider than a phone's screen
    middle = (low + high) // 2
```

> The list must be sorted.

---

| items | steps | time of a search in a list that fits into the first-level cache |
| --- | --- | --- |
| 1,000 | 10 | 50 ns |
| 1,000,000 | 20 | 2 µs |
"""
"""An answer with each element of Markdown, higher than the box of the chat."""

ONE_TOKEN: Final = (StepTrace(1),)
LONG_TEXT: Final = "".join(TEXT.replace("area", f"area_{number}") for number in range(9))
"""A text that is higher than a box of the comparison and does not end in a loop."""

CHAT: Final = (
    b'data: {"id":"c","choices":[{"index":0,"delta":{"content":" a"},"finish_reason":"stop"}]}\n\n'
)
THOUGHT: Final = CHAT.replace(b'"content":" a"', b'"reasoning":"because"').replace(
    b'"stop"', b"null"
)


async def generate(scene: Scene, text: str = TEXT) -> None:
    """Run the form, and let the worker answer with a text."""
    await scene.page.get_by_role("button", name="Generate").click()
    request = await scene.backend.submitted.get()
    scene.deliver(request, *in_steps(scene.backend.tokenizer, text))
    await expect(scene.page.locator("#stats")).to_be_visible()
    await expect(scene.page.locator("#decisions tr")).to_contain_text("drafts accepted")


async def say(scene: Scene, message: str, answer: str = ANSWER) -> str:
    """Send a message, let the worker answer, and return the prompt."""
    await send(scene.page, message)
    return await reply(scene, answer)


async def send(page: Page, message: str) -> None:
    """Write a message and press Enter."""
    await page.get_by_label("Message", exact=True).fill(message)
    await page.get_by_label("Message", exact=True).press("Enter")


async def reply(scene: Scene, answer: str = ANSWER) -> str:
    """Let the worker answer the next request of the chat, and return its prompt."""
    request = await scene.backend.submitted.get()
    scene.deliver(request, *in_steps(scene.backend.tokenizer, answer))
    await expect(scene.page.locator("#state-chat")).to_have_text(FINISHED)
    return scene.backend.tokenizer.decode(request.prompt_ids)


async def begin(scene: Scene, message: str) -> GenerationRequest:
    """Send the first message, show one step of its answer, and return the request."""
    await send(scene.page, message)
    request = await scene.backend.submitted.get()
    scene.deliver(request, in_steps(scene.backend.tokenizer, "one two")[0])
    await expect(scene.page.locator(".answer .markdown")).to_have_text("one")
    return request


FAILURES: Final = {"busy": 429, "unavailable": 503, "network": 0}
"""The status of failed responses by name, or 0 for a connection that breaks."""


@asynccontextmanager
async def failing(scene: Scene, path: str, status: int) -> AsyncIterator[None]:
    """Let the requests of the page to a path fail, and ignore what browsers log about it."""

    async def fail(route: Route) -> None:
        if not status:
            return await route.abort()
        body = {"error": {"message": f"refused with {status}"}}
        return await route.fulfill(status=status, json=body)

    await scene.page.route(f"**{path}", fail)
    yield
    reason = f"refused with {status}" if status else "The server does not respond."
    await expect(scene.page.get_by_role("alert")).to_have_text(reason)
    await scene.page.unroute(f"**{path}")
    scene.visit.problems.clear()


async def adjust(page: Page, **settings: str) -> None:
    """Set fields of the drawer by their id, where `_` stands for `-`, and close it."""
    await page.get_by_role("button", name="Settings").click()
    for name, value in settings.items():
        field = page.locator(f"#{name.replace('_', '-')}")
        is_menu = await field.evaluate("(field) => field.tagName === 'SELECT'")
        await (field.select_option(value) if is_menu else field.fill(value))
    await page.get_by_role("button", name="Close").click()


async def receive_sample(page: Page, gateway: Listening) -> None:
    """Let the node take a sample, and wait until the charts show it."""
    gateway.node.live.take()
    await expect(page.locator("#live-state")).to_have_text("last two minutes")


@asynccontextmanager
async def logged_in(browser: Browser) -> AsyncIterator[tuple[Visit, Listening]]:
    """Open the page of a node with API keys, and log in."""
    async with (
        running(api_keys=(KEY,)) as gateway,
        visiting(browser, gateway.url, KEY) as visit,
    ):
        yield visit, gateway
        visit.check()


@asynccontextmanager
async def upstream_page(
    browser: Browser, *blocks: bytes
) -> AsyncIterator[tuple[Page, ScriptedUpstream]]:
    """Open the page of a node whose upstream streams these blocks, and check it at the end."""
    async with (
        upstream(stream_of(*blocks)) as engine,
        forwarding(engine) as gateway,
        visiting(browser, gateway.url) as visit,
    ):
        yield visit.page, engine
        visit.check()


@asynccontextmanager
async def completion(browser: Browser) -> AsyncIterator[Page]:
    """A completion with tokens of each proposer, its decision and its statistics."""
    async with open_scene(browser) as scene:
        scene.gateway.node.metrics.recent.draft_times.add("", 2.45, 4.0, 60)
        scene.gateway.node.take_sample()
        await generate(scene)
        await expect(scene.page.locator("#saved")).to_be_visible()
        await receive_sample(scene.page, scene.gateway)
        yield scene.page


@asynccontextmanager
async def chat(browser: Browser) -> AsyncIterator[Page]:
    """A conversation with Markdown, beside an earlier one in the history."""
    async with open_scene(browser, "Chat") as scene:
        await say(scene, "an earlier question")
        await scene.page.get_by_role("button", name="New conversation").click()
        await say(scene, "What is binary search?", DOCUMENT)
        yield scene.page


@asynccontextmanager
async def chat_tokens(browser: Browser) -> AsyncIterator[Page]:
    """The tokens of a conversation that are shown in place of the Markdown."""
    async with chat(browser) as page:
        await page.get_by_role("button", name="Show tokens").click()
        yield page


@asynccontextmanager
async def chat_branches(browser: Browser) -> AsyncIterator[Page]:
    """A cut answer of an edited message, with the second version of the message in its form."""
    async with open_scene(browser, "Chat") as scene:
        page = scene.page
        await say(scene, "What is a heap?")
        await page.get_by_role("button", name="Edit").first.click()
        await page.get_by_label("Edited message").fill("What is a binary heap?")
        await page.get_by_role("button", name="Save").click()
        await scene.answer_cut("A binary heap is a tree whose")
        await expect(page.get_by_role("button", name="Continue")).to_be_visible()
        await page.get_by_role("button", name="Edit").first.click()
        await page.evaluate("() => document.activeElement.blur()")
        yield page


@asynccontextmanager
async def chat_running(browser: Browser) -> AsyncIterator[Page]:
    """An answer that arrives."""
    async with open_scene(browser, "Chat") as scene:
        await send(scene.page, "What is binary search?")
        request = await scene.backend.submitted.get()
        scene.deliver(request, *in_steps(scene.backend.tokenizer, DOCUMENT)[:30])
        await expect(scene.page.locator(".answer h3")).to_have_text("Binary search")
        yield scene.page


@asynccontextmanager
async def chat_empty(browser: Browser) -> AsyncIterator[Page]:
    """The chat of a simulator before the first message, with a refused file."""
    async with running() as gateway, visiting(browser, gateway.url) as visit:
        await paste(visit.page, "photo.png", "image/png", "")
        await expect(visit.page.get_by_role("alert")).to_be_visible()
        yield visit.page
        visit.check()


@asynccontextmanager
async def chat_settings(browser: Browser) -> AsyncIterator[Page]:
    """The drawer with the settings."""
    async with chat(browser) as page:
        await page.get_by_role("button", name="Settings").click()
        yield page


@asynccontextmanager
async def chat_history(browser: Browser) -> AsyncIterator[Page]:
    """A search in the history, which a narrow screen shows above the conversation."""
    async with chat(browser) as page:
        await page.set_viewport_size({"width": 390, "height": 844})
        await page.get_by_role("button", name="History").click()
        await page.get_by_label("Search conversations").fill("binary")
        await expect(page.locator("#found")).to_have_text("1 conversation found")
        yield page


PASTE: Final = """
([name, type, content]) => {
  const clipboardData = new DataTransfer();
  clipboardData.items.add(new File([content], name, { type }));
  const event = new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true });
  document.getElementById("message").dispatchEvent(event);
}
"""


async def paste(page: Page, name: str, kind: str, content: str) -> None:
    """Paste a file of a MIME type into the message."""
    await page.evaluate(PASTE, [name, kind, content])


@asynccontextmanager
async def compared(browser: Browser) -> AsyncIterator[Page]:
    """Both texts of a comparison, which are higher than their boxes, and the speed-up."""
    async with open_scene(browser) as scene:
        await _begin_comparison(scene)
        await _answer_comparison(scene, ONE_TOKEN, "#said-without")
        await expect(scene.page.locator("#state-compare")).to_have_text("Done.")
        await expect(scene.page.locator("#speed-up")).to_contain_text("as fast with speculation")
        yield scene.page


@asynccontextmanager
async def comparing(browser: Browser) -> AsyncIterator[Page]:
    """A comparison during its second run."""
    async with open_scene(browser) as scene:
        await _begin_comparison(scene)
        request = await scene.backend.submitted.get()
        first, *_ = in_steps(scene.backend.tokenizer, TEXT, ONE_TOKEN)
        scene.deliver(request, first)
        await expect(scene.page.locator("#said-without .token")).to_have_count(1)
        yield scene.page


async def _begin_comparison(scene: Scene) -> None:
    """Start a comparison, and let the worker end the run with speculation."""
    await scene.page.get_by_role("tab", name="Compare").click()
    await scene.page.get_by_role("button", name="Compare").click()
    await _answer_comparison(scene, PATTERN, "#said-with")


async def _answer_comparison(scene: Scene, pattern: Sequence[StepTrace], column: str) -> None:
    """Deliver a text in two pieces, because the rate of one piece is unknown."""
    request = await scene.backend.submitted.get()
    first, *others = in_steps(scene.backend.tokenizer, LONG_TEXT, pattern)
    scene.deliver(request, first)
    await expect(scene.page.locator(f"{column} .token").first).to_be_attached()
    scene.deliver(request, *others)


@asynccontextmanager
async def with_keys(browser: Browser) -> AsyncIterator[Page]:
    """A completion of a node with API keys."""
    async with logged_in(browser) as (visit, gateway):
        await visit.page.get_by_role("tab", name="Completion").click()
        await visit.page.get_by_role("button", name="Generate").click()
        await expect(visit.page.locator("#state-completion")).to_have_text(ENDED)
        await receive_sample(visit.page, gateway)
        yield visit.page


@asynccontextmanager
async def plain_upstream(browser: Browser) -> AsyncIterator[Page]:
    """A completion of an upstream without metrics."""
    async with upstream_page(browser, TOKEN, TOKEN, LAST, USAGE, DONE) as (page, _):
        await page.get_by_role("button", name="Generate").click()
        await expect(page.locator("#state-completion")).to_have_text(FINISHED)
        await expect(page.locator("#unreported")).to_be_visible()
        yield page


@asynccontextmanager
async def reasoning(browser: Browser) -> AsyncIterator[Page]:
    """An answer of an upstream with its reasoning open."""
    async with upstream_page(browser, THOUGHT, CHAT, USAGE, DONE) as (page, _):
        await page.get_by_role("tab", name="Chat").click()
        await send(page, "hello")
        await expect(page.locator("#state-chat")).to_have_text(FINISHED)
        await page.get_by_text("Reasoning").click()
        yield page


@asynccontextmanager
async def stopped_server(browser: Browser) -> AsyncIterator[Page]:
    """The errors of a request to a server that has stopped."""
    async with AsyncExitStack() as stack:
        async with running() as gateway:
            visit = await stack.enter_async_context(visiting(browser, gateway.url))
            await receive_sample(visit.page, gateway)
        await expect(visit.page.locator("#live-state")).to_have_text("disconnected")
        await visit.page.get_by_role("tab", name="Completion").click()
        await visit.page.get_by_role("button", name="Generate").click()
        await expect(visit.page.get_by_role("alert")).to_be_visible()
        yield visit.page


@asynccontextmanager
async def moving(browser: Browser) -> AsyncIterator[tuple[Page, FleetWorker, FleetWorker]]:
    """A request that has moved between two simulated workers, of which the first is leaving."""
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(running(devices=(0, 1)))
        visit = await stack.enter_async_context(visiting(browser, gateway.url))
        http = await stack.enter_async_context(client(gateway))
        body = {"prompt": [9] * 800, "max_tokens": 6000, "ignore_eos": True}
        request = asyncio.create_task(http.post("/v1/completions", json=body, timeout=600))
        workers = gateway.node.fleet.workers
        await until(lambda: any(one.usage.started for one in workers))
        source, sink = sorted(workers, key=lambda one: -one.usage.started)
        await expect(visit.page.get_by_role("img", name=re.compile("^Request "))).to_be_visible()
        source.drained = True
        await expect(visit.page.locator("#moves tr")).to_have_count(1)
        await receive_sample(visit.page, gateway)
        yield visit.page, source, sink
        visit.check()
        request.cancel()
        await asyncio.wait({request})


@asynccontextmanager
async def moved(browser: Browser) -> AsyncIterator[Page]:
    """A request in the lane to which it has moved."""
    async with moving(browser) as (page, _source, _sink):
        yield page


@asynccontextmanager
async def request_list(browser: Browser) -> AsyncIterator[Page]:
    """The list of requests, of which one was refused."""
    async with open_scene(browser) as scene:
        await generate(scene)
        async with client(scene.gateway) as http:
            await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 9999})
        await scene.page.goto(f"{scene.gateway.url}/requests")
        await expect(scene.page.locator("#requests tr")).to_have_count(2)
        yield scene.page


@asynccontextmanager
async def request_page(browser: Browser) -> AsyncIterator[Page]:
    """The page of a request that has moved."""
    async with moving(browser) as (page, _source, _sink):
        home = page.url
        await page.locator("#moves a").click()
        await expect(page.locator("#moves tr")).to_have_count(1)
        await expect(page.locator("#decided li")).not_to_have_count(0)
        yield page
        await page.goto(home)


@asynccontextmanager
async def operations(browser: Browser) -> AsyncIterator[Page]:
    """The views of an operator, while a request waits."""
    backend, priority = ScriptedBackend(), {"priority": 2}
    backend.max_sequences = 1
    async with running(backends=[backend]) as gateway, client(gateway) as http:
        body = {"prompt": "x", "max_tokens": 5}
        first = asyncio.create_task(http.post("/v1/completions", json=body))
        request = await backend.submitted.get()
        second = asyncio.create_task(http.post("/v1/completions", json=body | priority))
        await until(lambda: len(gateway.node.dispatcher.queue) == 1)
        async with visiting(browser, gateway.url) as visit:
            await visit.page.goto(f"{gateway.url}/operations")
            await expect(visit.page.locator("#queue tbody tr")).to_have_count(1)
            yield visit.page
            visit.check()
        backend.emit(request, "x", last=True)
        backend.emit(await backend.submitted.get(), "x", last=True)
        await asyncio.gather(first, second)


@asynccontextmanager
async def api(browser: Browser) -> AsyncIterator[Page]:
    """The description of an operation, with the schema of an object and a response."""
    async with running() as gateway, visiting(browser, gateway.url) as visit:
        await visit.page.goto(f"{gateway.url}/docs")
        one = visit.page.locator("#post_tokenize")
        await one.locator("summary").first.click()
        await one.locator(".schema summary", has_text="Message").first.click()
        await one.get_by_role("button", name="Send", exact=True).click()
        await expect(one.locator(".response")).to_contain_text("200 OK")
        yield visit.page
        visit.check()


@asynccontextmanager
async def login(browser: Browser) -> AsyncIterator[Page]:
    """A refused login."""
    async with running(api_keys=(KEY,)) as gateway:
        context = await browser.new_context()
        page = await context.new_page()
        await page.goto(gateway.url)
        await page.get_by_label("API key").fill("sk-wrong")
        await page.get_by_role("button", name="Log in").click()
        await expect(page.get_by_role("alert")).to_be_visible()
        yield page
        await context.close()


STATES: Final[dict[str, Callable[[Browser], AbstractAsyncContextManager[Page]]]] = {
    "completion": completion,
    "chat": chat,
    "chat-tokens": chat_tokens,
    "chat-branches": chat_branches,
    "chat-running": chat_running,
    "chat-empty": chat_empty,
    "chat-settings": chat_settings,
    "chat-history": chat_history,
    "comparing": comparing,
    "compared": compared,
    "with-keys": with_keys,
    "moved": moved,
    "plain-upstream": plain_upstream,
    "reasoning": reasoning,
    "stopped-server": stopped_server,
    "requests": request_list,
    "request": request_page,
    "operations": operations,
    "api": api,
    "login": login,
}


async def views(page: Page) -> AsyncIterator[str]:
    """Show a page in each size and colour scheme, and yield a name such as `390-dark`."""
    for scheme in SCHEMES:
        # A transition of colours would have too little contrast for a moment.
        await page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        for width, height in SIZES.items():
            await page.set_viewport_size({"width": width, "height": height})
            yield f"{width}-{scheme}"
