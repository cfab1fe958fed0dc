"""Settings: what there is to set (`schema`), and what is in force (`reading`)."""

from draftgate.gateway.config.reading import (
    ConfigError,
    EffectiveConfig,
    Setting,
    effective_config,
    load_config,
    settings,
)
from draftgate.gateway.config.schema import ServeConfig

__all__ = [
    "ConfigError",
    "EffectiveConfig",
    "ServeConfig",
    "Setting",
    "effective_config",
    "load_config",
    "settings",
]
