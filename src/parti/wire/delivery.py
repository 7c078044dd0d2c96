"""The metadata in the ack subject of a delivered message."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Delivery:
    """The position of a message in its stream and in its consumer."""

    stream: str
    consumer: str
    delivered: int
    """How often it was delivered, including this time."""
    stream_seq: int
    consumer_seq: int
    time_ns: int
    pending: int
    """How many messages the consumer has left after this one."""


def parse_delivery(reply: str) -> Delivery | None:
    """From `$JS.ACK.<stream>...` (9 tokens) or `$JS.ACK.<domain>.<account>.<stream>...` (11 or more); else None."""
    tokens = reply.split(".")
    if len(tokens) < 9 or tokens[0] != "$JS" or tokens[1] != "ACK":
        return None
    at = 2 if len(tokens) == 9 else 4
    if len(tokens) < at + 7:
        return None
    try:
        delivered, stream_seq, consumer_seq, time_ns, pending = (int(token) for token in tokens[at + 2 : at + 7])
    except ValueError:
        return None
    return Delivery(tokens[at], tokens[at + 1], delivered, stream_seq, consumer_seq, time_ns, pending)
