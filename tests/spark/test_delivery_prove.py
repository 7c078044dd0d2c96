"""The proof of delivery on Spark, in its smallest size: a driver is killed while it delivers, and another goes on."""

from __future__ import annotations

import pytest

from parti.bench.report import RunContext, execute
from parti.prove.delivery import PROOF

pytestmark = pytest.mark.spark


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_is_lost_or_out_of_order_when_a_driver_is_killed() -> None:
    result = execute(PROOF, RunContext(seed=7, options={"engine": "spark", "rounds": 1}))
    assert result.ok, result.missed or result.figures
