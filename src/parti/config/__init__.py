"""One frozen configuration from defaults, a TOML file, the environment and flags; each value knows its origin.

Each name is loaded on first use: every Spark process that reads uses this package to mask its logs, and needs nothing
else of it (37 ms of CPU in each).

Promises: an unknown key, a wrong type and a value out of bounds are refused with the key's name; no secret is shown.

Flow: `load` reads each source -> `sections` checks -> `origin` records where a value came from.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
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

_HOMES: Final = {
    "control": "ControlConfig",
    "deliver": "DeliverSection",
    "load": "LoadedConfig env_name known_keys load_config",
    "origin": "Origin Source",
    "sections": "Config LogFormat LogLevel NatsSection ObserveSection RetrySection",
    "worker": "WorkerConfig",
}
_HOME_OF: Final = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = found
    return found
