"""Links in the documentation point to existing files and headings."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^```.*?^```[ \t]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)


def _pages() -> list[Path]:
    """Return every Markdown page that git tracks or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    names = listed.stdout.split() or [str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md")]
    return [path for name in sorted(names) if (path := ROOT / name).exists()]


def _anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub generates for a page's headings."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return {
        re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        for heading in HEADING.findall(text)
    }


@pytest.mark.parametrize("page", _pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_of_a_page_resolve(page: Path) -> None:
    """Each relative link names an existing file and, with an anchor, an existing heading."""
    broken = []
    for found in LINK.finditer(FENCE.sub("", page.read_text(encoding="utf-8"))):
        link = found[1] or found[2]
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    assert not broken
