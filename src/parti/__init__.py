"""parti: partitioned, ordered, elastic consumption of NATS JetStream."""

__version__ = "0.1.0"
