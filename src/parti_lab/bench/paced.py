"""A publisher in its own process that holds a rate: `python -m parti_lab.bench.paced ...` prints the rate it reached.

Each message carries its send time. The last message of each tick waits for its ack, because without waiting the server
drops what it cannot queue.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time

from parti.wire.blocking import BlockingConnection
from parti.wire.options import ConnectOptions

_TICK = 0.005  # seconds; shorter ticks cost more than they smooth
TIME_BYTES = 16  # hexadecimal digits: nanoseconds of the clock that all processes of a machine share
_PATIENCE = 30.0  # seconds for an ack: with an overloaded server the rate is not held, but the run does not fail


def publish(
    url: str, stream: str, subjects: int, rate: float, seconds: float, size: int, seed: int
) -> dict[str, float]:
    """Publish at `rate` per second for `seconds`, spread at random over the subjects `<stream>.<n>`."""
    rng = random.Random(seed)
    prefix, padding = stream.encode(), b"x" * max(0, size - TIME_BYTES)
    length = TIME_BYTES + len(padding)
    sent, started, pause = 0, time.monotonic(), threading.Event()
    with BlockingConnection.open(ConnectOptions(servers=(url,), request_timeout=_PATIENCE)) as connection:
        while (elapsed := time.monotonic() - started) < seconds:
            due = int(rate * (elapsed + _TICK)) - sent
            if due > 0:
                now = b"%0*x" % (TIME_BYTES, time.monotonic_ns())
                frames = [
                    b"PUB %s.%d %d\r\n%s%s\r\n" % (prefix, rng.randrange(subjects), length, now, padding)
                    for _ in range(due - 1)
                ]
                connection.send(b"".join(frames))
                connection.request(f"{stream}.{rng.randrange(subjects)}", now + padding)
                sent += due
            pause.wait(max(0.0, started + (sent / rate) - time.monotonic()))
        stored = int(connection.api(f"STREAM.INFO.{stream}")["state"]["messages"])
    return {"sent": sent, "stored": stored, "seconds": time.monotonic() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("stream")
    for name, kind in (("subjects", int), ("rate", float), ("seconds", float), ("size", int), ("seed", int)):
        parser.add_argument(name, type=kind)
    asked = parser.parse_args()
    print(
        json.dumps(publish(asked.url, asked.stream, asked.subjects, asked.rate, asked.seconds, asked.size, asked.seed))
    )


if __name__ == "__main__":
    main()
