"""Every default shared by a configuration section and a value type, defined once with its reason. Unit: seconds.

The sections of `parti.config` and the types built from them (`ConnectOptions`, `Backoff`, `LeaseTerms`, `HandoffTerms`,
`RetryPolicy` ...) read these values. This module imports nothing, so Spark's processes, which need neither, stay small.
"""

from typing import Final

# Connections.
SERVER: Final = "nats://127.0.0.1:4222"
INBOX_PREFIX: Final = "_INBOX"
CONNECTION_NAME: Final = "parti"
CONNECT_TIMEOUT: Final = 2.0  # a LAN answers in milliseconds; the client soon tries the next server of the list
REQUEST_TIMEOUT: Final = 5.0  # the `nats` CLI's default; a leader election takes up to 6 s, so callers retry
# nats-py gives up after 60 tries and then stays closed permanently (docs/evidence/jetstream.md#j19)
MAX_RECONNECTS: Final = -1
RECONNECT_WAIT: Final = 0.25  # short compared to a lease of seconds; nats-py's 2 s would use up most of one
PING_INTERVAL: Final = 10.0  # a half-open connection is noticed after this x MAX_OUTSTANDING_PINGS
MAX_OUTSTANDING_PINGS: Final = 2

# Retries of a control-plane call.
RETRY_BASE: Final = 0.2  # longer than a leader's hiccup, short compared to a lease of seconds
RETRY_MULTIPLIER: Final = 1.6
RETRY_MAX: Final = 5.0  # a SIGKILLed stream leader is replaced within 5-6 s (docs/evidence/cluster.md#c2)
MAX_TRIES: Final = 6  # about 4 s of waiting in total

# Delivery attempts of a message.
MAX_DELIVER: Final = 3
RETRY_DELAYS: Final = (2.0, 5.0, 15.0)

# Leases.
LEASE_TTL: Final = 6.0  # a crash is noticed after one TTL; below three renewals a single lost packet costs the lease
LEASE_RENEWAL: Final = 2.0  # two renewals may be lost before the lease expires
LEASE_MARGIN: Final = 0.3  # covers a clock that is 5 % off over one TTL, and the delay between a check and its effect

# Rebalances and moves.
COLD_START_WINDOW: Final = 10.0  # after the very first assignment: a fleet of pods starts within this time
PLANNED_WINDOW: Final = 2.0  # a rolling start adds several members per second; a move costs milliseconds, so no longer
REBALANCE_COOLDOWN: Final = 2.0  # minimum time between two planned rebalances
PREPARE_TIMEOUT: Final = 2.0  # a filter update of 500 subjects takes 16 ms, a slow handler seconds
PREPARE_RETRIES: Final = 3  # docs/requirements.md#r-111
COMMIT_TIMEOUT: Final = 1.0  # an accept is one CAS
COMMIT_RETRIES: Final = 5  # docs/requirements.md#r-111
