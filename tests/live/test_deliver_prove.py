"""The proof and the benchmark of delivery, in their small sizes."""

from __future__ import annotations

import pytest

from parti.bench.report import RunContext, execute
from parti.prove.delivery import PROOF


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nothing_is_lost_or_out_of_order_while_endpoints_workers_and_the_server_misbehave() -> None:
    result = execute(PROOF, RunContext(quick=True, seed=7))
    assert result.ok, result.missed or result.figures


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_is_lost_or_out_of_order_when_a_driver_on_spark_is_killed_and_another_goes_on() -> None:
    result = execute(PROOF, RunContext(seed=7, options={"engine": "spark", "rounds": 1}))
    assert result.ok, result.missed or result.figures
