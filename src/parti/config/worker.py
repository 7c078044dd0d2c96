"""The [worker] section: one durable consumer per worker. Names and defaults: docs/requirements.md#settings."""

from __future__ import annotations

from typing import Annotated, Literal

from parti import defaults
from parti.config.setting import Section, Setting, Unit
from parti.config.units import format_duration, parse_duration
from parti.errors import ConfigError
from parti.subjects import validate_subject, validate_token


class WorkerConfig(Section, frozen=True, kw_only=True):
    """How a worker reads its partitions. `stream` must be set; every other default carries its reason.

    The server's own `max_deliver` stays unlimited: the server silently skips a message that has reached it. parti
    counts the attempts, and the last failed one puts the message into the dead-letter stream.
    """

    stream: Annotated[str, Setting("stream to consume; has no default")] = ""
    consumer_prefix: Annotated[
        str, Setting("the durable is `<prefix>-<namespace>-<worker id>`, without a manager `<prefix>-<worker id>`")
    ] = "parti"
    subject_template: Annotated[
        str, Setting("subject of a partition; {partition} is its keys joined by dots, wildcards around it are allowed")
    ] = "{partition}"
    ack_wait: Annotated[
        float,
        Setting("3 x p95 of the handler; shorter fails over faster and repeats more", Unit.DURATION, at_least=0.1),
    ] = 30.0
    max_deliver: Annotated[int, Setting("attempts before the dead-letter stream; 3 outlives a blip", at_least=1)] = (
        defaults.MAX_DELIVER
    )
    retry_delays: Annotated[
        tuple[str, ...], Setting("waits between the attempts of one message; the last one repeats")
    ] = tuple(format_duration(delay) for delay in defaults.RETRY_DELAYS)
    inactive_threshold: Annotated[
        float, Setting("a durable without pulls is removed after this; longer than any outage", Unit.DURATION)
    ] = 86_400.0
    max_waiting: Annotated[int, Setting("pulls the server keeps open for us; two are in use", at_least=2)] = 256
    max_ack_pending: Annotated[
        int, Setting("messages held at once, queued or running; 80 % of it stops the pulling", at_least=2)
    ] = 500
    max_bytes: Annotated[
        int,
        Setting(
            "bytes of messages in memory and requested; pulling stops when half of it is in memory",
            Unit.SIZE,
            at_least=1,
        ),
    ] = 64 << 20
    pull_batch_size: Annotated[
        int, Setting("first size of a pull; it then follows what the handlers manage in 100ms", at_least=1)
    ] = 50
    pull_timeout: Annotated[
        float, Setting("how long a pull waits; below the lease, or a frozen owner swallows messages", Unit.DURATION)
    ] = 5.0
    prefetch_depth: Annotated[
        int, Setting("batches requested ahead; one fills while another is processed", at_least=1)
    ] = 2
    idle_heartbeat: Annotated[
        float, Setting("a dead consumer is noticed after two of them", Unit.DURATION, at_least=0.1)
    ] = 1.0
    lanes: Annotated[
        Literal["partition", "key"], Setting("what is handled one after the other; key: tokens the wildcards matched")
    ] = "partition"
    order: Annotated[
        Literal["strict", "relaxed"], Setting("strict: a retry holds its lane; relaxed: the lane continues meanwhile")
    ] = "strict"
    concurrency: Annotated[int, Setting("handlers running at once, over all lanes", at_least=1)] = 256
    handler_timeout: Annotated[
        float, Setting("a longer running handler is cancelled and retried; 0s: never", Unit.DURATION, at_least=0)
    ] = 0.0
    drain_timeout: Annotated[
        float, Setting("how long close waits for what was received; fits into a SIGTERM grace of 10s", Unit.DURATION)
    ] = 8.0
    max_subjects: Annotated[
        int, Setting("filters of one consumer; an update costs 13ms at 500 and 200ms at 2,000", at_least=1)
    ] = 500
    allow_worker_id_change: Annotated[
        bool, Setting("off: the worker id names the durable, and with it the position")
    ] = False
    update_coalescing_window: Annotated[
        float, Setting("assignments that come within it become one update; the last wins", Unit.DURATION, at_least=0)
    ] = 0.075
    min_update_interval: Annotated[
        float,
        Setting("between two updates of the consumer; keeps a storm away from the server", Unit.DURATION, at_least=0),
    ] = 0.5
    on_empty_assignment: Annotated[
        Literal["apply-empty-filter", "pause-pull-loop"],
        Setting("no partition: a filter that matches nothing, or no pulling; never the whole stream"),
    ] = "apply-empty-filter"
    start: Annotated[
        Literal["all", "new"], Setting("where a partition of unknown position begins; all loses nothing")
    ] = "all"
    max_recreation_retries: Annotated[
        int, Setting("tries to recreate a deleted consumer before it is reported; parti keeps trying", at_least=1)
    ] = 6
    health_failure_threshold: Annotated[
        int, Setting("failures within the window that make the worker unhealthy, and refresh it once", at_least=1)
    ] = 3
    health_window: Annotated[float, Setting("the window of those failures", Unit.DURATION, at_least=1)] = 60.0
    stall_limit: Annotated[
        float,
        Setting(
            "a handler that runs for longer, or work of which nothing gets done, is a stall", Unit.DURATION, at_least=1
        ),
    ] = 120.0
    unhealthy_limit: Annotated[
        float,
        Setting(
            "unhealthy for longer: the partitions go to others, a worker process ends; 0s: never",
            Unit.DURATION,
            at_least=0,
        ),
    ] = 300.0
    catch_up: Annotated[
        Literal["auto", "never"], Setting("auto: range reads when a file stream with many filters has a backlog")
    ] = "auto"
    catch_up_lag: Annotated[
        int, Setting("lag in the stream from which range reads take over; the cliff begins near 2,000", at_least=100)
    ] = 10_000

    def __post_init__(self) -> None:
        super().__post_init__()
        for delay in self.retry_delays:
            parse_duration(delay)
        if not self.retry_delays:
            raise ConfigError("worker.retry_delays is empty: give at least one wait, such as 2s")
        if "{partition}" not in self.subject_template:
            raise ConfigError(
                f"worker.subject_template {self.subject_template!r} lacks {{partition}}: every partition would be all"
            )
        validate_subject(self.subject_template, wildcards=True, what="worker.subject_template")
        validate_token(self.consumer_prefix, what="worker.consumer_prefix")
        if self.pull_timeout < 2 * self.idle_heartbeat:
            raise ConfigError(
                f"worker.pull_timeout ({self.pull_timeout:g}s) must be at least twice worker.idle_heartbeat "
                f"({self.idle_heartbeat:g}s): the server refuses such a pull"
            )

    @property
    def delays(self) -> tuple[float, ...]:
        """`retry_delays` in seconds."""
        return tuple(parse_duration(delay) for delay in self.retry_delays)

    @property
    def capacity(self) -> int:
        """Maximum number of held messages: 80 % of max_ack_pending, so that the server never pauses delivery."""
        return max(1, self.max_ack_pending * 8 // 10)
