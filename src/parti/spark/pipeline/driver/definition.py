"""A pipeline as its author writes it: a stream, a handler, and what becomes of its results.

from parti.spark import Emit, Pipeline, Results

async def enrich(message):
    return Emit(await lookup(message.data))

pipeline = Pipeline(name="orders", stream="ORDERS", handler=enrich, results=Results(subject="enriched.{key}"))
pipeline.run()
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from parti.config.units import parse_duration
from parti.errors import ConfigError
from parti.spark.pipeline.driver.lease import Standby
from parti.spark.pipeline.driver.plan import Plan, PlanFacts, choose
from parti.spark.pipeline.driver.source import PayloadKey
from parti.spark.pipeline.executor.outcomes import Counts, RowShape
from parti.spark.pipeline.executor.policy import Retries
from parti.spark.pipeline.executor.stage import Kind
from parti.spark.source.options import GroupKindName, GroupSetting
from parti.spark.tokens import Partitioning, Tokens
from parti.wire.options import ConnectOptions
from parti.worker.handler import is_async

if TYPE_CHECKING:
    from parti.spark.pipeline.driver.query import RunningPipeline

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_PAYLOAD = "payload:"

SparkSink = Callable[[Any, int], None]
"""Called with a DataFrame and its batch number; called again with the same number when a batch is replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Where results go; any combination. Results are what a handler returns as `Emit`."""

    subject: str | None = None
    """Publish each result to this subject of a stream; {key}, {subject} and {partition} are filled in."""
    stream: str | None = None
    """The stream that must store them; found by the subject when not given."""
    parquet: str | None = None
    """A folder; each batch writes `batch=N` in it, completely or not at all."""
    write: SparkSink | None = None
    """Any other Spark sink."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """Where the outcome rows go; without a sink they are only counted."""

    parquet: str | None = None
    write: SparkSink | None = None


class Companion(Protocol):
    """Hooks that run with a pipeline, on its driver; an error raised here ends the query."""

    def begins(self, pipeline: Pipeline) -> None:
        """A query is about to run its first batch; the lease is held, if there is one."""

    def stored(self, pipeline: Pipeline, counts: Counts) -> None:
        """Everything from a batch is stored, and the batch is about to be committed."""

    def closes(self, pipeline: Pipeline) -> None:
        """A stop waits for the running batch: make it end soon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """One handler over one stream, in order for each key, on Spark. Immutable; `run` or `start` it."""

    name: str
    """Names the query, its ids and its lease; two pipelines must not share a name."""
    stream: str
    handler: Callable[..., Any]
    """As in the worker plane: a plain or async function of a message; or, by `kind`, of a whole batch."""
    kind: Kind = "message"
    subjects: tuple[str, ...] = ()
    key: str = "subject"
    """What keeps its order: `subject`, tokens such as `2,3` or `orders.*`, or `payload:field` (one or several, with
    commas) of a JSON payload."""
    partitions: int = 64  # enough to spread evenly over any usual number of cores
    partition_by: str | None = None
    """What is hashed, if not the key; `token:N` when a token already is the partition."""
    headers: bool = True
    """Whether handlers and dead letters get the headers of messages."""
    start_at: str = "earliest"
    """`earliest`, `latest`, a sequence, or a time; used only for a new checkpoint."""
    checkpoint: str = ""
    """Folder of positions and parked messages; has no default, because without it nothing survives a restart."""
    trigger: str = "0s"
    """How often a batch starts (`0s`: when the last one is done), or `available-now`: read what is there, then end."""
    batch_size: int | None = 100_000
    """Maximum messages per batch; bounds the memory of a batch."""
    grace: float = 10.0
    """Seconds that a stop gives the running batch; a longer one is interrupted, and replayed later."""
    plan: Literal["auto", "fused", "shuffled"] = "auto"
    concurrency: int = 1000
    retries: Retries = field(default_factory=Retries)
    results: Results = field(default_factory=Results)
    outcomes: Outcomes = field(default_factory=Outcomes)
    commit: Literal["none", "durable", "purge"] = "none"
    durable: str | None = None
    group: str | None = None
    """Read as a member of this consumer group of the stream, static or elastic: only the member's partitions."""
    member: str | None = None
    group_kind: GroupKindName = "auto"
    """Which kind of group, when the name is used by several."""
    standby: Standby | None = None
    """Run behind a lease, so that further drivers can be standbys."""
    companion: Companion | None = None
    nats: ConnectOptions = field(default_factory=ConnectOptions)
    master: str = "local[*]"
    spark: Mapping[str, str] = field(default_factory=dict)
    """Settings of the Spark session, if this pipeline creates it."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"pipeline name {self.name!r}: use up to 64 letters, digits, '-' and '_'")
        if not callable(self.handler):
            raise ConfigError(f"pipeline {self.name}: the handler is {type(self.handler).__name__}, not a function")
        if self.kind not in ("message", "arrow", "pandas"):
            raise ConfigError(f"pipeline {self.name}: kind {self.kind!r} is none of message, arrow, pandas")
        if not self.checkpoint:
            raise ConfigError(f"pipeline {self.name}: name a checkpoint folder, without it nothing survives a restart")
        if self.partitions < 1 or self.concurrency < 1 or (self.batch_size is not None and self.batch_size < 1):
            raise ConfigError(f"pipeline {self.name}: partitions, concurrency and batch_size are at least 1")
        if self.key.startswith(_PAYLOAD) and self.partition_by is not None:
            raise ConfigError(f"pipeline {self.name}: with key {self.key} the partition is that of the key")
        _ = self.payload_key  # report a malformed one here
        if self.grace < 0:
            raise ConfigError(f"pipeline {self.name}: grace {self.grace} must not be negative")
        if self.trigger != "available-now":
            parse_duration(self.trigger)
        self._check_group()
        if self.group is None and self.keys_are_whole is False:
            raise ConfigError(
                f"pipeline {self.name}: partition_by {self.partition_by} splits the key {self.key}: messages of one "
                "key would be in several partitions, without order. Use tokens of the key, or leave partition_by out"
            )

    @property
    def keys_are_whole(self) -> bool | None:
        """Whether a key is always in one partition; None when a token decides: only the stream's author knows."""
        if self.partition_by is None or self.payload_key is not None:
            return True
        try:
            key = Tokens.parse(self.key)
            return Partitioning.parse(self.partition_by, self.partitions, key).keeps_whole(key)
        except ValueError as error:
            raise ConfigError(
                f"pipeline {self.name}: key {self.key}, partition_by {self.partition_by}: {error}"
            ) from None

    def _check_group(self) -> None:
        if (self.group is None) != (self.member is None):
            raise ConfigError(f"pipeline {self.name}: group and member belong together")
        if self.group is None:
            return
        theirs = {
            "subjects": bool(self.subjects),
            "partition_by": self.partition_by is not None,
            "commit": self.commit != "none",
            "durable": self.durable is not None,
            f"key {self.key}": self.key.startswith(_PAYLOAD),
        }
        if given := [name for name, is_given in theirs.items() if is_given]:
            raise ConfigError(f"pipeline {self.name}: {given[0]} does not go with group, which decides on partitions")
        if self.retries.then == "park":
            raise ConfigError(
                f"pipeline {self.name}: parking does not go with group: when a partition moves to another member, what "
                "is parked here would stay behind, and be overtaken. Use dead-letter or stop"
            )

    @property
    def payload_key(self) -> PayloadKey | None:
        """The payload field that is the key, if there is one."""
        if not self.key.startswith(_PAYLOAD):
            return None
        return PayloadKey(self.key.removeprefix(_PAYLOAD), self.partitions)

    @property
    def shape(self) -> RowShape:
        """The columns that outcome rows need: only a few when no sink stores them."""
        results = self.results.parquet is not None or self.results.write is not None
        parking = self.retries.then == "park"
        kept = self.outcomes.parquet is not None or self.outcomes.write is not None
        return RowShape(counted=not (kept or results), results=results, parking=parking)

    @property
    def group_setting(self) -> GroupSetting | None:
        """Its group and member, if it is a member of a group."""
        if self.group is None or self.member is None:
            return None
        return GroupSetting(self.group, self.member, self.group_kind)

    @property
    def scope(self) -> str:
        """The prefix of result ids: the same for all members of a group, whichever handles a message."""
        return self.name if self.group is None else self.group

    def planned(self, cores: int, measured_us: float | None = None) -> Plan:
        """The plan for this number of cores."""
        kind: Literal["plain", "async", "batch"] = "async" if is_async(self.handler) else "plain"
        if self.kind != "message":
            kind = "batch"
        return choose(PlanFacts(cores, kind, self.retries.then == "park", measured_us, self.plan))

    def source_options(self) -> dict[str, str]:
        """The options of the source, in Spark's form; without the connection, which holds secrets."""
        options = {"stream": self.stream}
        if self.group is None:
            options |= {"commit": self.commit, "numPartitions": str(self.partitions)}
        else:
            options |= {"group": self.group, "member": self.member or "", "groupKind": self.group_kind}
        optional = {
            "subjects": ",".join(self.subjects),
            "maxOffsetsPerTrigger": str(self.batch_size or ""),
            "durable": self.durable or "",
            "partitionBy": self.partition_by or "",
            "keyTokens": "" if self.payload_key is not None else self.key,
        }
        if self.commit != "purge":
            at = "startingTimestamp" if "-" in self.start_at else "startingOffsets"
            optional[at] = self.start_at
        return options | {name: text for name, text in optional.items() if text}

    def start(self, spark: Any = None) -> RunningPipeline:
        """Start it on this session, or on a new one; returns when it runs, or waits for its lease."""
        from parti.spark.pipeline.driver.query import RunningPipeline

        return RunningPipeline(self, spark).start()

    def run(self, spark: Any = None) -> None:
        """Run until it is stopped (or, with trigger available-now, until all is done); raises its failure."""
        with self.start(spark) as running:
            running.wait()
