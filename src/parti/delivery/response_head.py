"""Parses the head of a response itself, where the client fails on the bytes behind it.

aiohttp's parser takes status line, headers and the beginning of the body in one go: a body that is broken in the first
packet discards the whole response, although the status was enough to decide.
"""

from __future__ import annotations

import asyncio
import re

from aiohttp.client_proto import ResponseHandler

_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})(?: [^\r\n]*)?")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\r\n\x00]*)")
_LONGEST = 16 << 10


class HeadHandler(ResponseHandler):
    """Remembers the first bytes since `ask`, and its descriptor."""

    first = b""
    descriptor = -1
    used = False
    """Whether a request was sent on this connection."""
    _incomplete = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.descriptor = transport.get_extra_info("socket").fileno()

    def ask(self) -> None:
        """A request is sent: data from now on is its response."""
        self.first, self._incomplete, self.used = b"", True, True

    @property
    def has_news(self) -> bool:
        """Whether data came since the last response."""
        return bool(self._buffer or self._tail or self._exception is not None)

    def data_received(self, data: bytes) -> None:
        if self._incomplete:
            self.first += data[: 2 * _LONGEST]
            self._incomplete = len(self.first) < _LONGEST
        ResponseHandler.data_received(self, data)  # not by `super`: this is called for every response


def head_of(data: bytes) -> tuple[int, str | None] | None:
    """Status and `Retry-After` of the response at the start of the bytes; None when its head is incomplete.

    Interim responses (1xx) are skipped. A malformed head gives None: it decides nothing.
    """
    while True:
        head, end, rest = data.partition(b"\r\n\r\n")
        if not end or len(head) > _LONGEST:
            return None
        first, *lines = head.split(b"\r\n")
        found, fields = _STATUS.fullmatch(first), [_FIELD.fullmatch(line) for line in lines]
        if found is None or not all(fields):
            return None
        status = int(found[1])
        if status >= 200:
            named = {field[1].lower(): field[2] for field in fields if field is not None}
            wait = named.get(b"retry-after")
            return status, wait.strip().decode("latin-1") if wait is not None else None
        data = rest
