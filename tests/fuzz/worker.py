"""The process that fuzzes one target with Atheris: python -m tests.fuzz.worker MODULE TARGET ...

Flags of libFuzzer follow. Its coverage of the Python code guides the mutations.
"""

from __future__ import annotations

import sys
from importlib import import_module
from random import Random

import atheris

INSTRUMENTED = ["draftgate", "prometheus_client", "yaml"]
"""Packages whose branches count as coverage."""

with atheris.instrument_imports(include=INSTRUMENTED):
    TARGETS = import_module(sys.argv[1]).TARGETS
    from tests.fuzz.mutation import mutated


def main() -> None:
    """Fuzz until libFuzzer ends."""
    (target,) = (each for each in TARGETS if each.name == sys.argv[2])

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        random = Random(seed)
        found = mutated(target.form, data, random) if random.random() < 0.7 else None
        if found is None or len(found) > max_size:
            return atheris.Mutate(data, max_size)
        return found

    arguments = [sys.argv[0], *sys.argv[3:]]
    atheris.Setup(arguments, target.run, custom_mutator=mutate)
    atheris.Fuzz()


main()
