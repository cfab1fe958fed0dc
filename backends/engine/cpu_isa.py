"""The instruction set of CPU code: the machine's best, or a lower one from `DRAFTGATE_CPU_ISA`.

The variable limits torch, oneDNN, MKL and the compiled operators alike, so that any machine can
test a lower instruction set. This module does not import torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

VARIABLE: Final = "DRAFTGATE_CPU_ISA"


@dataclass(frozen=True, slots=True)
class Isa:
    """The settings for an instruction set: variables of the libraries, and gcc's `-march`."""

    onednn: str
    aten: str
    mkl: str
    march: str


ISAS: Final = {
    "sse4": Isa("SSE41", "default", "SSE4_2", "x86-64-v2"),
    "avx2": Isa("AVX2", "avx2", "AVX2", "x86-64-v3"),
    "avx512": Isa("AVX512_CORE_BF16", "avx512", "AVX512", "x86-64-v4"),
}
"""Instruction sets by their names in `DRAFTGATE_CPU_ISA`. No instruction set includes AMX."""


def isa_variables(name: str) -> dict[str, str]:
    """Return the environment variables that limit a process to an instruction set of `ISAS`."""
    isa = ISAS[name]
    return {
        VARIABLE: name,
        "ONEDNN_MAX_CPU_ISA": isa.onednn,
        "ATEN_CPU_CAPABILITY": isa.aten,
        "MKL_ENABLE_INSTRUCTIONS": isa.mkl,
    }


def limit_cpu_isa() -> None:
    """Set the variables that the libraries read at their first use.

    `requested_isa` reports an unknown name, which this function ignores.
    """
    name = os.environ.get(VARIABLE, "")
    if name in ISAS:
        os.environ.update(isa_variables(name))


def requested_isa() -> str | None:
    """Return the instruction set that `DRAFTGATE_CPU_ISA` names, or None for the machine's best.

    Raises:
        ValueError: the name is unknown.
    """
    name = os.environ.get(VARIABLE) or None
    if name is not None and name not in ISAS:
        raise ValueError(f"{VARIABLE}={name!r} is unknown; known: {', '.join(ISAS)}")
    return name


def march() -> str:
    """Return the `-march` of compiled operators."""
    isa = ISAS.get(os.environ.get(VARIABLE, ""))
    return "native" if isa is None else isa.march
