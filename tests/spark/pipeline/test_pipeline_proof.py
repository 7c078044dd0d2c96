"""`parti prove pipeline` in a small size: a frozen driver is fenced, a standby takes over, and the control fails."""

from __future__ import annotations

import pytest

from parti_lab.bench.report import RunContext, execute
from parti_lab.prove.pipeline import PROOF

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.mark.timeout(600)
def test_the_proof_holds_in_small_and_its_control_does_not() -> None:
    result = execute(PROOF, RunContext(quick=True, seed=3, options={"messages": 1_000}))
    assert result.ok, result.missed or result.figures
    epochs = result.figures["epochs"]
    assert isinstance(epochs, int)
    assert epochs >= 2
    assert result.figures["results"] == result.figures["messages"] == 2_000
