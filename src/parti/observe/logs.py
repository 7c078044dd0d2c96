"""Log events: a name plus fields, one line each, on stderr. No secret passes, whatever a caller logs.

    log = get_logger("handoff")
    log.info("handoff.committed", partition=7, epoch=42, took=0.083)

A library user who never calls `configure_logging` gets structlog's own defaults, or what their program configured.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, Final, TextIO

import structlog

from parti.config.redact import MASK, is_secret_name, redact_urls
from parti.config.sections import LogFormat, LogLevel, ObserveSection

_LEVELS: Final = {
    LogLevel.DEBUG: logging.DEBUG,
    LogLevel.INFO: logging.INFO,
    LogLevel.WARNING: logging.WARNING,
    LogLevel.ERROR: logging.ERROR,
}
_DEPTH: Final = 4  # deeper than any event we write; a cycle in a caller's value must not hang the logger


def get_logger(component: str, **fields: Any) -> structlog.typing.FilteringBoundLogger:
    """A logger whose events carry the component and these fields."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(component=component, **fields)
    return logger


def configure_logging(settings: ObserveSection | None = None, *, stream: TextIO | None = None) -> None:
    """Send events to stderr (or `stream`) in the configured format and from the configured level on.

    The last call wins. Secrets are masked before rendering, in both formats.
    """
    settings = settings or ObserveSection()
    stream = stream if stream is not None else sys.stderr
    tail: list[structlog.typing.Processor]
    if _is_console(settings.log_format, stream):
        # Plain tracebacks: the rich ones print local variables, and those may hold secrets.
        plain = structlog.dev.plain_traceback
        tail = [structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=plain)]
    else:
        tail = [structlog.processors.format_exc_info, redact, structlog.processors.JSONRenderer(default=str)]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            redact,
            *tail,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[settings.log_level]),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=False,
    )


def _is_console(wanted: LogFormat, stream: TextIO) -> bool:
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
