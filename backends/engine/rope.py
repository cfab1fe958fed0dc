"""Rotary position embeddings, and the context extensions of published models."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Divides positions by `factor` (position interpolation, arXiv 2306.15595)."""

    factor: float

    def frequencies(self, plain: Tensor, _theta: float) -> Tensor:
        """Return the scaled frequencies, [head_dim / 2]."""
        return plain / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """The scaling of Llama 3.1: stretches long waves, keeps short waves, and blends the others.

    Attributes:
        factor: factor that stretches long waves.
        low_freq_factor: waves with fewer turns in the original context are long.
        high_freq_factor: waves with more turns in the original context are short.
        original_positions: context length of the original training, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int

    def frequencies(self, plain: Tensor, _theta: float) -> Tensor:
        """Return the scaled frequencies, [head_dim / 2]."""
        turns = self.original_positions * plain / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return _blend(plain / self.factor, plain, kept)


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """The scaling of YaRN (arXiv 2309.00071): a ramp over dimensions, not over frequencies.

    Attributes:
        factor: factor that stretches long waves.
        beta_fast: the scaling keeps waves with more turns in the original context.
        beta_slow: the scaling fully stretches waves with fewer turns in the original context.
        attention_factor: factor on cosines and sines, which softens attention.
        truncate: whether the ramp begins and ends at whole dimensions.
        original_positions: context length of the original training, in tokens.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool
    original_positions: int

    def frequencies(self, plain: Tensor, theta: float) -> Tensor:
        """Return the scaled frequencies, [head_dim / 2]."""
        half = len(plain)
        low = self._dimension(self.beta_fast, half, theta)
        high = self._dimension(self.beta_slow, half, theta)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * half - 1)
        # A ramp of length 0 would divide by zero.
        width = high - low or 0.001
        kept = 1 - (torch.arange(half, dtype=torch.float32) - low) / width
        return _blend(plain / self.factor, plain, kept)

    def _dimension(self, turns: float, half: int, theta: float) -> float:
        """Return the dimension whose wave makes `turns` turns in the original context."""
        positions_per_radian = self.original_positions / (turns * 2 * math.pi)
        return half * math.log(positions_per_radian) / math.log(theta)


def yarn_attention_factor(
    factor: float, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """Return the attention factor of a YaRN checkpoint that does not specify it.

    The factor is 0.1 ln(factor) + 1 (arXiv 2309.00071, section 3.4). With both `mscale` values, the
    result is the ratio of two such terms. Each value then multiplies the logarithm of its term.
    """

    def softening(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    if mscale and mscale_all_dim:
        return softening(mscale) / softening(mscale_all_dim)
    return softening(1.0)


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """The scaling of LongRoPE (arXiv 2402.13753): a factor per wave, for short or long contexts.

    A context has one set of factors from its first token on, because cached keys keep their
    rotation. The longest context that a worker serves therefore decides for all its contexts, as in
    vLLM. `transformers` rotates short texts with the short factors and long ones with the long
    factors, also within one generation.

    Attributes:
        short_factors: factors of a worker whose contexts fit in the original context.
        long_factors: factors of any other worker.
        attention_factor: factor on cosines and sines.
        original_positions: context length of the original training, in tokens.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    attention_factor: float
    original_positions: int

    def is_long(self, positions: int) -> bool:
        """Return whether a worker of contexts up to `positions` tokens uses the long factors."""
        return positions > self.original_positions

    def frequencies(self, plain: Tensor, positions: int) -> Tensor:
        """Return the scaled frequencies, [rotated dimensions / 2]."""
        long = self.is_long(positions)
        return plain / torch.tensor(self.long_factors if long else self.short_factors)


def longrope_attention_factor(factor: float, original_positions: int) -> float:
    """Return the attention factor of a LongRoPE checkpoint that does not specify it.

    Args:
        factor: the longest context divided by the original context.
        original_positions: context length of the original training, in tokens.
    """
    return math.sqrt(1 + math.log(factor) / math.log(original_positions)) if factor > 1 else 1.0


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation of queries and keys by their position (RoPE, arXiv 2104.09864).

    Attributes:
        theta: base of the wavelengths.
        scaling: the extension of the context, or None.
        share: share of a head's dimensions that rotate, the first ones.
    """

    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | None = None
    share: float = 1.0

    def rotated(self, head_dim: int) -> int:
        """Return the number of dimensions of a head that rotate."""
        return int(head_dim * self.share)

    def tables(self, head_dim: int, positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of all positions, [positions, rotated dimensions / 2] each."""
        width = self.rotated(head_dim)
        exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
        frequencies = 1.0 / self.theta**exponents
        scale = 1.0
        if isinstance(self.scaling, LongRopeScaling):
            frequencies = self.scaling.frequencies(frequencies, positions)
        elif self.scaling is not None:
            frequencies = self.scaling.frequencies(frequencies, self.theta)
        if isinstance(self.scaling, YarnScaling | LongRopeScaling):
            scale = self.scaling.attention_factor
        angles = torch.outer(torch.arange(positions).float(), frequencies)
        return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)

    def variant(self, positions: int) -> str | None:
        """Return the part of the numerics class that `positions` decides, or None."""
        if not isinstance(self.scaling, LongRopeScaling):
            return None
        return "longrope-long" if self.scaling.is_long(positions) else "longrope-short"


def _blend(stretched: Tensor, plain: Tensor, kept: Tensor) -> Tensor:
    """Return `plain` where `kept` is at least 1, `stretched` where it is at most 0, else a mix."""
    return torch.lerp(stretched, plain, kept.clamp(0, 1))
