"""The options of the reader, in one table that the docs show and a test compares, and their parsed form."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from parti.errors import ConfigError
from parti.observe.logs import get_logger
from parti.spark.options import (
    CONNECTION_OPTIONS,
    Option,
    OptionTable,
    choice,
    connect_options,
    duration,
    flag,
    positive,
    size,
    span,
    text,
)
from parti.spark.source.offsets import Position
from parti.spark.table_options import SPARKS_OWN
from parti.spark.tokens import Partitioning, Tokens
from parti.subjects import normalize_filters
from parti.wire.names import token
from parti.wire.options import ConnectOptions

log = get_logger("spark.source")

CommitMode = Literal["none", "durable", "purge"]
GroupKindName = Literal["auto", "static", "elastic", "compact"]


def _stream(name: str) -> str:
    return token(name, what="stream")


def _durable(name: str) -> str:
    return token(name, what="consumer")


def _subjects(given: str) -> tuple[str, ...]:
    subjects = json.loads(given) if given.startswith("[") else given.split(",")
    return normalize_filters(str(subject).strip() for subject in subjects)


SOURCE_OPTIONS = OptionTable(
    (
        *CONNECTION_OPTIONS,
        Option("stream", None, _stream, "name of the stream to read; required"),
        Option("subjects", None, _subjects, "subject filters, separated by commas or as a JSON list; without it all"),
        Option(
            "startingOffsets",
            None,
            Position.parse,
            "`earliest`, `latest`, or the sequence of the first message to read. Default: `latest` for a stream "
            "(`earliest` with commit=purge and in a group), `earliest` for a batch",
        ),
        Option(
            "endingOffsets",
            None,
            Position.parse_ending,
            "batch only: `latest` (the default), or the first sequence *not* to read",
        ),
        Option(
            "startingTimestamp",
            None,
            Position.parse_time,
            "instead of startingOffsets: read what was stored at or after this time (ISO 8601, UTC without a zone, or "
            "milliseconds since 1970)",
        ),
        Option(
            "endingTimestamp",
            None,
            Position.parse_time,
            "batch only, instead of endingOffsets: read what was stored before this time",
        ),
        Option("maxOffsetsPerTrigger", None, positive, "at most so many sequences a batch"),
        Option("minOffsetsPerTrigger", None, positive, "wait until so many are there, or maxTriggerDelay is over"),
        Option("maxTriggerDelay", "15m", duration, "how long minOffsetsPerTrigger may hold messages back"),
        Option("maxBytesPerTrigger", None, size, "at most about so many bytes a batch, by the stream's mean size"),
        Option(
            "minPartitions",
            None,
            positive,
            "how many tasks a large batch should have. Default: the processors of the driver's machine",
        ),
        Option(
            "minRecordsPerPartition",
            "20000",
            positive,
            "a batch is split only into tasks at least this large, so that a small one is one task",
        ),
        Option("maxRecordsPerPartition", None, positive, "no task is larger, however many that takes"),
        Option(
            "failOnDataLoss",
            "true",
            flag,
            "fail when messages are gone before they were read; false logs which, and continues",
        ),
        Option("includeHeaders", "false", flag, "add the column `headers`"),
        Option(
            "keyTokens",
            "subject",
            Tokens.parse,
            "what `key` is: `subject`, token positions such as `2,3`, or a pattern such as `orders.*.*`",
        ),
        Option("numPartitions", "1", positive, "into how many partitions the keys are hashed"),
        Option(
            "partitionBy",
            None,
            text,
            "what is hashed, written like keyTokens (the default is the key); or `token:N`: that token is the "
            "partition already",
        ),
        Option(
            "commit",
            "none",
            choice("none", "durable", "purge"),
            "streaming only: tell JetStream what is done, by the position of a durable consumer, or by purging a work "
            "queue",
        ),
        Option("durable", None, _durable, "name of the consumer that commit=durable moves; created when missing"),
        Option(
            "commitLastBatch",
            "true",
            flag,
            "commit as soon as a batch is done. Set it to false with asyncProgressTrackingEnabled",
        ),
        Option("group", None, text, "streaming only: read as a member of this consumer group of the stream; see below"),
        Option("member", None, text, "with group: the member's name, whose partitions are read"),
        Option(
            "groupKind",
            "auto",
            choice("auto", "static", "elastic", "compact"),
            "with group: which kind it is, when several have the name",
        ),
        Option("groupAckWait", "5s", span, "with group: how long after its end a query keeps its partitions"),
        Option("retryBudget", "60s", span, "how long NATS may be out of reach before the query fails"),
    ),
    # An SQL view or table is read and written with the same options; `subject` is refused, because it is easily
    # written for `subjects`, and then everything would be read.
    accepted=(*SPARKS_OWN, "atomic", "maxInFlight", "retryTimeout", "writeId", "progressSubject"),
)


@dataclass(frozen=True, slots=True)
class GroupSetting:
    """Which member of which group a query is."""

    group: str
    member: str
    kind: GroupKindName = "auto"
    ack_wait: float = 5.0  # as for every member: a query that died is replaced after this


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The parsed options of a reader; immutable and picklable."""

    connect: ConnectOptions
    stream: str
    subjects: tuple[str, ...]
    starting: Position
    ending: Position
    max_offsets: int | None
    min_offsets: int | None
    max_delay: float
    max_bytes: int | None
    min_partitions: int | None
    min_records: int
    max_records: int | None
    fail_on_data_loss: bool
    key: Tokens
    partitioning: Partitioning
    commit: CommitMode
    durable: str | None
    commit_last_batch: bool
    retry_budget: float
    group: GroupSetting | None = None

    @classmethod
    def parse(cls, given: Mapping[str, str], *, streaming: bool) -> SourceOptions:
        """Read and check all options; the first problem raises ConfigError."""
        values = SOURCE_OPTIONS.parse(given)
        if values["stream"] is None:
            raise ConfigError("option stream is missing: name the stream to read")
        names = [name for name in _BATCH_ONLY if streaming and values[name] is not None]
        names += [name for name in _STREAM_ONLY if not streaming and values[name] is not None]
        if names:
            raise ConfigError(f"option {names[0]} has no meaning for a {'streaming' if streaming else 'batch'} query")
        for offsets, timestamp in (("startingOffsets", "startingTimestamp"), ("endingOffsets", "endingTimestamp")):
            if values[offsets] is not None and values[timestamp] is not None:
                raise ConfigError(f"{offsets} and {timestamp} exclude each other: give one of them")
        least, most = values["minOffsetsPerTrigger"], values["maxOffsetsPerTrigger"]
        if least is not None and most is not None and least > most:
            raise ConfigError(f"minOffsetsPerTrigger {least} is larger than maxOffsetsPerTrigger {most}")
        _check_times(values)
        starting = values["startingTimestamp"] or values["startingOffsets"]
        return cls(
            connect=connect_options(given),
            stream=values["stream"],
            subjects=values["subjects"] or (),
            starting=_starting(starting, values, streaming=streaming),
            ending=values["endingTimestamp"] or values["endingOffsets"] or Position("latest"),
            max_offsets=most,
            min_offsets=least,
            max_delay=values["maxTriggerDelay"],
            max_bytes=values["maxBytesPerTrigger"],
            min_partitions=values["minPartitions"],
            min_records=values["minRecordsPerPartition"],
            max_records=values["maxRecordsPerPartition"],
            fail_on_data_loss=values["failOnDataLoss"],
            key=values["keyTokens"],
            partitioning=_partitioning(values["partitionBy"], values["numPartitions"], values["keyTokens"]),
            commit=values["commit"],
            durable=values["durable"],
            commit_last_batch=values["commitLastBatch"],
            retry_budget=values["retryBudget"],
            group=_group(values),
        )


_SKEW = 60.0  # seconds that the clocks of driver and server may differ


def _check_times(values: dict[str, Any]) -> None:
    """A start in the future would read nothing in a batch, and everything from now on in a stream."""
    starting, ending = values["startingTimestamp"], values["endingTimestamp"]
    now = time.time()
    if starting is not None and starting.at / 1e9 > now + _SKEW:
        raise ConfigError(
            f"option startingTimestamp: it lies {starting.at / 1e9 - now:.0f} s in the future: give a time that has "
            "passed, or startingOffsets latest"
        )
    if ending is not None and ending.at / 1e9 > now + _SKEW:
        log.warning("source.ends_in_the_future", option="endingTimestamp", reads_until="the stream's end as of now")
    if starting is not None and ending is not None and starting.at > ending.at:
        raise ConfigError("startingTimestamp lies behind endingTimestamp: exchange them")


_BATCH_ONLY = ("endingOffsets", "endingTimestamp")
_STREAM_ONLY = ("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxBytesPerTrigger", "durable", "group", "member")
_GROUPS_OWN = ("subjects", "durable", "partitionBy", "minOffsetsPerTrigger")


def _group(values: dict[str, Any]) -> GroupSetting | None:
    if (values["group"] is None) != (values["member"] is None):
        raise ConfigError("group and member belong together: name the group and who in it the query is")
    if values["group"] is None:
        return None
    given = [name for name in _GROUPS_OWN if values[name] is not None]
    if values["commit"] != "none":
        given.append("commit")
    if given:
        raise ConfigError(f"option {given[0]} has no meaning with group: the group decides what is read and committed")
    return GroupSetting(values["group"], values["member"], values["groupKind"], values["groupAckWait"])


def _starting(given: Position | None, values: dict[str, Any], *, streaming: bool) -> Position:
    commit, durable = values["commit"], values["durable"]
    if commit != "none" and not streaming:
        raise ConfigError(f"commit={commit} has no meaning for a batch query: nothing tells when its result is stored")
    if (commit == "durable") != (durable is not None):
        raise ConfigError("commit=durable and the option durable belong together: name the consumer to move")
    if commit == "purge":
        if given is not None and given.at != "earliest":
            raise ConfigError("commit=purge deletes all up to what was read, so that it must start at earliest")
        return Position("earliest")
    return given or Position("latest" if streaming and values["group"] is None else "earliest")


def _partitioning(by: str | None, count: int, key: Tokens) -> Partitioning:
    try:
        return Partitioning.parse(by, count, key)
    except ValueError as error:
        raise ConfigError(f"option partitionBy: {error}") from None
