"""Connection options in one value, shared by the async client, the blocking data connections and Spark tasks."""

from __future__ import annotations

import json
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any

from parti import __version__, defaults
from parti.config.units import parse_duration
from parti.errors import ConfigError
from parti.wire.address import ServerAddress, UrlSecrets, parse_servers
from parti.wire.auth import NkeyIdentity, read_secret_file

DEFAULT_SERVER = defaults.SERVER
_SECRET = frozenset({"password", "token", "nkey_seed", "creds"})
_DURATIONS = frozenset({"connect_timeout", "request_timeout", "reconnect_wait", "ping_interval"})
_INTEGERS = frozenset({"max_reconnects", "max_outstanding_pings"})
_FLAGS = frozenset({"tls_first"})
# The authentication methods; exactly one may be used, and one given by the caller replaces any found elsewhere.
AUTH_FIELDS = ("user", "password", "token", "nkey_seed", "nkey_file", "creds_file", "creds")
_ALIASES = {"url": "servers", "server": "servers"}


@dataclass(frozen=True, slots=True, repr=False)
class ConnectOptions:
    """Everything needed to open a connection; immutable, picklable, and its repr shows no secret.

    Credentials inside a url are moved into `user`, `password` or `token` at once, so `servers` is safe to print.
    """

    servers: tuple[str, ...] = (DEFAULT_SERVER,)
    user: str | None = None
    password: str | None = None
    token: str | None = None
    nkey_seed: str | None = None
    """The seed itself; `nkey_file` names a file with the seed."""
    nkey_file: str | None = None
    creds_file: str | None = None
    creds: str | None = None
    """The content of a credentials file, for machines without the file (Spark executors)."""
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_first: bool = False
    """Encrypt before the server's greeting; needs `handshake_first` on the server."""
    tls_hostname: str | None = None
    """The expected name in the server's certificate, if it is not the host of the url."""
    domain: str | None = None
    api_prefix: str | None = None
    inbox_prefix: str = defaults.INBOX_PREFIX
    name: str = defaults.CONNECTION_NAME
    connect_timeout: float = defaults.CONNECT_TIMEOUT
    request_timeout: float = defaults.REQUEST_TIMEOUT
    max_reconnects: int = defaults.MAX_RECONNECTS
    reconnect_wait: float = defaults.RECONNECT_WAIT
    ping_interval: float = defaults.PING_INTERVAL
    max_outstanding_pings: int = defaults.MAX_OUTSTANDING_PINGS

    def __post_init__(self) -> None:
        addresses, found = parse_servers(self.servers)
        object.__setattr__(self, "servers", tuple(address.url for address in addresses))
        for field, value in (("user", found.user), ("password", found.password), ("token", found.token)):
            if value is not None and found != UrlSecrets():
                if getattr(self, field) not in (None, value):
                    raise ConfigError(f"{field} is given twice, in a server url and as an option: keep one of them")
                object.__setattr__(self, field, value)
        self._check()

    def _check(self) -> None:
        ways = [
            label
            for label, given in (
                ("user", self.user),
                ("token", self.token),
                ("nkey_seed", self.nkey_seed),
                ("nkey_file", self.nkey_file),
                ("creds_file", self.creds_file),
                ("creds", self.creds),
            )
            if given
        ]
        if len(ways) > 1:
            raise ConfigError(f"{' and '.join(ways)} are both given: choose one way to authenticate")
        if self.password and not self.user:
            raise ConfigError("a password is given without a user: add the user")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("tls_cert and tls_key belong together: give both or none")
        if self.domain and self.api_prefix:
            raise ConfigError("domain and api_prefix exclude each other: give one of them")
        for label in ("connect_timeout", "request_timeout", "ping_interval"):
            if getattr(self, label) <= 0:
                raise ConfigError(f"{label} must be positive, not {getattr(self, label)}")
        if self.reconnect_wait < 0:
            raise ConfigError(f"reconnect_wait must not be negative, not {self.reconnect_wait}")
        for label in ("domain", "api_prefix", "inbox_prefix"):
            if re.search(r"[\s*>]", getattr(self, label) or ""):
                raise ConfigError(f"{label} is part of a subject and may hold no blank and no wildcard")

    def __repr__(self) -> str:
        shown = [
            f"{field.name}={'***' if field.name in _SECRET else repr(getattr(self, field.name))}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"ConnectOptions({', '.join(shown)})"

    @property
    def js_prefix(self) -> str:
        """The subject prefix of the JetStream API, without a trailing dot."""
        if self.api_prefix:
            return self.api_prefix.rstrip(".")
        return f"$JS.{self.domain}.API" if self.domain else "$JS.API"

    def server_list(self) -> list[ServerAddress]:
        """The servers to try, in the order given."""
        return list(parse_servers(self.servers)[0])

    def identity(self) -> NkeyIdentity | None:
        """The key that signs the server's nonce, or None for auth by password, token, certificate, or no auth."""
        if self.creds:
            return NkeyIdentity.from_creds(self.creds, source="the creds option")
        if self.creds_file:
            text = read_secret_file(self.creds_file, what="credentials file")
            return NkeyIdentity.from_creds(text, source=repr(self.creds_file))
        if self.nkey_seed:
            return NkeyIdentity.from_seed(self.nkey_seed, source="the nkey_seed option")
        if self.nkey_file:
            text = read_secret_file(self.nkey_file, what="nkey file")
            return NkeyIdentity.from_seed(text, source=repr(self.nkey_file))
        return None

    def self_contained(self) -> ConnectOptions:
        """The same options with the content of the credentials and nkey files, for machines without those files."""
        if self.creds_file:
            return replace(self, creds_file=None, creds=read_secret_file(self.creds_file, what="credentials file"))
        if self.nkey_file:
            identity = self.identity()
            assert identity is not None
            return replace(self, nkey_file=None, nkey_seed=identity.seed)
        return self

    @property
    def wants_tls(self) -> bool:
        """Whether the options require TLS; then never use a connection without TLS, whatever the server offers."""
        return bool(self.tls_ca or self.tls_cert or self.tls_first) or any(a.tls for a in self.server_list())

    def ssl_context(self, *, required: bool = False) -> ssl.SSLContext | None:
        """The TLS settings, or None when TLS is not needed; `required` is the server's own `tls_required`."""
        if not (required or self.wants_tls):
            return None
        try:
            context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=_path(self.tls_ca))
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"cannot load tls_ca {self.tls_ca!r}: {error}") from error
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.tls_cert and self.tls_key:
            try:
                # An encrypted key would prompt for its pass phrase on the terminal: refuse it instead.
                context.load_cert_chain(os.path.expanduser(self.tls_cert), _path(self.tls_key), password=_no_phrase)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(
                    f"cannot load tls_cert {self.tls_cert!r} with tls_key {self.tls_key!r}: {error}"
                ) from error
        return context

    def connect_frame(self, info: Mapping[str, Any], *, name: str | None = None, verbose: bool = False) -> bytes:
        """The CONNECT line in reply to the server's INFO, with credentials and signature: never log it."""
        body: dict[str, Any] = {
            "verbose": verbose,
            "pedantic": False,
            "tls_required": bool(info.get("tls_required")),
            "lang": "python",
            "version": __version__,
            "name": name or self.name,
            "protocol": 1,
            "headers": True,
            "no_responders": True,
            "echo": False,
        }
        if self.user is not None:
            body |= {"user": self.user, "pass": self.password or ""}
        if self.token is not None:
            body["auth_token"] = self.token
        # A server that sends no nonce checks no signature; other servers would refuse a signature of an empty nonce.
        if (nonce := info.get("nonce")) and (identity := self.identity()):
            body["sig"] = identity.sign(nonce)
            body |= {"jwt": identity.jwt} if identity.jwt else {"nkey": identity.public_key()}
        return b"CONNECT " + json.dumps(body, separators=(",", ":")).encode() + b"\r\n"

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> ConnectOptions:
        """Options from a config table or Spark's options; an unknown name is refused, with the nearest known one."""
        return cls(**parse_mapping(mapping))

    @classmethod
    def resolve(cls, explicit: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None) -> ConnectOptions:
        """Options from the caller, then the environment, then a `nats` CLI context, then the default server.

        See `parti.wire.context` for the names and the exact precedence.
        """
        from parti.wire.context import resolve_settings  # it imports this module

        return cls(**resolve_settings(parse_mapping(explicit or {}), os.environ if env is None else env))


def parse_mapping(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Field values from texts; names may carry the prefix `nats.` and are matched without case, `_` and `-`.

    Spark lower-cases option names, so `nats.credsFile` arrives as `nats.credsfile`.
    """
    known = {_fold(field.name): field.name for field in fields(ConnectOptions)} | _ALIASES
    values: dict[str, Any] = {}
    for key, raw in mapping.items():
        field = known.get(_fold(key))
        if field is None:
            near = get_close_matches(_fold(key), known, n=1)
            hint = f"; did you mean {known[near[0]]!r}?" if near else f"; known: {', '.join(sorted(known.values()))}"
            raise ConfigError(f"unknown NATS option {key!r}{hint}")
        if field in values:
            raise ConfigError(f"the NATS option {field!r} is given twice")
        if raw is not None and raw != "":
            values[field] = _convert(field, raw)
    return values


def _seconds(raw: str | float, *, what: str) -> float:
    """Seconds from a number, a bare number as text (Spark passes texts only), or a duration such as `5s`."""
    try:
        return float(raw)
    except ValueError:
        pass
    try:
        return parse_duration(str(raw))
    except ConfigError:
        raise ConfigError(f"{what} is {raw!r}: write seconds or a duration such as 5s or 250ms") from None


def _convert(field: str, raw: Any) -> Any:
    if field == "servers":
        return (raw,) if isinstance(raw, str) else tuple(raw)
    if field in _DURATIONS:
        return _seconds(raw, what=field)
    if field in _INTEGERS:
        try:
            return int(raw)
        except (TypeError, ValueError):
            raise ConfigError(f"{field} is {raw!r}: write a whole number") from None
    if field in _FLAGS:
        text = str(raw).lower()
        if text not in ("true", "false"):
            raise ConfigError(f"{field} is {raw!r}: write true or false")
        return text == "true"
    return str(raw)


def _fold(key: str) -> str:
    return key.lower().removeprefix("nats.").replace("_", "").replace("-", "")


def _path(path: str | None) -> str | None:
    return os.path.expanduser(path) if path else None


def _no_phrase() -> str:
    raise ssl.SSLError("the key is encrypted; give one without a pass phrase")
