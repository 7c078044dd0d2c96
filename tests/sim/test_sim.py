"""Whole clusters in virtual time, and broken rules that show that the simulator detects them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from parti.model import Layout, Retention
from parti.testing.sim import ClusterShape, FaultPlan, simulate
from parti.wire.pull import LivePull
from parti.worker.inbox import Inbox
from parti_lab.bench.report import RunContext, execute
from parti_lab.prove.sim import PROOF
from parti_lab.prove.sim_broken import BROKEN, Broken
from parti_lab.prove.sim_coverage import MODULES, coverage

SHAPES = {
    f"{layout}-{retention}-{lanes}": ClusterShape(
        layout, retention, lanes=lanes, failing=0.05 if lanes == "key" else 0.0
    )
    for layout in Layout
    for retention in Retention
    for lanes in ("partition", "key")
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_proof_holds_for_two_hundred_seeds_that_execute_most_of_what_ships() -> None:
    result = execute(PROOF, RunContext(seed=1000, options={"seeds": 200, "broken": 0}))
    assert result.ok, result.to_json()
    assert result.figures["seeds"] == 200


@pytest.mark.parametrize("seed", range(30))
def test_a_seed_keeps_every_promise(seed: int) -> None:
    outcome = simulate(seed)
    assert outcome.ok, outcome.story()


@pytest.mark.parametrize("seed", [1458, 1962, 3903, 6184, 6567, 6884])
def test_a_seed_that_broke_a_promise_keeps_it_now(seed: int) -> None:
    """Lost claims forgot what was done ahead, and whose filter kept messages alive; moves were tried again at once."""
    outcome = simulate(seed)
    assert outcome.ok, outcome.story()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_records_that_are_removed_and_damaged_lose_and_repeat_nothing(shape: ClusterShape, seed: int) -> None:
    """Nobody crashes: whatever was lost, somebody knows it and writes it again."""
    outcome = simulate(seed, shape=shape, plan=FaultPlan(crashes=False, weather=False, events=12, tampering=True))
    assert outcome.ok, outcome.story()
    assert outcome.verdict.duplicated == 0 or outcome.unclean


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_joins_leaves_and_restarts_repeat_nothing(shape: ClusterShape, seed: int) -> None:
    outcome = simulate(seed, shape=shape, plan=FaultPlan(crashes=False, weather=False, events=8, tampering=False))
    assert outcome.ok, outcome.story()
    assert outcome.verdict.duplicated == 0


def test_on_a_quiet_network_less_than_half_a_percent_of_the_writes_conflict() -> None:
    outcomes = [simulate(s, plan=FaultPlan(crashes=False, weather=False, events=8, tampering=False)) for s in range(20)]
    assert sum(o.handoffs.get("success", 0) for o in outcomes) > 100
    assert sum(o.cas_conflicts for o in outcomes) < 0.005 * sum(o.cas_writes for o in outcomes)


def test_the_same_seed_gives_the_same_event_log_also_in_another_process() -> None:
    first = simulate(11)
    assert simulate(11).digest == first.digest
    assert simulate(12).digest != first.digest
    code = "from parti.testing.sim import simulate; print(simulate(11).digest)"
    other = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert other.stdout.strip() == first.digest


NO_GAP_RULE = BROKEN[0]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rule", BROKEN, ids=lambda rule: rule.name)
def test_a_broken_rule_of_the_shipped_code_is_noticed(rule: Broken) -> None:
    assert rule.found() is not None


def test_sixteen_rules_and_more_are_broken_on_purpose_and_made_whole_again() -> None:
    assert len({rule.name for rule in BROKEN}) == len(BROKEN) >= 16
    before = LivePull._in_sequence
    with NO_GAP_RULE.broken():
        assert LivePull._in_sequence is not before
    assert LivePull._in_sequence is before


def test_a_failing_seed_tells_a_short_story() -> None:
    failure = NO_GAP_RULE.found()
    assert failure is not None
    story = failure.story()
    assert f"seed {failure.seed} (per-worker, limits) broke a promise:" in story
    assert "granted" in story
    assert len(story.splitlines()) <= 70
    assert "all promises held" in simulate(0, plan=FaultPlan(events=0)).story()


def test_the_proof_fails_and_names_the_seed_when_a_rule_is_broken(capsys: pytest.CaptureFixture[str]) -> None:
    with NO_GAP_RULE.broken():
        result = execute(PROOF, RunContext(seed=0, options={"seeds": 24, "broken": 0}))
    assert not result.ok
    assert f"--seed {result.figures['first_failed']}" in capsys.readouterr().err


def test_the_proof_says_which_shipped_lines_it_executed() -> None:
    found = coverage(lambda: [simulate(seed) for seed in range(2 * len(SHAPES))])
    assert set(found) == set(MODULES)
    assert all(0 < ran <= lines for name, (ran, lines) in found.items() if name != "manager.layouts.conflicts"), found
    assert coverage(lambda: None)["worker.inbox"][0] == 0, "what is not run does not count"


def test_what_nobody_expected_in_shipped_code_breaks_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Inbox, "take", take)
    outcome = simulate(0)
    assert not outcome.ok
    assert "ZeroDivisionError" in outcome.broken[0]
