"""Connection options, each field with its origin, and the backoff, from the loaded configuration.

Precedence, highest first: flags and PARTI_NATS__* variables, the variables of the `nats` CLI (NATS_URL ...), the
[nats] table of the configuration file, the `nats` CLI's context, the defaults. Credentials are taken as a whole from
the highest of these that has any.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from parti.backoff import Backoff
from parti.config.load import LoadedConfig
from parti.config.origin import DEFAULT, Origin, Source
from parti.wire.context import context_settings, environment_settings, selected_context
from parti.wire.options import AUTH_FIELDS, ConnectOptions


@dataclass(frozen=True, slots=True)
class ConfiguredOptions:
    """Ready options, and where each field's value came from."""

    options: ConnectOptions
    origins: Mapping[str, Origin]
    context: str
    """Name of the context that was read, empty when none was."""


def configured_options(loaded: LoadedConfig, environ: Mapping[str, str] | None = None) -> ConfiguredOptions:
    """The options that result from the configuration, the environment and the context."""
    env = dict(os.environ if environ is None else environ)
    from_config = loaded.explicit("nats")
    named_context = from_config.pop("context", "")
    from_env = environment_settings(env)
    explicit = {
        name: value
        for name, value in from_config.items()
        if loaded.origins[f"nats.{name}"].source is not Source.FILE or not _overridden(name, from_env)
    }
    if named_context:
        env["NATS_CONTEXT"] = named_context
    options = ConnectOptions.resolve(explicit, env)
    context = env.get("NATS_CONTEXT") or ("" if "servers" in explicit else selected_context(env))
    from_context = context_settings(context, env) if context else {}
    variables = _variables(env)

    def origin(name: str) -> Origin:
        if name in AUTH_FIELDS and getattr(options, name) is None:
            return DEFAULT  # a lower level may set it, but all credentials come from one level
        if name in explicit:
            return loaded.origins[f"nats.{name}"]
        if name in from_env:
            return Origin(Source.ENV, variables.get(name, "NATS_USER"))
        if name in from_context:
            return Origin(Source.CONTEXT, context)
        if getattr(options, name) == ConnectOptions.__dataclass_fields__[name].default:
            return DEFAULT
        # The only value without an explicit origin: credentials inside a server url.
        return origin("servers")

    return ConfiguredOptions(options, {field.name: origin(field.name) for field in fields(options)}, context)


def configured_backoff(loaded: LoadedConfig) -> Backoff:
    """The waits between retries of a control-plane call, from [retry]."""
    retry = loaded.config.retry
    return Backoff(retry.retry_base, retry.retry_multiplier, retry.retry_max, retry.max_control_retries)


def _overridden(name: str, from_env: Mapping[str, Any]) -> bool:
    if name in AUTH_FIELDS:
        return any(field in from_env for field in AUTH_FIELDS)
    return name in from_env


def _variables(env: Mapping[str, str]) -> dict[str, str]:
    """Which variable of the `nats` CLI sets which field, found by resolving each variable alone."""
    found: dict[str, str] = {}
    for name in sorted(env):
        if name.startswith("NATS_"):
            for field in environment_settings({name: env[name]}):
                found.setdefault(field, name)
    return found
