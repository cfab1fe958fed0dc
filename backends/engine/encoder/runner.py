"""Runs a step of whole texts on the device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import torch

from draftgate.backends.core.steps import StepPlan, StepResult
from draftgate.backends.engine.encoder.model import Encoder
from draftgate.backends.engine.encoder.sentence import SentenceModules
from draftgate.backends.engine.pooling import pooled_bytes


class EncoderRunner:
    """Runs the steps of an encoder. Only one thread may use a runner."""

    launcher: Final = None

    def __init__(self, encoder: Encoder, modules: SentenceModules) -> None:
        self.encoder = encoder
        self._modules = modules

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the texts of a step, each of which is a whole entry of `plan.work`."""
        started_s = time.perf_counter()
        texts = [work.token_ids for work in plan.work]
        segments = [work.sequence.request.second_segment for work in plan.work]
        pooled = self.pooled(texts, segments)
        nothing: list[tuple[()]] = [()] * len(plan.work)
        return StepResult(nothing, nothing, nothing, time.perf_counter() - started_s, pooled)

    @torch.inference_mode()
    def pooled(
        self, texts: Sequence[Sequence[int]], second_segments: Sequence[int] = ()
    ) -> list[bytes]:
        """Return the result of each text (`Delta.pooled`), as little-endian float32.

        Args:
            second_segments: as for `Encoder.hidden`.
        """
        states = self.encoder.hidden(texts, second_segments)
        pooled = torch.stack([self._modules.pool(each) for each in states])
        return pooled_bytes(pooled.cpu()) or []
