"""Settings, with their declarations (`schema`) and the code that reads them (`reading`)."""

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
