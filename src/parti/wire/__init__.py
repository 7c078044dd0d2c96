"""All that touches NATS: connections, raw JetStream API calls, key-value buckets, the error table, range reads.

Promises: an answer is complete and in order, or an error with a name; no caller sees an error of the client library.

Flow: `connect` or `live` -> `frames` -> `pull`, `ranges` or `watch` -> items; `publisher` and `acks` the other way.
"""
