"""Every default that a configuration section and a value type share, once, with its reason. Seconds unless it says.

Sections of `parti.config` and the types that they become (`ConnectOptions`, `Backoff`, `LeaseTerms`, `HandoffTerms`,
`RetryPolicy` ...) read them here. No imports: processes that need neither (Spark's) stay small.
"""

from typing import Final

# Connections.
SERVER: Final = "nats://127.0.0.1:4222"
INBOX_PREFIX: Final = "_INBOX"
CONNECTION_NAME: Final = "parti"
CONNECT_TIMEOUT: Final = 2.0  # a LAN answers in milliseconds; the next server of the list gets its turn soon
REQUEST_TIMEOUT: Final = 5.0  # the `nats` CLI's default; a leader election takes up to 6 s, so callers retry
# nats-py gives up after 60 tries and then stays closed for good (docs/evidence/jetstream.md#j19)
MAX_RECONNECTS: Final = -1
RECONNECT_WAIT: Final = 0.25  # short against a lease of seconds; nats-py's 2 s would cost most of one
PING_INTERVAL: Final = 10.0  # a half-open connection is noticed after this x MAX_OUTSTANDING_PINGS
MAX_OUTSTANDING_PINGS: Final = 2

# Tries of a call to the control plane.
RETRY_BASE: Final = 0.2  # longer than a leader's hiccup, short against a lease of seconds
RETRY_MULTIPLIER: Final = 1.6
RETRY_MAX: Final = 5.0  # a SIGKILLed stream leader is replaced within 5-6 s (docs/evidence/cluster.md#c2)
MAX_TRIES: Final = 6  # about 4 s of waiting in all

# Tries of a message.
MAX_DELIVER: Final = 3
RETRY_DELAYS: Final = (2.0, 5.0, 15.0)

# Leases.
LEASE_TTL: Final = 6.0  # a crash is covered one TTL later; below three renewals a single lost packet costs the lease
LEASE_RENEWAL: Final = 2.0  # two renewals may be lost before the lease is
LEASE_MARGIN: Final = 0.3  # covers a clock that is 5 % off over one TTL, and the pause between a check and its effect

# Rebalances and moves.
COLD_START_WINDOW: Final = 10.0  # after the very first assignment: a fleet of pods starts within this
PLANNED_WINDOW: Final = 2.0  # a rolling start joins several times a second; a move costs milliseconds, so no longer
REBALANCE_COOLDOWN: Final = 2.0  # least time between two planned rebalances
PREPARE_TIMEOUT: Final = 2.0  # a filter update of 500 subjects takes 16 ms, a slow handler seconds
PREPARE_RETRIES: Final = 3  # docs/requirements.md#r-111
COMMIT_TIMEOUT: Final = 1.0  # an accept is one CAS
COMMIT_RETRIES: Final = 5  # docs/requirements.md#r-111
