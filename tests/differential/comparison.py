"""The comparison of what two versions did with the same cases."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import Any, NamedTuple

from tests.differential.exchange import Answer, Case, Observed, Part
from tests.differential.record import Outcome, Record

ID = re.compile(r"(?=[0-9]*[a-f])(?<![0-9a-zA-Z.])[0-9a-f]{8,}(?![0-9a-zA-Z])|draftgate-\w{8}")
"""Random ids, and names of temporary folders."""

OWN_SERIES = re.compile(r"python_|process_|draftgate_event_loop_")
"""Metrics about the process, which depend on its parts, and not only on what it does."""

MOST_CHARACTERS = 1500


@dataclass(frozen=True)
class Difference:
    """A difference between two versions.

    Attributes:
        kind: what differs, such as the name of a header.
        case: scenario, number and description of the case.
    """

    kind: str
    case: str
    before: str
    after: str

    def __str__(self) -> str:
        before, after = (text[:MOST_CHARACTERS] for text in (self.before, self.after))
        return f"{self.case}\n  before: {before}\n  after:  {after}"


class Mask:
    """A replacement of ids by the order in which they occur."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def text(self, data: bytes | str) -> str:
        """Return a text without ids."""
        text = data if isinstance(data, str) else data.decode("utf-8", "backslashreplace")
        return ID.sub(lambda m: self._known.setdefault(m[0], f"<id {len(self._known)}>"), text)


class Comparison:
    """The comparison of one case, with a mask for each version."""

    def __init__(self, case: str) -> None:
        self.found: list[Difference] = []
        self._case = case
        self._masks = Mask(), Mask()

    def compare(self, kind: str, before: Any, after: Any) -> bool:
        """Compare two texts or values, and return whether they are equal."""
        texts = [
            value if isinstance(value, str | bytes) else repr(value) for value in (before, after)
        ]
        first, second = (mask.text(text) for mask, text in zip(self._masks, texts, strict=True))
        if first != second:
            self.found.append(Difference(kind, self._case, *_near(first, second)))
        return first == second

    def exchanges(self, before: Observed, after: Observed) -> None:
        """Compare the responses to an exchange."""
        for name in ("broken", "missing", "statuses", "closed"):
            self.compare(name, getattr(before, name), getattr(after, name))
        counts = [[a.status for a in observed.answers] for observed in (before, after)]
        if self.compare("status", *counts):
            for first, second in zip(before.answers, after.answers, strict=True):
                self._answer(first, second)

    def _answer(self, before: Answer, after: Answer) -> None:
        first, second = _headers(before), _headers(after)
        for name in dict.fromkeys([*first, *second]):
            self.compare(f"header {name}", first.get(name), second.get(name))
        self.compare("incomplete response", before.complete, after.complete)
        content_type = first.get("content-type", [""])[0]
        if content_type.startswith("text/event-stream"):
            self._events(before.parts, after.parts)
        else:
            bodies = [b"".join(p.data for p in answer.parts) for answer in (before, after)]
            self._body("body", *bodies)

    def _events(self, before: list[Part], after: list[Part]) -> None:
        orders = [list(map(_choice, parts)) for parts in (before, after)]
        if orders[0] != orders[1]:
            before, after = _by_choice(before), _by_choice(after)
            if list(map(_choice, before)) == list(map(_choice, after)):
                self.compare("order of choices in a step", *orders)
        for first, second in zip_longest(before, after):
            if first is None or second is None:
                absent = [None if part is None else part.data for part in (first, second)]
                self.compare("lost event" if second is None else "further event", *absent)
            elif self._body("event", first.data, second.data):
                self.compare("time of an event", f"{first.at_s:.4f}", f"{second.at_s:.4f}")

    def _body(self, kind: str, before: bytes, after: bytes) -> bool:
        if before != after and (trees := _trees(before, after)) and trees[0] == trees[1]:
            return self.compare(f"form of the {kind}", before, after)
        return self.compare(kind, before, after)

    def outcomes(self, before: Outcome, after: Outcome) -> None:
        """Compare everything that was observed in a case."""
        for first, second in zip(before.exchanges, after.exchanges, strict=True):
            self.exchanges(first, second)
        # Requests at the same time may reach the upstream in any order.
        left = list(map(_request, after.upstream))
        lost = []
        for request in map(_request, before.upstream):
            same = (other for other in left if other[:2] == request[:2])
            if (found := next(same, None)) is None:
                lost.append(request)
            else:
                left.remove(found)
                self._upstream_request(request, found)
        for pair in zip_longest(lost, left, fillvalue=_request(b"")):
            self._upstream_request(*pair)
        self._lines(before.lines, after.lines)

    def _upstream_request(self, before: _Request, after: _Request) -> None:
        if not self.compare("request to the upstream", before.line, after.line):
            return
        for name in dict.fromkeys([*before.headers, *after.headers]):
            kind = f"header {name} to the upstream"
            self.compare(kind, before.headers.get(name), after.headers.get(name))
        self.compare("body to the upstream", before.body, after.body)

    def _lines(self, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
        pair = zip(self._masks, (before, after), strict=True)
        texts = [
            Counter(mask.text(json.dumps(x, sort_keys=True)) for x in lines) for mask, lines in pair
        ]
        lost, further = texts[0] - texts[1], texts[1] - texts[0]
        for first, second in zip_longest(sorted(lost.elements()), sorted(further.elements())):
            event = json.loads(first or second)["event"]
            self.found.append(
                Difference(f"log line {event}", self._case, *_near(str(first), str(second)))
            )

    def pages(self, before: dict[str, Observed], after: dict[str, Observed]) -> None:
        """Compare pages other than metrics."""
        for page in before:
            if page == "/metrics":
                continue
            trees = [json.loads(_content(pages[page])) for pages in (before, after)]
            for place, first, second in _leaves("", *trees):
                self.compare(f"{page.partition('?')[0]}{place}", first, second)

    def metrics(self, before: dict[str, float], after: dict[str, float]) -> None:
        """Compare the changes of metrics."""
        for series in sorted({*before, *after}):
            values = [found.get(series) for found in (before, after)]
            if not OWN_SERIES.match(series) and not _equal(*values):
                name = series.partition("{")[0]
                shown = [f"{series} {value}" for value in values]
                self.found.append(Difference(f"metric {name}", self._case, *shown))


def _equal(before: float | None, after: float | None) -> bool:
    if before is None or after is None:
        return before is after
    return abs(before - after) <= 1e-6 * max(1.0, abs(before))


def _choice(part: Part) -> int:
    """Return the index of the only choice of an event, or -1."""
    trees = _trees(part.data)
    choices = trees[0].get("choices") if trees and isinstance(trees[0], dict) else None
    return choices[0].get("index", -1) if choices and len(choices) == 1 else -1


def _by_choice(parts: list[Part]) -> list[Part]:
    """Return the events with those of the same time ordered by choice."""
    found: list[Part] = []
    for _, group in groupby(parts, lambda part: (round(part.at_s, 6), _choice(part) < 0)):
        found += sorted(group, key=_choice)
    return found


def _headers(answer: Answer) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in answer.headers:
        found.setdefault(name.lower(), []).append(value)
    return found


class _Request(NamedTuple):
    line: str
    body: bytes
    headers: dict[str, list[str]]


def _request(data: bytes) -> _Request:
    """Return the parts of a request to an upstream, or empty parts without a request."""
    head, _, body = data.partition(b"\r\n\r\n")
    line, *lines = head.decode("latin-1").split("\r\n")
    headers: dict[str, list[str]] = {}
    for header in lines:
        name, _, value = header.partition(":")
        headers.setdefault(name.lower(), []).append(value.strip())
    return _Request(line, body, headers)


def _trees(*bodies: bytes) -> list[Any]:
    try:
        return [json.loads(body.removeprefix(b"data: ")) for body in bodies]
    except (ValueError, RecursionError):
        return []


def _content(observed: Observed) -> bytes:
    return b"".join(part.data for answer in observed.answers for part in answer.parts)


def _leaves(place: str, before: Any, after: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield places of two trees with their values. Indexes are not part of the place."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys([*before, *after]):
            shown = re.sub(r"[0-9a-f]{8,}", "<id>", key)
            yield from _leaves(f"{place}.{shown}", before.get(key), after.get(key))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for first, second in zip(before, after, strict=True):
            yield from _leaves(f"{place}[]", first, second)
    else:
        yield place, before, after


def _near(before: str, after: str) -> tuple[str, str]:
    """Return the texts from shortly before their first difference."""
    same = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), 0)
    begin = max(0, same - 300)
    return before[begin:], after[begin:]


def series_of(page: bytes) -> dict[str, float]:
    """Return the values of a metrics page."""
    lines = [line.rpartition(" ") for line in page.decode().splitlines() if line[:1] != "#"]
    return {series: float(value) for series, _, value in lines}


def _change(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {series: value - before.get(series, 0.0) for series, value in after.items()}


def compared(
    cases: list[Case], before: dict[str, Record], after: dict[str, Record]
) -> list[Difference]:
    """Return all differences between two versions."""
    found: list[Difference] = []
    for scenario, record in before.items():
        names = [case.name for case in cases if case.scenario == scenario]
        versions = record, after[scenario]
        for number, name in enumerate(names):
            comparison = Comparison(f"{scenario} {number}: {name}")
            comparison.outcomes(*(version.outcomes[number] for version in versions))
            found += comparison.found
        last: list[dict[str, float]] = [{}, {}]
        for number in versions[0].pages:
            comparison = Comparison(f"{scenario}, pages after {number} cases")
            pages = [version.pages[number] for version in versions]
            comparison.pages(*pages)
            series = [series_of(_content(p["/metrics"])) for p in pages]
            comparison.metrics(*(_change(b, a) for b, a in zip(last, series, strict=True)))
            last = series
            found += comparison.found
    return found
