"""The [control] section: which workers share the work, when a member counts as gone, and how partitions move.

See docs/requirements.md#r-111.
"""

from __future__ import annotations

from typing import Annotated, Literal

from parti import defaults
from parti.config.setting import Section, Setting, Unit
from parti.config.units import parse_duration
from parti.errors import ConfigError
from parti.subjects import validate_token


class ControlConfig(Section, frozen=True, kw_only=True):
    """One namespace is one group of workers that share the partitions of one stream."""

    namespace: Annotated[str, Setting("workers of one namespace share the work; two applications need two")] = "default"
    bucket_replicas: Annotated[int, Setting("of the bucket `parti-<namespace>`; 3 on a cluster", at_least=1)] = 1
    bucket_storage: Annotated[
        Literal["file", "memory"], Setting("file: positions must outlive a restart of the server")
    ] = "file"
    worker_id_prefix: Annotated[str, Setting("worker ids are `<prefix>-<number>`, as in the Go library")] = "worker"
    worker_id_min: Annotated[int, Setting("lowest number of the pool", at_least=0)] = 0
    worker_id_max: Annotated[int, Setting("highest number of the pool; one id (min = max) is a valid pool")] = 99
    instance: Annotated[
        str, Setting("name that survives restarts, such as a pod's: gets its worker id back at once")
    ] = ""
    heartbeat_interval: Annotated[
        float, Setting("between renewals of a lease; two may be lost", Unit.DURATION, at_least=0.05)
    ] = defaults.LEASE_RENEWAL
    heartbeat_ttl: Annotated[
        float, Setting("a crash is covered one TTL later; shorter takes slow machines for dead", Unit.DURATION)
    ] = defaults.LEASE_TTL
    lease_margin: Annotated[
        float, Setting("the holder stops this much early, others wait this much longer", Unit.DURATION, at_least=0)
    ] = defaults.LEASE_MARGIN
    cold_start_window: Annotated[
        float, Setting("after the first assignment, joins are gathered for this long", Unit.DURATION, at_least=0)
    ] = defaults.COLD_START_WINDOW
    planned_scale_window: Annotated[
        float,
        Setting(
            "a rebalance waits for this long without a join, five times at most; a crash never waits",
            Unit.DURATION,
            at_least=0,
        ),
    ] = defaults.PLANNED_WINDOW
    rebalance_cooldown: Annotated[
        float, Setting("least time between two planned rebalances; a crash never waits", Unit.DURATION, at_least=0)
    ] = defaults.REBALANCE_COOLDOWN
    strategy: Annotated[
        Literal["sticky", "consistent-hash", "weighted-consistent-hash", "round-robin"],
        Setting("sticky moves the least and spreads evenly"),
    ] = "sticky"
    layout: Annotated[
        Literal["per-worker", "per-partition"],
        Setting("per-partition: for file streams with many subjects, grouped into 64 to 256 slots"),
    ] = "per-worker"
    on_stream_replaced: Annotated[
        Literal["start-over", "stop"],
        Setting("if the stream was recreated, restored or replaced: process it from its beginning, or end"),
    ] = "start-over"
    prepare_timeout: Annotated[
        float, Setting("for the next owner to be ready and the old one to stop", Unit.DURATION, at_least=0.05)
    ] = defaults.PREPARE_TIMEOUT
    prepare_retries: Annotated[int, Setting("nudges before a move is aborted; R-111", at_least=0)] = (
        defaults.PREPARE_RETRIES
    )
    commit_timeout: Annotated[
        float, Setting("for the next owner to accept; one write", Unit.DURATION, at_least=0.05)
    ] = defaults.COMMIT_TIMEOUT
    commit_retries: Annotated[int, Setting("nudges before a move is rolled back; R-111", at_least=0)] = (
        defaults.COMMIT_RETRIES
    )
    parallel_moves: Annotated[int, Setting("partitions on the move at once", at_least=1)] = 256
    checkpoint_every: Annotated[
        float, Setting("a crash repeats at most this much, and what was in flight", Unit.DURATION, at_least=0.02)
    ] = 0.15
    shutdown_timeout: Annotated[
        float, Setting("for handing everything over on stop; fits into a SIGTERM grace of 10s", Unit.DURATION)
    ] = 8.0
    degraded_after: Annotated[
        float, Setting("NATS unreachable for this long is degraded mode; a reconnect takes less", Unit.DURATION)
    ] = 2.0
    recovery_grace: Annotated[
        float, Setting("after an outage members get this long to renew before they count as dead", Unit.DURATION)
    ] = 8.0
    alert_after: Annotated[
        tuple[str, ...], Setting("degraded for so long: info, warning, error and critical alert")
    ] = ("30s", "2m", "5m", "10m")
    source: Annotated[
        str, Setting("`static`, `kv:<bucket>`, or `subjects:<filter>:<token>`: where the partitions come from")
    ] = "static"
    partitions: Annotated[
        tuple[str, ...], Setting("the static source: keys joined by dots; `p-{0..63}` counts; `:<n>` is a weight")
    ] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_token(self.worker_id_prefix, what="control.worker_id_prefix")
        if self.worker_id_max < self.worker_id_min:
            raise ConfigError(
                f"control.worker_id_max ({self.worker_id_max}) is below control.worker_id_min ({self.worker_id_min})"
            )
        if self.heartbeat_ttl < 2 * self.heartbeat_interval:
            raise ConfigError(
                f"control.heartbeat_ttl ({self.heartbeat_ttl:g}s) must be at least twice control.heartbeat_interval "
                f"({self.heartbeat_interval:g}s)"
            )
        if self.lease_margin >= self.heartbeat_ttl / 4:
            raise ConfigError(f"control.lease_margin ({self.lease_margin:g}s) must be below a quarter of heartbeat_ttl")
        if len(self.alert_after) != 4:
            raise ConfigError("control.alert_after needs four times: info, warning, error, critical")
        for after in self.alert_after:
            parse_duration(after)
