"""parti: partitioned, ordered, elastic consumption of NATS JetStream.

A worker imports its names from here. Each name is loaded on first use: `import parti` stays cheap, and a Spark job
loads only what it uses. The types are in `__init__.pyi`.

Promises: no message is lost; the messages of a key are handled in order; a partition has one owner at a time, and its
position moves with it. The full list is in docs/guarantees.md.

Flow: NATS -> `wire` -> `worker`, `groups`, `delivery` or `spark` -> your handler -> acknowledgement; `control` decides
which worker owns which partition, and `manager` performs it.
"""

from __future__ import annotations

import importlib
from typing import Final

__version__ = "0.1.0"

_HOMES: Final = {
    "parti.manager": (
        "AlertLevel CallableSource ControlConfig Hooks KvSource Manager ManagerState PartitionSource SlotSource "
        "StaticSource SubjectSource"
    ),
    "parti.worker": (
        "Ack Handler Lease Message Outcome Partition Reject Retry WorkerConfig WorkerConsumer WorkerHealth WorkerInfo"
    ),
    "parti.control.assign": "ConsistentHash RoundRobin Sticky Strategy WeightedConsistentHash",
    "parti.wire.api": "JetStreamApi",
    "parti.wire.connect": "Connection connect",
    "parti.wire.options": "ConnectOptions",
    "parti.errors": "ConfigError PartiError UsageError",
}
_HOME_OF: Final = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = ["__version__", *_HOME_OF]


def __getattr__(name: str) -> object:
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'parti' has no attribute {name!r}")
    found: object = getattr(importlib.import_module(module), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
