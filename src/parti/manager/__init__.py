"""The control plane on real NATS: a manager per worker, partition sources, layouts, hooks.

Promises: nothing starts without a lease that its own clock says is valid; every change of a claim is a compare-and-set.

Flow: bucket -> `agent` -> `leading` (the leader) and a plane of `layouts` -> `parti.worker` or a durable per partition
-> `claim_writer` -> bucket.
"""

from parti.config.control import ControlConfig
from parti.manager.hooks import AlertLevel, Hooks, ManagerState
from parti.manager.manager import Manager
from parti.manager.slot_source import SlotSource
from parti.manager.sources import CallableSource, KvSource, PartitionSource, StaticSource, SubjectSource, expand

__all__ = [
    "AlertLevel",
    "CallableSource",
    "ControlConfig",
    "Hooks",
    "KvSource",
    "Manager",
    "ManagerState",
    "PartitionSource",
    "SlotSource",
    "StaticSource",
    "SubjectSource",
    "expand",
]
