"""Links of a package index, in its HTML format (PEP 503) or its JSON format (PEP 691)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Final
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

ACCEPT: Final = (
    "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, "
    "text/html;q=0.1"
)
"""The formats of a page of links, for the `Accept` header."""


@dataclass(frozen=True, slots=True)
class FileLink:
    """A file of a project.

    Attributes:
        name: the file name.
        url: its absolute address.
        sha256: the SHA-256 that the index states, in hexadecimal, or None.
    """

    name: str
    url: str
    sha256: str | None = None


def read_links(body: str, content_type: str, page_url: str) -> list[FileLink]:
    """Return the links of a project's page.

    Args:
        body: the page.
        content_type: the value of the `Content-Type` header.
        page_url: the address of the page, to which relative links refer.

    Raises:
        ValueError: the page has neither format.
    """
    if "json" in content_type:
        return list(_json_links(json.loads(body), page_url))
    page = _Page(page_url)
    page.feed(body)
    page.close()
    return page.links


def _json_links(page: object, page_url: str) -> Iterator[FileLink]:
    match page:
        case {"files": list(files)}:
            pass
        case _:
            raise ValueError("the page has no list of files")
    for file in files:
        match file:
            case {"filename": str(name), "url": str(url), "hashes": {"sha256": str(sha256)}}:
                yield FileLink(name, urljoin(page_url, url), sha256.lower())
            case {"filename": str(name), "url": str(url)}:
                yield FileLink(name, urljoin(page_url, url))


class _Page(HTMLParser):
    """Collects the links of a page. The last part of an address is the name of the file."""

    def __init__(self, page_url: str) -> None:
        super().__init__()
        self.links: list[FileLink] = []
        self._base = page_url

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        href = dict(attrs).get("href")
        if href is None:
            return
        if tag == "base":
            self._base = urljoin(self._base, href)
        elif tag == "a":
            url, fragment = urldefrag(urljoin(self._base, href))
            name = unquote(urlsplit(url).path.rpartition("/")[2])
            kind, _, digest = fragment.partition("=")
            self.links.append(FileLink(name, url, digest.lower() if kind == "sha256" else None))
