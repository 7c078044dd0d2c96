"""When to rebalance: joins are batched, a crash is handled at once."""

from __future__ import annotations

import pytest

from parti.control.pacing import Pacing, PacingTerms, RebalanceReason
from parti.errors import ConfigError

WINDOWS = PacingTerms(cold_start=10.0, planned=2.0, cooldown=5.0)


def quiet(now: float = 0.0) -> Pacing:
    return Pacing(WINDOWS).ask(now, RebalanceReason.ADOPT).sent().applied(now)


def test_joins_are_gathered_until_a_window_passed_without_one() -> None:
    pacing = quiet(0.0).ask(20.0, RebalanceReason.PLANNED_SCALE)
    assert pacing.due_at == 22.0
    assert pacing.ask(21.9, RebalanceReason.PLANNED_SCALE).due_at == pytest.approx(23.9)


def test_a_trickle_of_joins_cannot_push_the_rebalance_away_for_ever() -> None:
    pacing = quiet(0.0)
    for second in range(20, 40):
        pacing = pacing.ask(float(second), RebalanceReason.PLANNED_SCALE)
    assert pacing.due_at == 30.0, "five windows after the first"


@pytest.mark.parametrize(
    "urgent", [RebalanceReason.EMERGENCY, RebalanceReason.LEAVE, RebalanceReason.PARTITIONS, RebalanceReason.REFRESH]
)
def test_what_is_urgent_waits_for_no_window_and_no_cooldown(urgent: RebalanceReason) -> None:
    """docs/evidence/go-library.md#w11: a crash in a window waited it out, and the cooldown delayed it too."""
    pacing = quiet(19.9).ask(20.0, RebalanceReason.PLANNED_SCALE).ask(20.1, urgent)
    assert pacing.due_at <= 20.1
    assert pacing.ask(20.2, RebalanceReason.PLANNED_SCALE).reason is urgent


def test_a_refresh_waits_for_what_moves_for_a_second_at_most_and_a_crash_does_not() -> None:
    pacing = quiet(19.0).ask(20.0, RebalanceReason.REFRESH)
    assert pacing.due(20.0, moving=False)
    assert not pacing.due(20.9, moving=True)
    assert pacing.due(21.0, moving=True)
    assert pacing.ask(20.1, RebalanceReason.EMERGENCY).due(20.1, moving=True)


def test_a_cold_start_assigns_at_once_and_gathers_joins_afterwards() -> None:
    pacing = Pacing(WINDOWS).ask(0.0, RebalanceReason.COLD_START)
    assert pacing.due_at == 0.0
    pacing = pacing.sent().applied(0.1).ask(1.0, RebalanceReason.PLANNED_SCALE)
    assert pacing.due_at == pytest.approx(10.1)


def test_planned_rebalances_keep_a_cooldown() -> None:
    assert quiet(0.0).ask(1.0, RebalanceReason.PLANNED_SCALE).due_at == 5.0


def test_what_is_asked_for_while_an_assignment_is_on_its_way_is_kept() -> None:
    """The simulator's seed 142: a death heard between the write and its answer was forgotten."""
    pacing = quiet().ask(20.0, RebalanceReason.PLANNED_SCALE).sent().ask(20.1, RebalanceReason.EMERGENCY).applied(20.2)
    assert pacing.reason is RebalanceReason.EMERGENCY
    assert pacing.due_at == 20.1


def test_a_write_that_failed_is_asked_for_again() -> None:
    pacing = quiet().ask(20.0, RebalanceReason.EMERGENCY).sent()
    assert pacing.due_at == float("inf")
    assert pacing.failed(20.5).due_at == 20.5


def test_negative_windows_are_refused() -> None:
    with pytest.raises(ConfigError):
        PacingTerms(planned=-1)
