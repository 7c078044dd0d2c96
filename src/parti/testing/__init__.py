"""Real components for tests: a nats-server, a cluster of them, and a proxy that breaks connections.

Promises: every component is real, listens on loopback, and has ended when its block ends.

Flow: `binary` finds the server -> `server`, `cluster` and `proxy` run it -> `eventually` waits for a result.
"""

from parti.errors import ServerTooOld
from parti.testing.binary import find_binary
from parti.testing.cluster import NatsCluster
from parti.testing.errors import (
    NeverHappened,
    PortTaken,
    ServerNotFound,
    ServerNotRunning,
    ServerStartFailed,
    StoreInUse,
)
from parti.testing.eventually import eventually, eventually_blocking, insist, insist_blocking
from parti.testing.link import Direction
from parti.testing.proxy import FaultProxy
from parti.testing.server import NatsServer, TlsFiles

__all__ = [
    "Direction",
    "FaultProxy",
    "NatsCluster",
    "NatsServer",
    "NeverHappened",
    "PortTaken",
    "ServerNotFound",
    "ServerNotRunning",
    "ServerStartFailed",
    "ServerTooOld",
    "StoreInUse",
    "TlsFiles",
    "eventually",
    "eventually_blocking",
    "find_binary",
    "insist",
    "insist_blocking",
]
