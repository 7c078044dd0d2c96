"""Notices that a group's work queue takes no more messages from its stream, which no consumer of the queue can see.

The server retries for ever and reports nothing. It adds a header to every message that it sources, and one whose
headers then exceed its limit stops the queue (docs/evidence/groups.md#g14). So does a full queue.
"""

from __future__ import annotations

from typing import Any, Final

from parti.dead_letters.parts import MOST_HEADERS
from parti.wire.api import JetStreamApi
from parti.wire.errors import MessageNotFound
from parti.wire.requests import headers_size
from parti.wire.stored import StoredMessage

STUCK_AFTER: Final = 15.0  # seconds without progress; sourcing takes milliseconds
_ADDED: Final = 512  # bytes of header that sourcing adds at most, with long names


async def next_to_source(api: JetStreamApi, info: dict[str, Any]) -> StoredMessage | None:
    """The oldest message that the work queue with this info has not taken from its stream; None if it has all.

    The `lag` of the info is no answer: it counts what was there when the server last tried.
    """
    for source, configured in zip(info.get("sources") or (), info["config"].get("sources") or (), strict=False):
        subjects = [each["src"] for each in configured.get("subject_transforms") or ()]
        found = []
        for subject in subjects or [configured.get("filter_subject") or ">"]:
            try:
                found.append(await api.msg_get(source["name"], seq=int(source.get("seq", 0)) + 1, next_by_subj=subject))
            except MessageNotFound:
                continue
        return min(found, key=lambda message: message.seq, default=None)
    return None


class SourceWatch:
    """The progress of one work queue."""

    def __init__(self, api: JetStreamApi, queue: str) -> None:
        self.stuck: str | None = None
        """What stops the work queue; None while it takes messages."""
        self._api = api
        self._queue = queue
        self._next = 0
        """The sequence that it is to take next; 0 when it has taken all."""
        self._since = 0.0

    def __repr__(self) -> str:
        return f"<SourceWatch {self._queue} next={self._next} {'stuck' if self.stuck else 'ok'}>"

    async def look(self, now: float) -> None:
        """Compare with the last look. An error of the server is raised, and changes nothing."""
        info = await self._api.stream_info(self._queue)
        waiting = await next_to_source(self._api, info)
        if waiting is None or waiting.seq != self._next:
            self._next, self._since, self.stuck = waiting.seq if waiting is not None else 0, now, None
        elif now - self._since >= STUCK_AFTER:
            self.stuck = (
                f"the work queue {self._queue!r} does not take message {waiting.seq} ({waiting.subject}) and those "
                f"after it from {info['sources'][0]['name']!r}: {_cause(info, waiting)}"
            )


def _cause(info: dict[str, Any], waiting: StoredMessage) -> str:
    config, state = info["config"], info["state"]
    for limit, held in (("max_msgs", "messages"), ("max_bytes", "bytes")):
        if 0 < config.get(limit, -1) <= state[held]:
            return f"it is full ({limit}={config[limit]}) until its members acknowledge messages"
    size = headers_size(waiting.headers)
    if size + _ADDED > MOST_HEADERS:
        return (
            f"its {size} bytes of headers and the one that sourcing adds exceed what the server stores: copy the "
            "message elsewhere, then remove it from the stream"
        )
    return "the server's log may say why"
