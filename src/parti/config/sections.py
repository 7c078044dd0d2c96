"""Every configuration section. A new part of parti adds its section here only.

Each default is annotated with its reason. `parti config show` prints it, and a test compares it with the table in
docs/operations.md.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from parti import defaults
from parti.config.control import ControlConfig
from parti.config.deliver import DeliverSection
from parti.config.setting import Section, Setting, Unit
from parti.config.worker import WorkerConfig
from parti.errors import ConfigError


class NatsSection(Section, frozen=True, kw_only=True):
    """How to reach NATS: the fields and defaults of `parti.wire.options.ConnectOptions`, and the context to start from.

    Values not set here come from the environment and context files of the `nats` CLI.
    """

    context: Annotated[str, Setting("context of the `nats` CLI to start from; empty: the selected one")] = ""
    servers: Annotated[
        tuple[str, ...], Setting("server urls, tried in order; the default is a local server", address=True)
    ] = (defaults.SERVER,)
    user: Annotated[str | None, Setting("user name; unset: no password login")] = None
    password: Annotated[str | None, Setting("password of `user`; better from the environment", secret=True)] = None
    token: Annotated[str | None, Setting("login token; better from the environment", secret=True)] = None
    nkey_seed: Annotated[str | None, Setting("nkey seed itself; better `nkey_file`", secret=True)] = None
    nkey_file: Annotated[str | None, Setting("file with an nkey seed")] = None
    creds_file: Annotated[str | None, Setting("credentials file (JWT and seed) as `nsc` writes it")] = None
    creds: Annotated[str | None, Setting("content of a credentials file; better `creds_file`", secret=True)] = None
    tls_ca: Annotated[str | None, Setting("certificate authority file; unset: the system's")] = None
    tls_cert: Annotated[str | None, Setting("client certificate, for mutual TLS")] = None
    tls_key: Annotated[str | None, Setting("key of the client certificate")] = None
    tls_first: Annotated[bool, Setting("TLS before the greeting; off, as the server must be set to it")] = False
    tls_hostname: Annotated[str | None, Setting("name expected in the certificate; unset: the url's host")] = None
    domain: Annotated[str | None, Setting("JetStream domain, for leaf nodes")] = None
    api_prefix: Annotated[str | None, Setting("JetStream API prefix, for imported accounts")] = None
    inbox_prefix: Annotated[str, Setting("prefix of reply subjects; NATS' own, change it for tight permissions")] = (
        defaults.INBOX_PREFIX
    )
    name: Annotated[str, Setting("connection name that `nats server report connections` shows")] = (
        defaults.CONNECTION_NAME
    )
    connect_timeout: Annotated[
        float, Setting("for each server; short, so that the next one of the list gets its turn", Unit.DURATION)
    ] = defaults.CONNECT_TIMEOUT
    request_timeout: Annotated[
        float, Setting("for an answer; the `nats` CLI's default, a slower one is retried", Unit.DURATION)
    ] = defaults.REQUEST_TIMEOUT
    max_reconnects: Annotated[
        int, Setting("tries in a row; -1 is for ever, as a worker outlives any outage", at_least=-1)
    ] = defaults.MAX_RECONNECTS
    reconnect_wait: Annotated[
        float, Setting("between tries; short against a lease of seconds", Unit.DURATION, at_least=0)
    ] = defaults.RECONNECT_WAIT
    ping_interval: Annotated[
        float, Setting("a half-open connection is noticed after this x max_outstanding_pings", Unit.DURATION)
    ] = defaults.PING_INTERVAL
    max_outstanding_pings: Annotated[
        int, Setting("unanswered pings before a reconnect; 2 forgives one lost", at_least=1)
    ] = defaults.MAX_OUTSTANDING_PINGS


class RetrySection(Section, frozen=True, kw_only=True):
    """Backoff of control-plane calls: decorrelated jitter (docs/requirements.md#r-102)."""

    retry_base: Annotated[
        float, Setting("first wait; a JetStream leader election rarely ends sooner", Unit.DURATION, at_least=0.001)
    ] = defaults.RETRY_BASE
    retry_multiplier: Annotated[
        float, Setting("mean growth a try; 1.6 reaches the cap after about 7 waits", at_least=1.01, at_most=10.0)
    ] = defaults.RETRY_MULTIPLIER
    retry_max: Annotated[
        float, Setting("longest wait; below the lease of 6s, so that a renewal still fits", Unit.DURATION)
    ] = defaults.RETRY_MAX
    max_control_retries: Annotated[
        int, Setting("tries before the caller gets the error; about 4s of waiting in all", at_least=1, at_most=1000)
    ] = defaults.MAX_TRIES

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.retry_max < self.retry_base:
            raise ConfigError(
                f"retry.retry_max ({self.retry_max:g}s) is below retry.retry_base ({self.retry_base:g}s): raise it"
            )


class LogFormat(StrEnum):
    """JSON lines for machines, aligned and coloured lines for people; `auto`: the latter if stderr is a terminal."""

    AUTO = "auto"
    JSON = "json"
    CONSOLE = "console"


class LogLevel(StrEnum):
    """The least severe event that is written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class ObserveSection(Section, frozen=True, kw_only=True):
    """Logs, and the small web server with /metrics, /healthz and /readyz."""

    listen: Annotated[
        str, Setting("host:port of /metrics, /healthz, /readyz; off, as a library must not open ports unasked")
    ] = "off"
    log_format: Annotated[LogFormat, Setting("auto: console on a terminal, json otherwise")] = LogFormat.AUTO
    log_level: Annotated[LogLevel, Setting("info names each change of state, and nothing per message")] = LogLevel.INFO

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.listen != "off":
            self.address()

    def address(self) -> tuple[str, int]:
        """Host and port of `listen`; port 0 means any free port."""
        host, separator, port = self.listen.rpartition(":")
        if not separator or not host or not port.isdecimal() or int(port) > 65_535:
            raise ConfigError(f'observe.listen is {self.listen!r}: write host:port, such as "127.0.0.1:9464", or "off"')
        return host.removeprefix("[").removesuffix("]"), int(port)


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The whole configuration; immutable, and its repr shows no secret."""

    nats: NatsSection = NatsSection()
    retry: RetrySection = RetrySection()
    observe: ObserveSection = ObserveSection()
    worker: WorkerConfig = WorkerConfig()
    control: ControlConfig = ControlConfig()
    deliver: DeliverSection = DeliverSection()
