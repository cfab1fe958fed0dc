"""Print a table of recordings by task and temperature, for their card.

    python -m bench.simulation.recordings NAME ...

A row has the numbers of texts and positions in the tuning half and in the held-out half. For each
proposer it has the share of positions with a draft, and the mean number of right tokens per
position. These two figures are those of the tuning half, because the held-out half is for tests.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from statistics import fmean
from typing import Final

from draftgate.backends.recording import Text
from draftgate.lab.sim.recording import load_recording

PROPOSERS: Final = ("ngram", "grammar", "prediction", "sparse_self")


def table(name: str) -> Iterator[str]:
    """Yield the lines of a recording's table."""
    yield "| task | temperature | texts | positions | " + " | ".join(PROPOSERS) + " |"
    yield "| --- | --- | --- | --- | " + " | ".join("---" for _ in PROPOSERS) + " |"
    cells: dict[tuple[str, float], list[Text]] = {}
    for text in load_recording(name).all_texts:
        cells.setdefault((text.task, text.temperature), []).append(text)
    everything = [text for texts in cells.values() for text in texts]
    for (task, temperature), texts in sorted(cells.items()):
        yield _row(task, f"{temperature:g}", texts)
    yield _row("all", "", everything)


def _row(task: str, temperature: str, texts: list[Text]) -> str:
    halves = [[text for text in texts if text.held_out == half] for half in (False, True)]
    counts = " + ".join(str(len(half)) for half in halves)
    positions = " + ".join(f"{sum(text.length for text in half):,}" for half in halves)
    figures = [_figures(halves[0], proposer) for proposer in PROPOSERS]
    return "| " + " | ".join([task, temperature, counts, positions, *figures]) + " |"


def _figures(texts: list[Text], proposer: str) -> str:
    """Return the share of positions with a draft, and the right tokens per position."""
    guesses = [
        text.guess(proposer, at)
        for text in texts
        if proposer in text.drafts
        for at in range(text.length)
    ]
    if not guesses:
        return ""
    drafted = fmean(guess.proposed > 0 for guess in guesses)
    return f"{drafted:.2f}, {fmean(guess.agreed for guess in guesses):.2f}"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", metavar="NAME")
    for name in parser.parse_args().names:
        print(f"### {name}\n", *table(name), "", sep="\n")


if __name__ == "__main__":
    main()
