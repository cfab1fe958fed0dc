"""The settings in force, as `draftgate config show` tells them."""

from __future__ import annotations

import json

from draftgate.gateway.config import EffectiveConfig, settings


def as_lines(effective: EffectiveConfig) -> str:
    """Return a line for each setting: name, value, origin. Secrets are masked."""
    width = max(map(len, effective.origins))
    return "\n".join(
        f"{setting.name:{width}} = {setting.shown(getattr(effective.config, setting.name)):24} "
        f"({effective.origins[setting.name]})"
        for setting in settings()
    )


def as_json_text(effective: EffectiveConfig) -> str:
    """Return the same as JSON: `{NAME: {"value": ..., "origin": ...}}`."""
    found = {
        setting.name: {
            "value": setting.public(getattr(effective.config, setting.name)),
            "origin": effective.origins[setting.name],
        }
        for setting in settings()
    }
    return json.dumps(found, indent=2)
