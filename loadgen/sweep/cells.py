"""What a sweep runs, and in which order. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from random import Random

from draftgate.loadgen.planning.plan import Load


@dataclass(frozen=True, slots=True)
class Contender:
    """What is compared: a server, asked in one way.

    Attributes:
        speculation: requested `MODE` or `MODE:K`; None leaves it to the server.
    """

    name: str
    url: str
    speculation: str | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a sweep.

    Attributes:
        round: from 1.
    """

    contender: Contender
    rate_rps: float
    round: int

    @property
    def stem(self) -> str:
        """Its file's name: contender, rate, round."""
        name = self.contender.name.replace(":", "-").replace("/", "-")
        return f"{name}-{self.rate_rps:g}-{self.round}"

    def load(self, base: Load) -> Load:
        """Return its load.

        All contenders are asked the same at one rate in one round; else something else, so that
        none finds a prompt in its cache that it saw in a cell before.
        """
        return replace(
            base,
            rate_rps=self.rate_rps,
            speculation=self.contender.speculation,
            seed=Random(f"{base.seed} {self.round} {self.rate_rps:g}").getrandbits(31),
        )


def contenders(servers: Sequence[str], modes: Sequence[str] = ()) -> list[Contender]:
    """Return each server (`URL` or `NAME=URL`) with each mode of speculation, by unique names.

    Raises:
        ValueError: two have one name.
    """
    named = []
    for number, text in enumerate(servers, 1):
        name, said, url = text.partition("=")
        if not said or "://" in name:
            name, url = ("" if len(servers) == 1 else f"server-{number}"), text
        named.append((name, url.rstrip("/")))
    found = []
    for (name, url), mode in product(named, modes or [""]):
        parts = [name, mode if len(modes) > 1 or not name else ""]
        label = "-".join(filter(None, parts)) or "server"
        found.append(Contender(label, url, mode or None))
    if len({contender.name for contender in found}) < len(found):
        raise ValueError(f"two servers, or modes, have one name: {', '.join(servers)}")
    return found


def numbers(text: str) -> list[float]:
    """Return the positive numbers of a list with commas, ascending.

    Raises:
        ValueError: it is no such list.
    """
    try:
        rates = sorted({float(part) for part in text.split(",")})
    except ValueError:
        rates = [0.0]
    if not 0 < rates[0] <= rates[-1] < float("inf"):
        raise ValueError(f"rates are positive numbers with commas between them, not {text!r}")
    return rates


def in_order(
    whom: Sequence[Contender], rates: Sequence[float], rounds: int, seed: int
) -> list[Cell]:
    """Return all cells, round by round, each round in an order of its own.

    What drifts with time (the machine's heat, its neighbours) so hits all of them alike.
    """
    cells = list[Cell]()
    for number in range(1, rounds + 1):
        these = [Cell(contender, rate, number) for contender, rate in product(whom, rates)]
        Random(f"{seed} {number}").shuffle(these)
        cells += these
    return cells
