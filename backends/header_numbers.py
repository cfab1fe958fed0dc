"""Numbers in the headers of HTTP messages and in queries.

`float` and `int` accept much more than other programs do: signs, spaces, underscores, exponents,
`inf`, `nan` and the digits of all scripts. A proxy may read such a header differently, so all
headers with numbers are read here.
"""

from __future__ import annotations

import re
from typing import Final

MOST_DIGITS: Final = 15
"""Maximum digits before the point. A float holds every whole number of 15 digits."""

MOST_DECIMALS: Final = 30
"""Maximum digits after the point. Programs write a float with up to 21, such as
0.00030000000000000003."""

_COUNT: Final = re.compile(rf"[0-9]{{1,{MOST_DIGITS}}}")
_NUMBER: Final = re.compile(rf"[0-9]{{1,{MOST_DIGITS}}}(\.[0-9]{{1,{MOST_DECIMALS}}})?")


def header_count(text: str) -> int | None:
    """Return a whole number, 0 or more, or None if the text is not one."""
    return int(text) if _COUNT.fullmatch(text) else None


def header_number(text: str) -> float | None:
    """Return a decimal number, 0 or more, or None if the text is not one."""
    return float(text) if _NUMBER.fullmatch(text) else None


def positive_pattern(most_digits: int = MOST_DIGITS) -> str:
    """Return the regular expression of positive numbers, for the description of the API.

    Args:
        most_digits: maximum digits before the point.
    """
    whole = rf"[1-9][0-9]{{0,{most_digits - 1}}}(\.[0-9]{{1,{MOST_DECIMALS}}})?"
    return rf"^({whole}|0\.[0-9]{{0,{MOST_DECIMALS - 1}}}[1-9])$"


def header_text(number: float) -> str:
    """Return a number, 0 or more, as `header_number` reads it, with a millionth as the unit."""
    return f"{number:.6f}".rstrip("0").rstrip(".")
