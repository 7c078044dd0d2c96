"""The partition source that a configuration names."""

from __future__ import annotations

from parti.config.control import ControlConfig
from parti.config.worker import WorkerConfig
from parti.errors import ConfigError
from parti.manager.sources import KvSource, PartitionSource, StaticSource, SubjectSource, expand
from parti.wire.api import JetStreamApi


def source_of(control: ControlConfig, worker: WorkerConfig, js: JetStreamApi) -> PartitionSource:
    """From `control.source`: static, kv:<bucket>, or subjects:<filter>:<token>."""
    kind, _, rest = control.source.partition(":")
    if kind == "static":
        if not control.partitions:
            raise ConfigError("control.partitions is empty: name the partitions, or set control.source")
        return StaticSource(expand(control.partitions))
    if kind == "kv" and rest:
        return KvSource(js, rest)
    if kind == "subjects":
        pattern, _, token = rest.rpartition(":")
        if not pattern or not token.isdecimal():
            raise ConfigError(
                f"control.source {control.source!r}: write subjects:<filter>:<token>, such as subjects:orders.>:2"
            )
        return SubjectSource(js, worker.stream, filter=pattern, token=int(token))
    raise ConfigError(f"control.source {control.source!r}: use static, kv:<bucket> or subjects:<filter>:<token>")
