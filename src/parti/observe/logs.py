"""Log events: a name plus fields, one line each, on stderr. Secrets are masked in every event.

    log = get_logger("handoff")
    log.info("handoff.committed", partition=7, epoch=42, took=0.083)

A program that configures structlog itself, or calls `configure_logging`, decides the output. Without configuration, as
in a script or in Spark's worker processes, warnings and errors go to stderr, masked too.

structlog and the configuration are imported with the first event that is written: importing them takes 0.12 s of CPU,
and most of Spark's processes never write an event.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TextIO, cast

from parti.config.redact import MASK, is_secret_name, redact_urls

if TYPE_CHECKING:
    import structlog

    from parti.config.sections import LogFormat, ObserveSection

_MUTED: Final = ContextVar("parti-muted", default=False)
_DEPTH: Final = 4  # deeper than any event parti writes; a cycle in a caller's value must not hang the logger


def get_logger(component: str, **fields: Any) -> structlog.typing.FilteringBoundLogger:
    """A logger whose events carry the component and these fields."""
    return cast("structlog.typing.FilteringBoundLogger", _Logger({"component": component} | fields))


class _Logger:
    """Checks on each use whether logging is configured, because modules create their loggers before that."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # copying and pickling look up such names before the fields exist
        if _MUTED.get():
            return _nowhere
        if "structlog" in sys.modules:  # if it was never imported, it was never configured
            import structlog  # waits for another thread that is importing it

            if structlog.is_configured():
                return getattr(structlog.get_logger(**self._fields), name)
        if name in ("debug", "info"):
            return _nowhere
        return getattr(_last_resort(sys.stderr).bind(**self._fields), name)


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """This code, and the tasks it starts, write no log: a simulation has its own event log."""
    token = _MUTED.set(True)
    try:
        yield
    finally:
        _MUTED.reset(token)


def _nowhere(event: str, *words: Any, **fields: Any) -> None:
    """Drops every event."""


@lru_cache(maxsize=1)
def _last_resort(stream: TextIO) -> Any:
    import structlog

    from parti.config.sections import LogLevel, ObserveSection

    settings = _configuration(ObserveSection(log_level=LogLevel.WARNING), stream)
    return structlog.wrap_logger(settings.pop("logger_factory")(), **settings)


def configure_logging(settings: ObserveSection | None = None, *, stream: TextIO | None = None) -> None:
    """Send events to stderr (or `stream`) in the configured format, from the configured level upwards.

    The last call wins. Secrets are masked before rendering, in both formats.
    """
    import structlog

    from parti.config.sections import ObserveSection

    structlog.configure(**_configuration(settings or ObserveSection(), stream if stream is not None else sys.stderr))


def _configuration(settings: ObserveSection, stream: TextIO) -> dict[str, Any]:
    import structlog

    tail: list[structlog.typing.Processor]
    if _is_console(settings.log_format, stream):
        # Plain tracebacks: the rich ones print local variables, and those may hold secrets.
        plain = structlog.dev.plain_traceback
        tail = [structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=plain)]
    else:
        tail = [structlog.processors.format_exc_info, redact, structlog.processors.JSONRenderer(default=str)]
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    return {
        "processors": [
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            redact,
            *tail,
        ],
        "wrapper_class": structlog.make_filtering_bound_logger(level),
        "logger_factory": structlog.WriteLoggerFactory(file=stream),
        "cache_logger_on_first_use": False,
    }


def _is_console(wanted: LogFormat, stream: TextIO) -> bool:
    from parti.config.sections import LogFormat

    return wanted is LogFormat.CONSOLE or (wanted is LogFormat.AUTO and stream.isatty())


def redact(
    logger: Any,  # noqa: ARG001 - the signature of a structlog processor
    method: str,  # noqa: ARG001
    event: MutableMapping[str, Any],
) -> MutableMapping[str, Any]:
    """The event with secret-looking fields masked, also inside mappings and lists, and without url credentials."""
    for name, value in event.items():
        event[name] = _clean(name, value, _DEPTH)
    return event


def _clean(name: str, value: Any, depth: int) -> Any:
    if is_secret_name(name) and value is not None and not isinstance(value, bool | int | float):
        return MASK
    if isinstance(value, str):
        return redact_urls(value)
    if depth and isinstance(value, Mapping):
        return {key: _clean(str(key), item, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, list | tuple | set | frozenset):
        return [_clean(name, item, depth - 1) for item in value]
    return value
