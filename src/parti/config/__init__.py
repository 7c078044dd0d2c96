"""One frozen configuration from defaults, a TOML file, the environment and flags, each value with its origin."""

from parti.config.control import ControlConfig
from parti.config.deliver import DeliverSection
from parti.config.load import LoadedConfig, env_name, known_keys, load_config
from parti.config.origin import Origin, Source
from parti.config.sections import Config, LogFormat, LogLevel, NatsSection, ObserveSection, RetrySection
from parti.config.worker import WorkerConfig

__all__ = [
    "Config",
    "ControlConfig",
    "DeliverSection",
    "LoadedConfig",
    "LogFormat",
    "LogLevel",
    "NatsSection",
    "ObserveSection",
    "Origin",
    "RetrySection",
    "Source",
    "WorkerConfig",
    "env_name",
    "known_keys",
    "load_config",
]
