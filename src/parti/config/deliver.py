"""The [deliver] section: tasks to HTTP endpoints, in order per document; names as in docs/requirements.md#r-301."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Literal

from parti.config.setting import Section, Setting, Unit
from parti.config.units import parse_duration
from parti.errors import ConfigError


class DeliverSection(Section, frozen=True, kw_only=True):
    """How tasks are delivered; every default carries its reason."""

    stream: Annotated[str, Setting("stream of delivery tasks; named by R-301")] = "TRIGGERS"
    durable: Annotated[str, Setting("durable consumer; named by R-301")] = "TriggerDeliveryWorker"
    partitions: Annotated[
        int, Setting("1: one active process, others stand by; more: processes share them", at_least=1, at_most=256)
    ] = 1
    subjects: Annotated[
        Literal["trusted", "checked"],
        Setting("with several partitions: checked refuses a task on a subject that is not its document's"),
    ] = "checked"
    ack_wait: Annotated[
        float, Setting("R-301; heartbeats every third of it, so only a dead process lets it pass", Unit.DURATION)
    ] = 30.0
    max_ack_pending: Annotated[int, Setting("tasks held at once, waiting ones included", at_least=16)] = 2000
    max_bytes: Annotated[
        int, Setting("bytes of tasks held at once; large tasks of a host that hangs fill no memory", Unit.SIZE)
    ] = 16 << 20
    concurrency: Annotated[int, Setting("requests at once, over all hosts", at_least=1)] = 256
    host_concurrency: Annotated[int, Setting("requests at once to one host; few endpoints take more", at_least=1)] = 32
    connect_timeout: Annotated[
        float, Setting("for the connection; a healthy host answers within one", Unit.DURATION)
    ] = 3.0
    dns_timeout: Annotated[
        float, Setting("for the look-up of a host's name; a later one spends no attempt", Unit.DURATION)
    ] = 3.0
    total_timeout: Annotated[
        float, Setting("for the whole request, unless the task says otherwise; at most 30s", Unit.DURATION, at_most=30)
    ] = 10.0
    schedule: Annotated[
        tuple[str, ...], Setting("waits between attempts: 9 attempts over 10 hours, quick first, patient later")
    ] = ("1s", "5s", "30s", "2m", "10m", "1h", "3h", "6h")
    jitter: Annotated[
        float, Setting("each wait is this part shorter or longer; retries of many tasks must not meet", at_most=0.5)
    ] = 0.2
    retry_after_max: Annotated[
        float, Setting("an endpoint's Retry-After lengthens a wait up to this", Unit.DURATION)
    ] = 3600.0
    max_task_age: Annotated[float, Setting("an older task is not tried again", Unit.DURATION)] = 86_400.0
    retry_statuses: Annotated[
        tuple[int, ...], Setting("4xx that are tried again; 5xx always are, other 4xx and 3xx never")
    ] = (408, 425, 429)
    order: Annotated[
        Literal["block", "park", "skip", "latest"], Setting("what a failed task does to later ones of its document")
    ] = "block"
    block_for: Annotated[
        float, Setting("how long a document waits in memory before it is parked", Unit.DURATION, at_least=0)
    ] = 60.0
    block_queue: Annotated[int, Setting("tasks of one document in memory before it is parked", at_least=1)] = 100
    lane_per_trigger: Annotated[
        bool, Setting("on: each trigger of a document has an order of its own; off, as R-302 says")
    ] = False
    triggers: Annotated[
        tuple[str, ...], Setting('rules by trigger id, such as "billing: order=park rate=10 concurrency=4"; * is any')
    ] = ()
    max_task: Annotated[int, Setting("a larger task goes to the dead letters", Unit.SIZE)] = 1 << 20
    max_body: Annotated[int, Setting("a larger request body goes to the dead letters", Unit.SIZE)] = 256 << 10
    max_response: Annotated[int, Setting("read of a response at most; the rest is cut off", Unit.SIZE)] = 64 << 10
    allow_ports: Annotated[tuple[int, ...], Setting("ports a task may address; the web's own")] = (80, 443)
    allow_addresses: Annotated[
        tuple[str, ...], Setting("private networks that may be addressed, such as 10.1.0.0/16 or 10.1.2.3/32@8080")
    ] = ()
    secrets_dir: Annotated[
        str, Setting("folder with a file a secret; unset: variables PARTI_WEBHOOK_SECRET_<NAME> only")
    ] = ""
    legacy_signature: Annotated[bool, Setting("also send X-Syntrix-Signature, for receivers of before")] = False
    token_hosts: Annotated[
        tuple[str, ...], Setting("https hosts that get a task's preIssuedToken; none, as it is a credential")
    ] = ()
    breaker_calls: Annotated[int, Setting("calls before a host can count as down", at_least=1)] = 10
    breaker_window: Annotated[float, Setting("the window they are counted in", Unit.DURATION, at_least=1)] = 60.0
    breaker_ratio: Annotated[float, Setting("failed part from which a host counts as down", at_least=0.01)] = 0.5
    breaker_open: Annotated[
        float, Setting("how long nothing is sent to a host that is down, then one probe", Unit.DURATION, at_least=0.1)
    ] = 30.0
    attempt_log: Annotated[
        Literal["off", "failures", "all"], Setting("what goes to the stream <stream>_ATTEMPTS, kept for 7 days")
    ] = "failures"
    storage: Annotated[
        Literal["file", "memory"], Setting("of the streams parti makes beside the task stream; file survives a crash")
    ] = "file"
    lease: Annotated[
        int, Setting("seconds after which a silent process loses its partitions to another", at_least=2)
    ] = 6
    shutdown: Annotated[
        float, Setting("how long a stop waits for requests in flight; the rest is handed back", Unit.DURATION)
    ] = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.schedule:
            raise ConfigError("deliver.schedule is empty: give at least one wait, such as 1s")
        for wait in self.schedule:
            parse_duration(wait)
        if self.ack_wait < 1:
            raise ConfigError(
                f"deliver.ack_wait is {self.ack_wait:g}s: give at least 1s, heartbeats need a third of it"
            )

    @property
    def waits(self) -> tuple[float, ...]:
        """`schedule` in seconds."""
        return _seconds(self.schedule)


@cache
def _seconds(schedule: tuple[str, ...]) -> tuple[float, ...]:
    return tuple(parse_duration(wait) for wait in schedule)
