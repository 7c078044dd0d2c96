"""`parti bench range`: the range reader beside the raw-socket bound and beside nats-py's `fetch`.

Against `fetch` the goal is on the client's CPU time: on a busy machine rates show how much CPU the *server* gets, and
at load 15 not even the raw socket is ten times as fast as `fetch`. Measured at load 10: 52 times less CPU at 128 B, 23
at 1 KiB, where copying counts; the goal leaves a third as margin for the machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from uuid import uuid4

from parti.errors import DataLoss
from parti.testing import NatsServer
from parti.wire.options import ConnectOptions
from parti.wire.ranges import RangeReader
from parti_lab.bench.goals import Figure
from parti_lab.bench.load import best_rate, create_stream, delete_stream, fetch_read, fill, raw_read
from parti_lab.bench.report import Benchmark, ExperimentOption, RunContext

_COLUMNS = ("subject", "sequence", "timestamp", "data")
_CASES = tuple((storage, size) for storage in ("file", "memory") for size in (128, 1024))
_FETCHED = 20_000  # nats-py reaches about 30,000 messages per second: enough to measure, short enough to wait for


def run(ctx: RunContext) -> dict[str, Figure]:
    """Fill, then read each stream by each method, interleaved, best of several runs."""
    count = int(ctx.options["messages"]) // (4 if ctx.quick else 1)
    runs = 2 if ctx.quick else 4
    figures: dict[str, Figure] = {"messages": count}
    with NatsServer() as server, ctx.progress("range", total=len(_CASES) * (count + 3 * runs)) as advance:
        options = ConnectOptions(servers=(server.url,))
        for storage, size in _CASES:
            stream = f"bench-{uuid4().hex[:8]}"
            create_stream(options, stream, storage)
            fill(options, stream, count, size, advance=advance)
            rates, cpu = _measure(options, stream, count, size, runs)
            advance(3 * runs)
            delete_stream(options, stream)
            label = f"{storage}_{size}"
            figures |= {f"{label}_{name}_per_s": round(rate) for name, rate in rates.items()}
            figures[f"{label}_of_raw"] = round(rates["range"] / rates["raw"], 3)
            figures[f"{label}_of_fetch"] = round(rates["range"] / rates["fetch"], 1)
            figures[f"{label}_cpu_us"] = round(cpu["range"] * 1e6, 2)
            figures[f"{label}_cpu_of_fetch"] = round(cpu["fetch"] / cpu["range"], 1)
    figures["worst_of_raw"] = min(float(figures[f"{s}_{n}_of_raw"]) for s, n in _CASES)
    figures["worst_of_fetch"] = min(float(figures[f"{s}_{n}_of_fetch"]) for s, n in _CASES)
    figures["worst_cpu_of_fetch"] = min(float(figures[f"{s}_{n}_cpu_of_fetch"]) for s, n in _CASES)
    return figures


def _measure(
    options: ConnectOptions, stream: str, count: int, size: int, runs: int
) -> tuple[dict[str, float], dict[str, float]]:
    """The best rate of each method, and the client's lowest CPU-seconds per message."""
    reader = RangeReader(options)
    fetched = min(count, _FETCHED)
    methods: dict[str, tuple[int, Callable[[], None]]] = {
        "raw": (count, lambda: raw_read(options, stream, size)),
        "range": (count, lambda: _read_all(reader, stream, count)),
        "fetch": (fetched, lambda: fetch_read(options, stream, fetched)),
    }
    rates, cpu = dict.fromkeys(methods, 0.0), dict.fromkeys(methods, 1.0)
    for _ in range(runs):
        for name, (messages, read) in methods.items():
            began = time.process_time()
            rates[name] = max(rates[name], best_rate(messages, 1, read))
            cpu[name] = min(cpu[name], (time.process_time() - began) / messages)
    reader.close()
    return rates, cpu


def _read_all(reader: RangeReader, stream: str, count: int) -> None:
    read = sum(batch.num_rows for batch in reader.read(stream, 0, count, columns=_COLUMNS))
    if read != count:
        raise DataLoss(f"read {read} of {count}", stream=stream, first_missing=read, first_available=1)


BENCH = Benchmark(
    name="range",
    help="Range reader to Arrow beside the raw-socket bound and nats-py fetch; file and memory, 128 B and 1 KiB.",
    run=run,
    goals={"worst_of_raw": ">= 0.6", "worst_cpu_of_fetch": ">= 15"},
    options=(ExperimentOption("messages", 400_000, "messages per stream"),),
)
