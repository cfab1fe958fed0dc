"""Settings: their declarations (`schema`), and how they are read (`reading`)."""

from draftgate.gateway.config.reading import (
    ConfigError,
    EffectiveConfig,
    Setting,
    effective_config,
    settings,
)
from draftgate.gateway.config.schema import ServeConfig

__all__ = [
    "ConfigError",
    "EffectiveConfig",
    "ServeConfig",
    "Setting",
    "effective_config",
    "settings",
]
