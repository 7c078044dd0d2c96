"""The proof and the benchmark of the worker plane, in a small size."""

from __future__ import annotations

import pytest

from parti_lab.bench.fleet import BENCH
from parti_lab.bench.report import RunContext, execute
from parti_lab.prove.deletion import PROOF


@pytest.mark.slow
def test_workers_whose_consumers_are_deleted_lose_and_repeat_nothing() -> None:
    result = execute(PROOF, RunContext(seed=3, options={"trials": 25, "rate": 300.0}))
    assert result.ok, result.figures
    assert result.figures["trials"] == 25


@pytest.mark.slow
def test_the_fleet_benchmark_measures_every_rate_and_the_backlog() -> None:
    options = {"workers": 3, "subjects": 10, "rate": "500,1000", "seconds": 1.0, "backlog": 20_000}
    result = execute(BENCH, RunContext(seed=1, options=options))
    figures = result.figures
    assert figures["backlog_handled"] == 20_000
    assert figures["worst_redelivery_ratio"] == 0
    for storage in ("memory", "file"):
        assert int(str(figures[f"{storage}_500_handled"])) >= 490
        assert float(str(figures[f"{storage}_1000_p99_ms"])) > 0
