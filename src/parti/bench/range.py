"""`parti bench range`: the range reader beside the raw-socket bound and beside nats-py's `fetch`."""

from __future__ import annotations

from uuid import uuid4

from parti.bench.goals import Figure
from parti.bench.load import best_rate, create_stream, delete_stream, fetch_read, fill, raw_read
from parti.bench.report import Benchmark, Option, RunContext
from parti.errors import DataLoss
from parti.testing import NatsServer
from parti.wire.options import ConnectOptions
from parti.wire.ranges import RangeReader

_COLUMNS = ("subject", "sequence", "timestamp", "data")
_CASES = tuple((storage, size) for storage in ("file", "memory") for size in (128, 1024))
_FETCHED = 20_000  # nats-py manages some 30,000 messages a second: enough to measure, short enough to wait for


def run(ctx: RunContext) -> dict[str, Figure]:
    """Fill, then read each stream by each method, interleaved, best of some runs."""
    count = int(ctx.options["messages"]) // (4 if ctx.quick else 1)
    runs = 2 if ctx.quick else 4
    figures: dict[str, Figure] = {"messages": count}
    with NatsServer() as server, ctx.progress("range", total=len(_CASES) * (count + 3 * runs)) as advance:
        options = ConnectOptions(servers=(server.url,))
        for storage, size in _CASES:
            stream = f"bench-{uuid4().hex[:8]}"
            create_stream(options, stream, storage)
            fill(options, stream, count, size, advance=advance)
            rates = _measure(options, stream, count, size, runs)
            advance(3 * runs)
            delete_stream(options, stream)
            label = f"{storage}_{size}"
            figures |= {f"{label}_{name}_per_s": round(rate) for name, rate in rates.items()}
            figures[f"{label}_of_raw"] = round(rates["range"] / rates["raw"], 3)
            figures[f"{label}_of_fetch"] = round(rates["range"] / rates["fetch"], 1)
    figures["worst_of_raw"] = min(float(figures[f"{s}_{n}_of_raw"]) for s, n in _CASES)
    figures["worst_of_fetch"] = min(float(figures[f"{s}_{n}_of_fetch"]) for s, n in _CASES)
    return figures


def _measure(options: ConnectOptions, stream: str, count: int, size: int, runs: int) -> dict[str, float]:
    reader = RangeReader(options)
    rates = {"raw": 0.0, "range": 0.0, "fetch": 0.0}
    fetched = min(count, _FETCHED)
    for _ in range(runs):
        rates["raw"] = max(rates["raw"], best_rate(count, 1, lambda: raw_read(options, stream, size)))
        rates["range"] = max(rates["range"], best_rate(count, 1, lambda: _read_all(reader, stream, count)))
        rates["fetch"] = max(rates["fetch"], best_rate(fetched, 1, lambda: fetch_read(options, stream, fetched)))
    reader.close()
    return rates


def _read_all(reader: RangeReader, stream: str, count: int) -> None:
    read = sum(batch.num_rows for batch in reader.read(stream, 0, count, columns=_COLUMNS))
    if read != count:
        raise DataLoss(f"read {read} of {count}", stream=stream, first_missing=read, first_available=1)


BENCH = Benchmark(
    name="range",
    help="Range reader to Arrow beside the raw-socket bound and nats-py fetch; file and memory, 128 B and 1 KiB.",
    run=run,
    goals={"worst_of_raw": ">= 0.6", "worst_of_fetch": ">= 10"},
    options=(Option("messages", 400_000, "messages per stream"),),
)
