"""Types of the names that `parti` loads when they are first used; compared with them by a test."""

from parti.control.assign import (
    ConsistentHash,
    RoundRobin,
    Sticky,
    Strategy,
    WeightedConsistentHash,
)
from parti.errors import (
    ConfigError,
    PartiError,
    UsageError,
)
from parti.manager import (
    AlertLevel,
    CallableSource,
    ControlConfig,
    Hooks,
    KvSource,
    Manager,
    ManagerState,
    PartitionSource,
    SlotSource,
    StaticSource,
    SubjectSource,
)
from parti.wire.api import (
    JetStreamApi,
)
from parti.wire.connect import (
    Connection,
    connect,
)
from parti.wire.options import (
    ConnectOptions,
)
from parti.worker import (
    Ack,
    Handler,
    Lease,
    Message,
    Outcome,
    Partition,
    Reject,
    Retry,
    WorkerConfig,
    WorkerConsumer,
    WorkerHealth,
    WorkerInfo,
)

__version__: str

__all__ = [
    "Ack",
    "AlertLevel",
    "CallableSource",
    "ConfigError",
    "ConnectOptions",
    "Connection",
    "ConsistentHash",
    "ControlConfig",
    "Handler",
    "Hooks",
    "JetStreamApi",
    "KvSource",
    "Lease",
    "Manager",
    "ManagerState",
    "Message",
    "Outcome",
    "PartiError",
    "Partition",
    "PartitionSource",
    "Reject",
    "Retry",
    "RoundRobin",
    "SlotSource",
    "StaticSource",
    "Sticky",
    "Strategy",
    "SubjectSource",
    "UsageError",
    "WeightedConsistentHash",
    "WorkerConfig",
    "WorkerConsumer",
    "WorkerHealth",
    "WorkerInfo",
    "__version__",
    "connect",
]
