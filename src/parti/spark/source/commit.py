"""Reports to JetStream what a query has done, so that its tools show position and lag, and its queues get empty.

Spark's checkpoint stays the truth: a commit is repeated as often as needed, and a query without one continues from its
checkpoint. Every commit here is idempotent.
"""

from __future__ import annotations

from typing import Any, Protocol

from parti.errors import ConfigError
from parti.spark.source.options import SourceOptions
from parti.wire.errors import ConsumerNotFound
from parti.wire.ranges import RangeReader, StreamState


class Commit(Protocol):
    """One way to commit."""

    def prepare(self, reader: RangeReader, state: StreamState, started: int) -> None:
        """Before the first batch: refuse a stream that this cannot work on, and create what it needs."""
        ...

    def commit(self, reader: RangeReader, sequence: int) -> None:
        """After this returns, JetStream knows that all up to `sequence` is done."""
        ...


def commit_of(options: SourceOptions) -> Commit | None:
    """The commit that the options ask for; None for no commit."""
    match options.commit:
        case "durable":
            assert options.durable is not None
            return DurableCommit(options.stream, options.durable, options.subjects)
        case "purge":
            return PurgeCommit(options.stream, options.subjects)
        case "none":
            return None


class DurableCommit:
    """Moves a durable consumer by CONSUMER.RESET: one small request, whatever the number of messages.

    See docs/evidence/spark.md#s17.

    On an interest stream the consumer also keeps the messages until the query has processed them.
    """

    def __init__(self, stream: str, durable: str, subjects: tuple[str, ...]) -> None:
        self._stream = stream
        self._durable = durable
        self._subjects = subjects

    def prepare(self, reader: RangeReader, state: StreamState, started: int) -> None:
        if state.retention == "workqueue":
            raise ConfigError(
                f"stream {state.name!r} is a work queue, where moving a consumer deletes nothing: use commit=purge"
            )
        self._create_if_missing(reader, started)

    def commit(self, reader: RangeReader, sequence: int) -> None:
        # A reset of a deleted consumer gets no reply: the request would time out, again and again.
        if not self._create_if_missing(reader, sequence):
            reader.connection.api(f"CONSUMER.RESET.{self._stream}.{self._durable}", {"seq": sequence + 1})

    def _create_if_missing(self, reader: RangeReader, done: int) -> bool:
        try:
            reader.connection.api(f"CONSUMER.INFO.{self._stream}.{self._durable}")
        except ConsumerNotFound:
            self._create(reader, done)
            return True
        return False

    def _create(self, reader: RangeReader, done: int) -> None:
        config: dict[str, Any] = {
            "durable_name": self._durable,
            "description": "position of a Spark query; moved by parti",
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": done + 1,
            "ack_policy": "explicit",
        }
        if self._subjects:
            config["filter_subjects"] = list(self._subjects)
        body = {"stream_name": self._stream, "config": config, "action": "create"}
        reader.connection.api(f"CONSUMER.CREATE.{self._stream}.{self._durable}", body)


class PurgeCommit:
    """Removes processed messages from a work queue. Only there: on other streams it would delete them for others."""

    def __init__(self, stream: str, subjects: tuple[str, ...]) -> None:
        self._stream = stream
        self._subjects = subjects

    def prepare(self, reader: RangeReader, state: StreamState, started: int) -> None:  # noqa: ARG002 - the protocol's
        if state.retention != "workqueue":
            raise ConfigError(
                f"stream {state.name!r} has retention {state.retention}, where a purge takes messages from others: "
                "use commit=durable"
            )

    def commit(self, reader: RangeReader, sequence: int) -> None:
        for subject in self._subjects or (None,):
            body = {"seq": sequence + 1} | ({"filter": subject} if subject else {})
            reader.connection.api(f"STREAM.PURGE.{self._stream}", body)
