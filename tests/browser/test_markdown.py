"""Tests of `markdown.js` and `highlight.js`, which show answers without HTML from the model."""

from __future__ import annotations

import random

import pytest
from playwright.async_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

RENDER = """
async (texts) => {
  const { render } = await import("/web/markdown.js");
  return texts.map((text) => {
    const box = document.createElement("div");
    box.append(...render(text));
    const all = [...box.querySelectorAll("*")];
    return {
      html: box.innerHTML,
      text: box.textContent,
      tags: [...new Set(all.map((one) => one.tagName.toLowerCase()))],
      links: all.filter((one) => one.href).map((one) => one.getAttribute("href")),
    };
  });
}
"""
TAGS = {
    "p", "h3", "hr", "pre", "code", "blockquote", "ul", "ol", "li", "div", "table", "thead",
    "tbody", "tr", "th", "td", "strong", "em", "del", "a", "span", "button",
}  # fmt: skip
MARKS = "*_`~[]()!#>-+.|\\<& \n\n  1ab"
GROW = """
async (texts) => {
  const { render, renderInto } = await import("/web/markdown.js");
  const wrong = [];
  let kept = 0;
  for (const text of texts) {
    const box = document.createElement("div");
    const fresh = document.createElement("div");
    for (let end = 0; end <= text.length; end += 3) {
      const first = box.firstChild;
      renderInto(box, text.slice(0, end));
      fresh.replaceChildren(...render(text.slice(0, end)));
      if (box.innerHTML !== fresh.innerHTML) wrong.push(text.slice(0, end));
      kept += first !== null && first === box.firstChild;
    }
  }
  return [wrong, kept];
}
"""
COLOUR = """
async (all) => {
  const { highlight } = await import("/web/highlight.js");
  return all.map(([language, code]) => {
    const box = document.createElement("code");
    box.append(...highlight(code, language));
    const parts = [...box.querySelectorAll("span")];
    return [box.textContent, parts.map((part) => [part.className.slice(5), part.textContent])];
  });
}
"""
CHANGED = """
async ([languages, texts]) => {
  const { highlight } = await import("/web/highlight.js");
  const text = (node) => node.textContent ?? node;
  const keeps = (code, language) => highlight(code, language).map(text).join("") === code;
  return languages.flatMap((language) =>
    texts.filter((code) => !keeps(code, language)).map((code) => [language, code.slice(0, 80)]));
}
"""
LINK = '<a href="https://x.org/a" target="_blank" rel="noopener noreferrer">'


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("one\ntwo\n\nthree", "<p>one\ntwo</p><p>three</p>"),
        ("## Title ##\ntext", "<h3>Title</h3><p>text</p>"),
        ("**bold** and *soft*", "<p><strong>bold</strong> and <em>soft</em></p>"),
        ("_soft_, snake_case_name", "<p><em>soft</em>, snake_case_name</p>"),
        ("**a *b* c**", "<p><strong>a <em>b</em> c</strong></p>"),
        ("2 * 3 * 4", "<p>2 * 3 * 4</p>"),
        (r"\*plain\*", "<p>*plain*</p>"),
        ("~~gone~~", "<p><del>gone</del></p>"),
        ("`a < b` and ``x`y``", "<p><code>a &lt; b</code> and <code>x`y</code></p>"),
        ("- a\n- b\n  - c\n\nend", "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><p>end</p>"),
        ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
        ("> a\n> b", "<blockquote><p>a\nb</p></blockquote>"),
        ("a\n\n---\nb", "<p>a</p><hr><p>b</p>"),
        ("[x](https://x.org/a)", f"<p>{LINK}x</a></p>"),
        ("![x](https://x.org/a)", f"<p>{LINK}x</a></p>"),
        ("[x](javascript:alert)", "<p>[x](javascript:alert)</p>"),
        ("<img src=x onerror=alert()>", "<p>&lt;img src=x onerror=alert()&gt;</p>"),
        ("**not closed", "<p>**not closed</p>"),
    ],
)
async def test_markdown_becomes_elements(script_page: Page, text: str, html: str) -> None:
    """Headings, emphasis, lists, quotes, code and links become elements, and HTML stays text."""
    (found,) = await script_page.evaluate(RENDER, [text])
    assert found["html"] == html


@pytest.mark.parametrize("end", ["\n```\nafter", ""])
async def test_code_blocks_keep_their_text(script_page: Page, end: str) -> None:
    """A code block keeps its spaces and marks, also before its end has arrived."""
    code = "def f(*a):\n    # not a heading\n\n    return a"
    (found,) = await script_page.evaluate(RENDER, [f"```python\n{code}{end}"])
    assert found["text"] == f"pythonCopy{code}" + end.removeprefix("\n```\n")
    assert set(found["tags"]) <= {"div", "span", "button", "pre", "code", "p"}


async def test_tables_have_headers(script_page: Page) -> None:
    """A table has a header of each column and a cell for each value."""
    (found,) = await script_page.evaluate(RENDER, ["| a | b |\n|---|:-:|\n| 1 | **2** |\n"])
    assert '<th scope="col">a</th><th scope="col">b</th>' in found["html"]
    assert "<td>1</td><td><strong>2</strong></td>" in found["html"]


async def test_any_text_becomes_safe_elements_without_loss(script_page: Page) -> None:
    """Random marks become only known elements, links are safe, and no letter is lost."""
    rng = random.Random(5)
    texts = ["".join(rng.choices(MARKS, k=rng.randint(1, 120))) for _ in range(2000)]
    texts += ["> " * 20_000 + "a", "- " * 20_000 + "a", "**a " * 5_000, "# " + " " * 5_000 + "a"]
    for text, found in zip(texts, await script_page.evaluate(RENDER, texts), strict=True):
        assert set(found["tags"]) <= TAGS
        assert all(link.startswith(("https:", "http:", "mailto:")) for link in found["links"])
        if "```" not in text and "~~~" not in text and "](" not in text:
            assert [c for c in found["text"] if c in "ab"] == [c for c in text if c in "ab"]


async def test_growing_text_looks_like_the_whole_text(script_page: Page) -> None:
    """A text that grows looks as if it were rendered at once, and keeps its first elements."""
    rng = random.Random(6)
    texts = ["".join(rng.choices(MARKS, k=rng.randint(40, 160))) for _ in range(150)]
    texts.append("# Title\n\n" + "A paragraph.\n\n```python\nx = 1\n```\n\n" * 20)
    wrong, kept = await script_page.evaluate(GROW, texts)
    assert wrong == []
    assert kept > 200


@pytest.mark.parametrize(
    ("language", "code", "parts"),
    [
        (
            "python",
            "def f(x):  # a 'comment'\n    return \"a # b\" + 12.5",
            [
                ("keyword", "def"), ("comment", "# a 'comment'"), ("keyword", "return"),
                ("string", '"a # b"'), ("number", "12.5"),
            ],
        ),
        ("py", 'x = """a\n"b" # c\n"""\ny', [("string", '"""a\n"b" # c\n"""')]),
        ("python", "classes = Nonesuch1", []),
        (
            "js",
            "const a = `b ${c}`; // it's\n/* d\ne */ 0xff",
            [
                ("keyword", "const"), ("string", "`b ${c}`"), ("comment", "// it's"),
                ("comment", "/* d\ne */"), ("number", "0xff"),
            ],
        ),
        (
            "rust",
            "fn f<'a>(x: &'a str) { 'c' }",
            [("keyword", "fn"), ("keyword", "str"), ("string", "'c'")],
        ),
        (
            "sql",
            "SELECT a FROM b -- c",
            [("keyword", "SELECT"), ("keyword", "FROM"), ("comment", "-- c")],
        ),
        ("bash", "echo $# # all", [("keyword", "echo"), ("comment", "# all")]),
        ("json", '{"a": [1, true]}', [("string", '"a"'), ("number", "1"), ("keyword", "true")]),
        ("html", '<a href="b">it\'s</a>', [("keyword", "<a"), ("string", '"b"'), ("keyword", ">"),
                                         ("keyword", "</a"), ("keyword", ">")]),
        ("", "def f(): # a", []),
        ("brainfuck", "+-'", []),
        ("constructor", "a", []),
    ],
)  # fmt: skip
async def test_code_has_colours(
    script_page: Page, language: str, code: str, parts: list[tuple[str, str]]
) -> None:
    """Strings, comments, numbers and keywords of known languages have a colour."""
    ((text, found),) = await script_page.evaluate(COLOUR, [[language, code]])
    assert text == code
    assert [tuple(part) for part in found] == parts


async def test_colours_keep_any_code(script_page: Page) -> None:
    """Random code keeps its text in every language, and long code takes linear time."""
    rng = random.Random(7)
    languages = ["python", "js", "go", "rust", "bash", "sql", "json", "html", "php"]
    marks = "ab1 \n\t'\"`#/*-<>!=\\.{}éλ_"
    texts = ["".join(rng.choices(marks, k=rng.randint(1, 200))) for _ in range(500)]
    texts += [mark * 20_000 for mark in ("'", "/*", '"""', "\\", "= ", " ", "<a", "`\\")]
    assert await script_page.evaluate(CHANGED, [languages, texts]) == []
