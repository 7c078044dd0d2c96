"""API calls about single messages: read from the leader or by Direct Get, delete."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from parti.errors import NoResponders, PartiError, RequestTimeout, UsageError
from parti.wire.api_call import ApiCaller
from parti.wire.errors import status_error
from parti.wire.names import token
from parti.wire.requests import Reply
from parti.wire.stored import AnsweredElsewhere, StoredMessage

_NOT_FOUND = 404
_END_OF_BATCH = 204
_NO_RESPONDERS = 503
_TRIES = 8  # tries of a Direct Get, which mirrors answer too


@dataclass(frozen=True, slots=True)
class DirectBatch:
    """Messages of one batch Direct Get in stream order, and how many more the answering replica has after them.

    Any replica may answer, and a lagging one answers short without an error (docs/evidence/cluster.md#c4): an empty or
    short batch proves nothing until the leader confirms it.
    """

    messages: tuple[StoredMessage, ...]
    pending: int


def _selection(seq: int | None, last_by_subj: str | None, next_by_subj: str | None) -> dict[str, Any]:
    if last_by_subj is not None:
        if seq is not None or next_by_subj is not None:
            raise UsageError("last_by_subj goes without seq and next_by_subj")
        return {"last_by_subj": last_by_subj}
    if next_by_subj is not None:
        return {"seq": 1 if seq is None else seq, "next_by_subj": next_by_subj}
    if seq is None:
        raise UsageError("name a message: seq, last_by_subj or next_by_subj")
    return {"seq": seq}


class MessageCalls(ApiCaller):
    """Read and delete single messages."""

    async def msg_get(
        self, stream: str, *, seq: int | None = None, last_by_subj: str | None = None, next_by_subj: str | None = None
    ) -> StoredMessage:
        """The message from the stream's leader, which has every acknowledged write; raises `MessageNotFound`.

        `next_by_subj` (wildcards allowed) finds the first one at or after `seq`.
        """
        body = _selection(seq, last_by_subj, next_by_subj)
        answer = await self.request(f"STREAM.MSG.GET.{token(stream, what='stream')}", body)
        return StoredMessage.from_json(answer["message"])

    async def msg_delete(self, stream: str, seq: int, *, erase: bool = False) -> None:
        """Remove one message; `erase` also overwrites its bytes on disk, which is slow."""
        await self.request(f"STREAM.MSG.DELETE.{token(stream, what='stream')}", {"seq": seq, "no_erase": not erase})

    async def direct_get_batch(
        self,
        stream: str,
        *,
        batch: int,
        seq: int | None = None,
        start_time: datetime | None = None,
        next_by_subj: str | None = None,
        max_bytes: int | None = None,
    ) -> DirectBatch:
        """Up to `batch` messages at or after `seq` or `start_time`, of the subjects that `next_by_subj` matches.

        All of them are in memory: limit them by `batch` and `max_bytes`. Keep batches small (hundreds): writers wait
        while the server sends one. Mirrors of the stream answer too; their answers are discarded and requested again,
        and after some tries AnsweredElsewhere is raised. An empty answer may come from a mirror or a lagging replica:
        confirm it with the leader (`msg_get`).
        """
        self.require((2, 11, 0), "batch Direct Get")
        if batch < 1:
            raise UsageError(f"a batch has at least one message, not {batch}")
        body: dict[str, Any] = {"batch": batch}
        if start_time is not None:
            body["start_time"] = start_time.astimezone(UTC).isoformat().replace("+00:00", "Z")
        else:
            body["seq"] = 1 if seq is None else seq
        if next_by_subj is not None:
            body["next_by_subj"] = next_by_subj
        if max_bytes is not None:
            body["max_bytes"] = max_bytes
        call = f"DIRECT.GET.{token(stream, what='stream')}"
        for _ in range(_TRIES - 1):  # the server chooses the answering replica at random
            with contextlib.suppress(AnsweredElsewhere):
                return await self._gather(stream, call, body)
        return await self._gather(stream, call, body)

    async def _gather(self, stream: str, call: str, body: Mapping[str, Any]) -> DirectBatch:
        answers: asyncio.Queue[Reply | PartiError] = asyncio.Queue()
        token_, inbox = await self.connection.requests.expect(answers.put_nowait)
        messages: list[StoredMessage] = []
        try:
            await self.connection.requests.send(f"{self.prefix}.{call}", json.dumps(body).encode(), reply=inbox)
            async with asyncio.timeout(self.timeout):
                while True:
                    answer = await answers.get()
                    if isinstance(answer, PartiError):
                        raise answer
                    if answer.status == _END_OF_BATCH:
                        return DirectBatch(tuple(messages), int(answer.headers.get("Nats-Num-Pending", "0")))
                    if answer.status == _NOT_FOUND:
                        return DirectBatch(tuple(messages), 0)
                    if answer.status == _NO_RESPONDERS:
                        raise _no_direct(call)
                    if answer.status:
                        raise status_error(answer.status, answer.description, request=call)
                    if (other := answer.headers.get("Nats-Stream")) != stream:
                        raise AnsweredElsewhere(f"{call} was answered by the mirror {other!r}")
                    messages.append(StoredMessage.from_direct(answer))
        except TimeoutError:
            raise RequestTimeout(f"{call}: the batch did not end within {self.timeout:g} s") from None
        finally:
            self.connection.requests.forget(token_)


def _no_direct(call: str) -> NoResponders:
    return NoResponders(
        f"no responder for {call}: the stream does not exist, has allow_direct off, or no replica is up"
    )
