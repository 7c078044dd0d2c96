"""The proof and the benchmark of delivery, in their small sizes."""

from __future__ import annotations

import pytest

from parti_lab.bench.report import RunContext, execute
from parti_lab.prove.delivery import PROOF


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nothing_is_lost_or_out_of_order_while_endpoints_workers_and_the_server_misbehave() -> None:
    result = execute(PROOF, RunContext(quick=True, seed=7))
    assert result.ok, result.missed or result.figures


def test_an_engine_that_is_none_is_told_before_anything_starts() -> None:
    # `--engine spark` itself takes minutes; tests/spark has what it is made of.
    result = execute(PROOF, RunContext(quick=True, seed=7, options={"engine": "flink"}))
    assert "choose async or spark" in str(result.figures["error"])
