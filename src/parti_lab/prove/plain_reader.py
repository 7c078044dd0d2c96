"""The content of a stream, read in the simplest way: the leader is asked for one message after the other.

Proofs compare the range reader with it. So the two share no code: this one has a socket, JSON, and nothing clever.
"""

from __future__ import annotations

import base64
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

from parti.errors import FatalError

_PATIENCE = 60.0  # seconds; a cluster that lost a node elects a leader within a few


class PlainReadFailed(FatalError):
    """The plain reader got no answer: the proof cannot judge."""


@dataclass(frozen=True, slots=True)
class Plain:
    """One message as the stream's leader returns it."""

    sequence: int
    subject: str
    microseconds: int
    headers: tuple[tuple[str, bytes], ...]
    data: bytes


class PlainReader:
    """One connection to the first server of `urls` that answers; for use in one thread."""

    def __init__(self, *urls: str, prefix: str = "$JS.API") -> None:
        self._urls = urls
        self._prefix = prefix
        self._socket: socket.socket | None = None
        self._rest = b""
        self._count = 0

    def messages(self, stream: str, first: int = 1, last: int | None = None) -> Iterator[Plain]:
        """All messages from `first` to `last` that the leader stores, in order."""
        position = max(first, 1)
        while last is None or position <= last:
            answer = self.call(f"STREAM.MSG.GET.{stream}", {"seq": position, "next_by_subj": ">"})
            if answer.get("error", {}).get("code") == 404:
                return
            found = _plain(answer["message"])
            if last is not None and found.sequence > last:
                return
            yield found
            position = found.sequence + 1

    def info(self, stream: str) -> dict[str, Any]:
        """STREAM.INFO of the leader."""
        return self.call(f"STREAM.INFO.{stream}", {})

    def call(self, suffix: str, body: dict[str, Any]) -> dict[str, Any]:
        """One API call, repeated until a server answers; refusals are returned unchanged."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                answer = self._request(f"{self._prefix}.{suffix}", json.dumps(body).encode())
                found: dict[str, Any] = json.loads(answer)
                if found.get("error", {}).get("code") != 503:
                    return found
            except (OSError, ValueError):
                self.close()
            if time.monotonic() > deadline:
                raise PlainReadFailed(f"no answer to {suffix} for {_PATIENCE:g} s")
            time.sleep(0.05)  # an election, or a starting server: no event signals its end

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def _connect(self) -> socket.socket:
        error: OSError | None = None
        for url in self._urls:
            parts = urlsplit(url)
            try:
                opened = socket.create_connection((parts.hostname or "", parts.port or 4222), timeout=10)
            except OSError as refused:
                error = refused
                continue
            self._rest = b""
            opened.sendall(b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\nSUB _PLAIN.* 1\r\n')
            return opened
        raise error or OSError("no server")

    def _request(self, subject: str, body: bytes) -> bytes:
        if self._socket is None:
            self._socket = self._connect()
        self._count += 1
        wanted = b"_PLAIN.%d" % self._count
        self._socket.sendall(b"PUB %s %s %d\r\n%s\r\n" % (subject.encode(), wanted, len(body), body))
        while True:
            line = self._until(b"\r\n").split()
            if line[:1] == [b"PING"]:
                self._socket.sendall(b"PONG\r\n")
            elif line and line[0] in (b"MSG", b"HMSG"):
                payload = self._take(int(line[-1]) + 2)[:-2]
                if line[1] == wanted:
                    return payload[int(line[-2]) :] if line[0] == b"HMSG" else payload

    def _until(self, end: bytes) -> bytes:
        while end not in self._rest:
            self._rest += self._receive()
        line, _, self._rest = self._rest.partition(end)
        return line

    def _take(self, size: int) -> bytes:
        parts, have = [self._rest], len(self._rest)
        while have < size:
            parts.append(self._receive())
            have += len(parts[-1])
        whole = b"".join(parts)
        self._rest = whole[size:]
        return whole[:size]

    def _receive(self) -> bytes:
        assert self._socket is not None
        received = self._socket.recv(1 << 20)
        if not received:
            raise OSError("the server closed the connection")
        return received


def _plain(message: dict[str, Any]) -> Plain:
    block = base64.b64decode(message.get("hdrs", ""))
    lines = [line.partition(b":") for line in block.split(b"\r\n")[1:] if b":" in line]
    return Plain(
        sequence=int(message["seq"]),
        subject=message["subject"],
        microseconds=_microseconds(message["time"]),
        headers=tuple((key.decode(), value.removeprefix(b" ")) for key, _, value in lines),
        data=base64.b64decode(message.get("data", "")),
    )


def _microseconds(text: str) -> int:
    """Microseconds since 1970, truncated as Spark does; Go writes up to nine fractional digits and drops zeros."""
    seconds, _, fraction = text.removesuffix("Z").partition(".")
    whole = int(datetime.fromisoformat(f"{seconds}+00:00").timestamp())
    return whole * 1_000_000 + int(f"{fraction:0<6}"[:6] or 0)
