"""Formats and patterns of strings in JSON schemas, in the forms that llguidance supports.

`format` is an annotation in JSON Schema 2020-12, so an unknown format has no effect. A known format
is enforced.
"""

from __future__ import annotations

import re
from typing import Any, Final

from draftgate.backends.schema_probe import schema_refusal

_ENFORCED: Final = frozenset(
    {"time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "date", "date-time"}
)
"""The formats of llguidance."""

_LEAP_DAY: Final = (
    r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29"
)
_YEAR: Final = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DATE: Final = (
    rf"(?:{_LEAP_DAY}|{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8])))"
)
_TIME: Final = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
    r"(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_HEX: Final = "[0-9a-fA-F]"
_BASE64: Final = "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"


def _uuid(version: str, variant: str = "[89abAB]") -> str:
    return f"^{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-{variant}{_HEX}{{3}}-{_HEX}{{12}}$"


_PATTERNS: Final[dict[str, str]] = {
    "date": f"^{_DATE}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}$",
    "time": f"^{_TIME}$",
    "uuid": _uuid(_HEX, _HEX),
    **{f"uuid{version}": _uuid(str(version)) for version in range(1, 9)},
    "base64": _BASE64,
    "byte": _BASE64,
    "base64url": "^(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-]{2}==|[A-Za-z0-9_-]{3}=)?$",
}
"""Patterns of formats that llguidance does not know, or whose days do not depend on the year."""

_DOUBTFUL: Final = re.compile(r"\(\?[=!<]|\\[bB1-9k]")
"""Parts of a pattern that llguidance does not support."""


def with_known_strings(schema: dict[str, Any], *, strict: bool | None) -> dict[str, Any]:
    """Return a schema whose format and pattern llguidance supports, as far as possible.

    Args:
        strict: whether the client wants exact enforcement. If it is False, a pattern without
            support is dropped.
    """
    form, pattern = schema.get("format"), schema.get("pattern")
    if isinstance(form, str) and pattern is None:
        return _with_format(schema, form)
    if not isinstance(pattern, str) or not isinstance(form, str | None):
        return schema
    schema = _without_lookahead(schema, pattern)
    pattern = schema.get("pattern", "")
    if form is None and not _DOUBTFUL.search(pattern):
        return schema
    text: dict[str, Any] = {"type": "string"}
    text |= {key: value for key, value in schema.items() if key in {"minLength", "maxLength"}}
    known = form in _ENFORCED
    if known and not schema_refusal(text | {"pattern": pattern, "format": form}):
        return schema
    without_format = {key: value for key, value in schema.items() if key != "format"}
    if not schema_refusal(text | {"pattern": pattern}):
        return without_format  # the pattern is an assertion, and the format is not
    if form is not None and (known or form in _PATTERNS):
        return _with_format(_without(schema, "pattern"), form)
    return _without(without_format, "pattern") if strict is False else without_format


def key_pattern(names: dict[str, Any]) -> str | None:
    """Return a pattern for the same names as a schema of `propertyNames`, or None without one."""
    if "pattern" in names and set(names) <= {"pattern", "format"}:
        return str(names["pattern"])
    if set(names) == {"format"}:
        return _PATTERNS.get(names["format"])
    if set(names) <= {"minLength", "maxLength"}:
        return rf"^[\s\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    return None


def _with_format(schema: dict[str, Any], form: str) -> dict[str, Any]:
    """Return a schema with its format in a form that llguidance supports."""
    if form in _PATTERNS:
        # In the place of the format, because llguidance reads keywords in their order.
        names = ["pattern" if key == "format" else key for key in schema]
        return dict(zip(names, schema.values(), strict=True)) | {"pattern": _PATTERNS[form]}
    return schema if form in _ENFORCED else _without(schema, "format")


def _without(schema: dict[str, Any], keyword: str) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != keyword}


def _without_lookahead(schema: dict[str, Any], pattern: str) -> dict[str, Any]:
    """Replace positive look-ahead at the start of a pattern, which is a second pattern."""
    found = list[str]()
    while pattern.startswith("^(?=") and (end := _group_end(pattern, 1)):
        found.append("^(?:" + pattern[4:end])
        pattern = "^" + pattern[end:]
    # An alternative at the top level would not belong to the look-ahead.
    if not found or schema_refusal({"type": "string", "pattern": pattern}) or _splits(pattern):
        return schema
    parts = [{"pattern": one} for one in found]
    return {**schema, "pattern": pattern, "allOf": [*schema.get("allOf", ()), *parts]}


def _group_end(pattern: str, begin: int) -> int:
    """Return the end of the group that begins at an index, or 0 if it has none."""
    depth, in_class, escaped = 0, False, False
    for i, char in enumerate(pattern[begin:], begin):
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
            if not depth:
                return i + 1
    return 0


def _splits(pattern: str) -> bool:
    """Return whether a pattern is an alternative at its top level."""
    rest, at = "", 0
    while at < len(pattern):
        end = _group_end(pattern, at) if pattern[at] == "(" else 0
        rest += "" if end else pattern[at]
        at = end or at + 1
    return "|" in rest
