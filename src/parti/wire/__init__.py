"""All that touches NATS: connections, raw JetStream API calls, key-value buckets, the error table, range reads."""
