"""Settings: what there is to set (`schema`), and what is in force (`reading`)."""

from gateway.config.reading import (
    ConfigError,
    EffectiveConfig,
    Setting,
    effective_config,
    load_config,
    settings,
)
from gateway.config.schema import ServeConfig

__all__ = [
    "ConfigError",
    "EffectiveConfig",
    "ServeConfig",
    "Setting",
    "effective_config",
    "load_config",
    "settings",
]
