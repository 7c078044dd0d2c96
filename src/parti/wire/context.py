"""The environment variables and context files of the `nats` CLI, so that parti connects to the same servers.

Precedence, highest first, field by field:

1. what the caller gave (flags, config, Spark options),
2. the environment: NATS_URL, NATS_USER, NATS_PASSWORD, NATS_TOKEN, NATS_CREDS, NATS_NKEY, NATS_CERT, NATS_KEY,
   NATS_CA, NATS_TIMEOUT (NATS_USER without NATS_PASSWORD is a token, as there),
3. a context file: the one NATS_CONTEXT names, else the one selected by `nats context select`,
4. the defaults of `ConnectOptions`.

Credentials are taken as a whole from the highest level that has any. The *selected* context is ignored when the caller
names the servers: its secrets belong to other servers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parti.errors import ConfigError
from parti.wire.address import UrlSecrets, parse_servers
from parti.wire.options import AUTH_FIELDS, parse_mapping

_ENVIRONMENT = {
    "NATS_URL": "servers",
    "NATS_USER": "user",
    "NATS_PASSWORD": "password",
    "NATS_TOKEN": "token",
    "NATS_CREDS": "creds_file",
    "NATS_NKEY": "nkey_file",
    "NATS_CERT": "tls_cert",
    "NATS_KEY": "tls_key",
    "NATS_CA": "tls_ca",
    "NATS_TIMEOUT": "request_timeout",
}
_CONTEXT = {
    "url": "servers",
    "user": "user",
    "password": "password",
    "token": "token",
    "creds": "creds_file",
    "nkey": "nkey_file",
    "cert": "tls_cert",
    "key": "tls_key",
    "ca": "tls_ca",
    "tls_first": "tls_first",
    "jetstream_domain": "domain",
    "jetstream_api_prefix": "api_prefix",
    "inbox_prefix": "inbox_prefix",
}
_CONTEXT_PATHS = ("creds", "nkey", "cert", "key", "ca")
# Ignoring these would connect without the proxy or the identity that the user configured.
_CONTEXT_UNSUPPORTED = ("nsc", "socks_proxy", "user_jwt", "windows_cert_store")


def resolve_settings(explicit: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, Any]:
    """The fields of `ConnectOptions` that any level sets, by the precedence of this module."""
    levels = [dict(explicit), environment_settings(env)]
    context = env.get("NATS_CONTEXT") or ("" if "servers" in explicit else selected_context(env))
    if context:
        levels.append(context_settings(context, env))
    merged: dict[str, Any] = {}
    authenticated = False
    for level in levels:
        auth = _auth_of(level)
        for field, value in level.items():
            if field in AUTH_FIELDS:
                continue
            if field in ("domain", "api_prefix") and ("domain" in merged or "api_prefix" in merged):
                continue
            if field == "servers":
                # Credentials inside a url count as credentials of its level; `auth` holds them.
                value = tuple(address.url for address in parse_servers(value)[0])
            merged.setdefault(field, value)
        if auth and not authenticated:
            merged |= auth
            authenticated = True
    return merged


def environment_settings(env: Mapping[str, str]) -> dict[str, Any]:
    """The settings in the environment, under the names of the `nats` CLI."""
    named = {field: env[name] for name, field in _ENVIRONMENT.items() if env.get(name)}
    if "user" in named and "password" not in named:
        named.setdefault("token", named["user"])
        del named["user"]
    return parse_mapping(named)


def selected_context(env: Mapping[str, str]) -> str:
    """The name chosen by `nats context select`, empty when there is none."""
    try:
        return (_config_dir(env) / "context.txt").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""


def context_settings(name: str, env: Mapping[str, str]) -> dict[str, Any]:
    """The settings in the context file `name`; a context that needs an unsupported feature is refused."""
    if ".." in name or "/" in name or os.sep in name:
        raise ConfigError(f"{name!r} is no context name: NATS_CONTEXT takes a name, not a path")
    path = _config_dir(env) / "context" / f"{name}.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"the NATS context {name!r} does not exist: `nats context ls` lists those that do") from None
    except (OSError, ValueError) as error:
        # The decoder's own message may quote the file, which holds secrets.
        raise ConfigError(f"the NATS context {name!r} cannot be read: {type(error).__name__}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"the NATS context {name!r} is no JSON object")
    for unsupported in _CONTEXT_UNSUPPORTED:
        if content.get(unsupported):
            raise ConfigError(f"the NATS context {name!r} sets {unsupported!r}, which parti does not support")
    for label in _CONTEXT_PATHS:
        if content.get(label):
            content[label] = os.path.expanduser(os.path.expandvars(str(content[label])))
    return parse_mapping({field: content[label] for label, field in _CONTEXT.items() if content.get(label)})


def _auth_of(level: Mapping[str, Any]) -> dict[str, Any]:
    """The credentials of one level, whether given as fields or inside its urls."""
    auth = {field: level[field] for field in AUTH_FIELDS if level.get(field)}
    if "servers" in level:
        found = parse_servers(level["servers"])[1]
        if found != UrlSecrets():
            inside = {"user": found.user, "password": found.password, "token": found.token}
            auth = {field: value for field, value in inside.items() if value is not None} | auth
    return auth


def _config_dir(env: Mapping[str, str]) -> Path:
    parent = env.get("XDG_CONFIG_HOME")
    return (Path(parent) if parent else Path(env.get("HOME") or "~").expanduser() / ".config") / "nats"
