"""The flags that every command with a configuration shares: --config, --set, --server and --context."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import click
import msgspec

from parti.config import LoadedConfig, LogLevel, load_config
from parti.errors import ConfigError
from parti.observe.logs import configure_logging


def with_config(command: Callable[..., None]) -> Callable[..., None]:
    """Give the command a `loaded: LoadedConfig` built from the flags."""

    @click.option("--config", "config_file", type=click.Path(), metavar="FILE", help="Configuration file (TOML).")
    @click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Set one value, such as nats.user=me.")
    @click.option("-s", "--server", metavar="URL", help="NATS server urls, separated by commas.")
    @click.option("--context", metavar="NAME", help="Context of the `nats` CLI.")
    @wraps(command)
    def wrapper(
        config_file: str | None,
        settings: tuple[str, ...],
        server: str | None,
        context: str | None,
        **kwargs: Any,
    ) -> None:
        flags = _flags(settings)
        if server is not None:
            flags["nats.servers"] = server
        if context is not None:
            flags["nats.context"] = context
        loaded: LoadedConfig = load_config(config_file, flags=flags)
        command(loaded=loaded, **kwargs)

    return wrapper


def log_quietly(loaded: LoadedConfig) -> None:
    """Logging for a command that answers and ends: warnings only, unless a level is configured."""
    settings = loaded.config.observe
    if "log_level" not in loaded.explicit("observe"):
        settings = msgspec.structs.replace(settings, log_level=LogLevel.WARNING)
    configure_logging(settings)


def _flags(settings: tuple[str, ...]) -> dict[str, object]:
    flags: dict[str, object] = {}
    for setting in settings:
        name, separator, value = setting.partition("=")
        if not separator:
            # The text may be a mistyped secret: the error shows the form, not the value.
            raise ConfigError("--set takes KEY=VALUE, such as --set retry.retry_base=500ms")
        flags[name.strip()] = value
    return flags
