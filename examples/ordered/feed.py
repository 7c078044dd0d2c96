"""Publish a realistic feed of orders: a few customers buy most, orders come in bursts, some are late, some are large.

    python examples/ordered/feed.py --server nats://127.0.0.1:4222 --messages 100000

Customers follow a Zipf distribution, so the first of them has a quarter of all orders. Every tenth second is a burst of
five times the usual rate. One order in fifty is stored up to ten minutes after it happened, one in two hundred has some
50 KB of lines, and one in a thousand is not valid JSON.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice

import numpy as np
import pyarrow as pa

from parti.wire.blocking import BlockingConnection
from parti.wire.errors import StreamNameExists
from parti.wire.options import ConnectOptions
from parti.wire.outgoing import Rows, chunk_id, chunks
from parti.wire.publisher import Publisher


def events(count: int, customers: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Yield customer and order, in the order in which they are published."""
    rng = random.Random(seed)
    draws = np.random.default_rng(seed)
    ranks = np.minimum(draws.zipf(1.3, count), customers)
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    for number, rank in enumerate(ranks.tolist()):
        burst = moment.second % 10 == 0
        moment += timedelta(milliseconds=rng.expovariate(0.5 if burst else 0.1))
        happened = moment - timedelta(seconds=rng.uniform(60, 600)) if rng.random() < 0.02 else moment
        order = {
            "order": number,
            "customer": f"c{rank}",
            "happened": happened.isoformat(),
            "cents": rng.randrange(100, 50_000),
            "lines": [{"sku": f"s{rng.randrange(10_000)}", "n": 1}] * (2_000 if rng.random() < 0.005 else 1),
        }
        body = json.dumps(order).encode()
        yield f"c{rank}", body[: len(body) // 2] if rng.random() < 0.001 else body


def publish(server: str, stream: str, count: int, customers: int, seed: int) -> None:
    """Publish the feed. Every message is acknowledged when this returns."""
    options = ConnectOptions(servers=(server,))
    for name in (stream, f"{stream}-enriched"):
        try:
            with BlockingConnection.open(options) as connection:
                stored = {"name": name, "subjects": [f"{name}.>"], "allow_direct": True, "allow_atomic": True}
                connection.api(f"STREAM.CREATE.{name}", stored)
        except StreamNameExists:
            continue
    with Publisher(options, stream=stream) as publisher:
        made = events(count, customers, seed)
        parts = iter(lambda: list(islice(made, 1_000)), [])
        rows = (
            Rows(
                pa.array([body for _, body in part], pa.binary()),
                pa.array([f"{stream}.{customer}".encode() for customer, _ in part], pa.binary()),
            )
            for part in parts
        )
        for number, chunk in enumerate(chunks(rows)):
            publisher.publish(chunk, chunk_id(f"feed-{seed}", number, chunk))
        publisher.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="nats://127.0.0.1:4222")
    parser.add_argument("--stream", default="orders")
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--customers", type=int, default=5_000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    publish(asked.server, asked.stream, asked.messages, asked.customers, asked.seed)
    print(f"{asked.messages} orders of {asked.customers} customers are in the stream {asked.stream}")
