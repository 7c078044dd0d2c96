"""The JetStream API over one connection, with typed errors and the calls that nats-py lacks."""

from __future__ import annotations

from parti.wire.api_consumers import ConsumerCalls
from parti.wire.api_messages import DirectBatch, MessageCalls
from parti.wire.api_publish import Outgoing, PubAck, PublishCalls, expectations
from parti.wire.api_streams import StreamCalls
from parti.wire.stored import StoredMessage

__all__ = ["DirectBatch", "JetStreamApi", "Outgoing", "PubAck", "StoredMessage", "expectations"]


class JetStreamApi(StreamCalls, ConsumerCalls, MessageCalls, PublishCalls):
    """Every API call of parti; its groups are in the `api_*` modules.

    `prefix` and `timeout` default to those of the connection's options (JetStream domain, API prefix).
    """

    def __repr__(self) -> str:
        return f"<JetStreamApi {self.prefix} {self.connection!r}>"
