"""Speculation policies: `auto`, the baselines it is held against, and what they share.

Each is a value that decides for a request at the gateway (`decide`), and for a step in the worker
(`least_survival`, `draft_lengths`).
"""

from draftgate.policies.speculation.adaptive import AdaptiveVerification
from draftgate.policies.speculation.auto import Auto
from draftgate.policies.speculation.fixed import MOST_FIXED, Fixed, Off
from draftgate.policies.speculation.planning import MAX_DRAFT_TOKENS
from draftgate.policies.speculation.smartspec import SmartSpec
from draftgate.policies.speculation.threshold import ThresholdByBatch

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
