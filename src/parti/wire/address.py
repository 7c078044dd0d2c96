"""Server addresses: urls as the `nats` CLI accepts them, with every secret removed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from parti.errors import ConfigError

DEFAULT_PORT = 4222
_SCHEMES = {"nats": False, "tls": True}


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where one server listens; safe to print, it holds no secret."""

    host: str
    port: int
    tls: bool
    """True when the url's scheme is tls://: the connection must be encrypted, whatever the server announces."""

    @property
    def url(self) -> str:
        return f"{'tls' if self.tls else 'nats'}://{self}"

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True, repr=False)
class UrlSecrets:
    """The credentials from the user-info part of the urls; without a repr, because all of it may be secret."""

    user: str | None = None
    password: str | None = None
    token: str | None = None


def parse_servers(servers: str | Iterable[str]) -> tuple[tuple[ServerAddress, ...], UrlSecrets]:
    """The addresses of `servers` in order, and the credentials that they contained.

    A text may hold several urls separated by commas; `host`, `host:port` and both schemes nats:// and tls:// are
    accepted. `user:password@` and `token@` are percent-decoded. Different credentials in one list are refused.
    """
    texts = [servers] if isinstance(servers, str) else list(servers)
    parts = [part.strip() for text in texts for part in text.split(",") if part.strip()]
    if not parts:
        raise ConfigError("no server address: give at least one, such as nats://127.0.0.1:4222")
    parsed = [_parse_one(part, position) for position, part in enumerate(parts, start=1)]
    found = {secrets for _, secrets in parsed if secrets != UrlSecrets()}
    if len(found) > 1:
        raise ConfigError(
            "the server urls carry different credentials: give one user, password or token for all of them"
        )
    return tuple(address for address, _ in parsed), next(iter(found), UrlSecrets())


def _parse_one(text: str, position: int) -> tuple[ServerAddress, UrlSecrets]:
    # The text may contain a password, so errors name the position of the url and never quote it.
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "nats", text
    if scheme.lower() not in _SCHEMES:
        raise ConfigError(f"server url {position} has the scheme {scheme!r}: use nats:// or tls://")
    user_info, _, host_port = rest.rpartition("@")
    try:
        split = urlsplit(f"//{host_port}")
        host, port = split.hostname, split.port
    except ValueError as error:
        raise ConfigError(f"server url {position} is malformed: write it as nats://host:port") from error
    if not host or split.path not in ("", "/") or split.query or split.fragment:
        raise ConfigError(f"server url {position} is malformed: write it as nats://host:port")
    address = ServerAddress(host, DEFAULT_PORT if port is None else port, _SCHEMES[scheme.lower()])
    if not user_info:
        return address, UrlSecrets()
    user, colon, password = user_info.partition(":")
    if not colon:
        return address, UrlSecrets(token=unquote(user))
    return address, UrlSecrets(user=unquote(user), password=unquote(password))
