"""One call of the JetStream API: JSON out, JSON or a typed error back, and a check of the server's version."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from parti.errors import ProtocolError, ServerTooOld
from parti.wire.connect import Connection
from parti.wire.errors import api_error

Json = dict[str, Any]
Version = tuple[int, int, int]


class ApiCaller:
    """Shared by all groups of API calls: the connection, the subject prefix and the timeout.

    Requests and replies are plain dicts, so that fields unknown to this version of parti survive a round trip
    (nats-py's dataclasses drop them: an update through them silently removes pinning).
    """

    def __init__(self, connection: Connection, *, prefix: str | None = None, timeout: float | None = None) -> None:
        self.connection = connection
        self.prefix = prefix or connection.connect_options.js_prefix
        self.timeout = timeout or connection.connect_options.request_timeout

    async def request(self, call: str, body: Mapping[str, Any] | None = None, *, timeout: float | None = None) -> Json:
        """The reply to `<prefix>.<call>`; an error in it is raised as its class of `parti.wire.errors`."""
        payload = json.dumps(body).encode() if body is not None else b""
        reply = await self.connection.requests.call(f"{self.prefix}.{call}", payload, timeout=timeout or self.timeout)
        return decode_answer(reply.data, request=call)

    async def pages(self, call: str, key: str, body: Mapping[str, Any] | None = None) -> AsyncIterator[list[Any]]:
        """The pages of a listing, each a list; only one page is in memory."""
        offset = 0
        while True:
            answer = await self.request(call, {**(body or {}), "offset": offset})
            page = answer.get(key) or []
            if page:
                yield page
            offset += len(page)
            if not page or offset >= int(answer.get("total") or 0):
                return

    def require(self, needed: Version, what: str) -> None:
        """Raise `ServerTooOld` unless the connected server supports `what`, which exists since version `needed`."""
        check_version(self.connection.server_version, needed, what)


def check_version(found: Version, needed: Version, what: str) -> None:
    """Raise `ServerTooOld` when `found` is below `needed`; a version of zeros is unknown and passes."""
    if (0, 0, 0) < found < needed:
        wanted, has = (".".join(str(part) for part in version) for version in (needed, found))
        raise ServerTooOld(f"{what} needs nats-server {wanted} or newer, and {has} is connected: upgrade the server")


def decode_answer(data: bytes, *, request: str) -> Json:
    """The JSON object of a reply; an `error` in it is raised as a typed error."""
    try:
        answer = json.loads(data)
    except ValueError as malformed:
        raise ProtocolError(f"{request}: the answer is no JSON") from malformed
    if not isinstance(answer, dict):
        raise ProtocolError(f"{request}: the answer is no JSON object")
    if error := answer.get("error"):
        raise api_error(error, request=request)
    return answer
