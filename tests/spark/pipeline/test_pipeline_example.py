"""The example on a realistic feed runs as printed, from TOML, and its windows add up."""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parti.spark.pipeline.driver.load import load
from parti.testing import NatsServer
from parti.wire.options import ConnectOptions
from parti.wire.ranges import RangeReader

pytestmark = [pytest.mark.spark, pytest.mark.slow]
EXAMPLE = Path(__file__).parents[3] / "examples" / "ordered"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield
    for name in ("feed", "app", "windows"):
        sys.modules.pop(name, None)


def test_the_feed_is_skewed_bursty_and_has_large_late_and_broken_orders(example: Any) -> None:
    from feed import events  # type: ignore[import-not-found]

    made = list(events(20_000, 5_000, seed=1))
    customers = Counter(customer for customer, _ in made)
    assert customers.most_common(1)[0][1] > len(made) / 10
    assert len(customers) > 500
    assert 5 < sum(not body.endswith(b"}") for _, body in made) < 60
    assert max(len(body) for _, body in made) > 40_000


def test_the_pipeline_of_the_example_enriches_every_order_and_the_windows_add_up(
    example: Any, own_server: NatsServer, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from feed import publish
    from windows import revenue  # type: ignore[import-not-found]

    monkeypatch.chdir(tmp_path)
    publish(own_server.url, "orders", 3_000, 500, seed=2)
    nats = ConnectOptions(servers=(own_server.url,))
    pipeline = load(str(EXAMPLE / "pipeline.toml"), nats)
    with replace(pipeline, trigger="available-now").start(spark) as running:
        assert running.wait(100)
        totals = running.totals
    reader = RangeReader(nats)
    last = reader.state("orders-enriched").last_seq
    parts = reader.read("orders-enriched", 0, last, columns=("data",))
    enriched = [json.loads(value) for part in parts for value in part.column("data").to_pylist()]
    reader.close()
    assert totals.done + totals.dead_lettered == 3_000
    assert len(enriched) == totals.done > 2_980
    by_customer: dict[str, list[int]] = defaultdict(list)
    for order in enriched:
        by_customer[order["customer"]].append(order["order"])
    assert all(orders == sorted(orders) for orders in by_customer.values())

    writer = revenue(spark, own_server.url, "orders-enriched").writeStream.format("memory").queryName("revenue")
    writer = writer.outputMode("complete").option("checkpointLocation", str(tmp_path / "windows"))
    assert writer.trigger(availableNow=True).start().awaitTermination(100)
    rows = spark.table("revenue").collect()
    assert sum(row.cents for row in rows) == sum(order["cents"] for order in enriched)
    assert sum(row.orders for row in rows) == len(enriched)
