"""Speculation policies: `auto`, the baselines it is held against, and what they share.

Each is a value that decides for a request at the gateway (`decide`), and for a step in the worker
(`least_survival`, `draft_lengths`).
"""

from policies.speculation.adaptive import AdaptiveVerification
from policies.speculation.auto import Auto
from policies.speculation.fixed import MOST_FIXED, Fixed, Off
from policies.speculation.planning import MAX_DRAFT_TOKENS
from policies.speculation.smartspec import SmartSpec
from policies.speculation.threshold import ThresholdByBatch

__all__ = [
    "MAX_DRAFT_TOKENS",
    "MOST_FIXED",
    "AdaptiveVerification",
    "Auto",
    "Fixed",
    "Off",
    "SmartSpec",
    "ThresholdByBatch",
]
