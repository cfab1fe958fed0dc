"""Upper bounds of the buckets of histograms."""

from __future__ import annotations

from typing import Final

TTFT_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
    7.5, 10.0, 20.0, 40.0,
)  # fmt: skip
"""The bounds of the GenAI conventions, with additional bounds between and above them."""

TPOT_S: Final = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15,
    0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
)  # fmt: skip
"""The bounds of the GenAI conventions, with finer bounds below 10 ms for usual SLOs."""

DURATION_S: Final = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84,
)  # fmt: skip
"""The bounds of the GenAI conventions, with one more above them."""

PHASE_S: Final = (0.001, 0.0025, 0.005, *DURATION_S)

TENANT_S: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
"""Few bounds, because each tenant has its own buckets."""

LENGTHS: Final = (
    1.0, 4.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0,
    32768.0, 65536.0, 131072.0,
)  # fmt: skip

SHARES: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.5)
