"""Whole clusters in virtual time; and broken rules, to show that the simulator would notice."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from parti.bench.report import RunContext, execute
from parti.control import claims, holding, reconcile, slot
from parti.control.continuity import Continuity
from parti.control.holding import Holding
from parti.control.identity import Identity
from parti.control.leader import Leader
from parti.control.lease import Fence, Hold, Sighting
from parti.control.membership import Membership
from parti.control.signals import FilterAdded, Verdict
from parti.model import Layout, Retention
from parti.prove.sim import PROOF
from parti.testing.sim import Outcome, Plan, Shape, simulate
from parti.testing.sim.per_worker import PerWorkerPlane

SHAPES = {
    "limits": Shape(Layout.PER_WORKER, Retention.LIMITS),
    "interest": Shape(Layout.PER_WORKER, Retention.INTEREST),
    "workqueue": Shape(Layout.PER_WORKER, Retention.WORKQUEUE),
    "per-partition": Shape(Layout.PER_PARTITION),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_five_hundred_seeds_keep_every_promise() -> None:
    result = execute(PROOF, RunContext(seed=0, options={"seeds": 500}))
    assert result.ok, result.to_json()
    assert result.figures["seeds"] == 500


@pytest.mark.parametrize("seed", range(40))
def test_a_seed_keeps_every_promise(seed: int) -> None:
    outcome = simulate(seed)
    assert outcome.ok, outcome.story()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("seed", range(8))
def test_records_that_are_removed_and_damaged_lose_and_repeat_nothing(shape: Shape, seed: int) -> None:
    """Nobody crashes: whatever was lost, somebody knows it and writes it again."""
    outcome = simulate(seed, shape=shape, plan=Plan(crashes=False, weather=False, events=12, tampering=True))
    assert outcome.ok, outcome.story()
    assert outcome.verdict.duplicated == 0


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("seed", range(5))
def test_joins_leaves_and_restarts_repeat_nothing(shape: Shape, seed: int) -> None:
    outcome = simulate(seed, shape=shape, plan=Plan(crashes=False, weather=False, events=8, tampering=False))
    assert outcome.ok, outcome.story()
    assert outcome.verdict.duplicated == 0


def test_on_a_quiet_network_less_than_half_a_percent_of_the_writes_conflict() -> None:
    outcomes = [simulate(s, plan=Plan(crashes=False, weather=False, events=8, tampering=False)) for s in range(20)]
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


def first_failure(seeds: range, shape: Shape | None = None) -> Outcome | None:
    return next((o for seed in seeds if not (o := simulate(seed, shape=shape)).ok), None)


def acks_early(monkeypatch: pytest.MonkeyPatch) -> None:
    original = holding.deliver

    def deliver(state: Holding, seq: int) -> tuple[Holding, Verdict]:
        state, verdict = original(state, seq)
        return state, Verdict.ACK if verdict is Verdict.ACK_WHEN_DONE else verdict

    monkeypatch.setattr(holding, "deliver", deliver)


def does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    original = holding.deliver

    def deliver(state: Holding, seq: int) -> tuple[Holding, Verdict]:
        state, verdict = original(state, seq)
        if verdict is Verdict.HOLD and state.lease is not None:
            return replace(state, queued=seq, tail=seq), Verdict.PROCESS
        return state, verdict

    monkeypatch.setattr(holding, "deliver", deliver)


def reads_t_before_the_filter_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    original = holding.step

    def step(state: Holding, event: holding.Event) -> holding.Step:
        if isinstance(event, FilterAdded):
            event = replace(event, last=max(0, event.last - 8))
        return original(state, event)

    monkeypatch.setattr(holding, "step", step)


def counts_the_lease_from_later_than_it_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Hold.confirmed

    def confirmed(hold: Hold, beat: int, revision: int) -> Hold:
        after = original(hold, beat, revision)
        return replace(after, fence=Fence(after.fence.deadline + 0.6))

    monkeypatch.setattr(Hold, "confirmed", confirmed)


def takes_over_before_the_lease_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sighting, "overdue", lambda sighting, now, _terms: now >= sighting.since + 0.6)
    monkeypatch.setattr(Sighting, "expired", lambda sighting, _terms: sighting.confirmed >= sighting.since + 0.6)
    monkeypatch.setattr(Membership, "gone", lambda members, member, _now: not members.healthy(member))


def slot_without_gap_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    original = slot.deliver
    monkeypatch.setattr(
        slot, "deliver", lambda s, seq, cseq, inbox: original(replace(s, expected=cseq), seq, cseq, inbox)
    )


def forgets_what_was(monkeypatch: pytest.MonkeyPatch) -> None:
    original = reconcile.elect

    def elect(*args: Any, **known: Any) -> Leader:
        return replace(original(*args, **known), lost={})

    monkeypatch.setattr(reconcile, "elect", elect)


Break = Callable[[pytest.MonkeyPatch], None]
BROKEN: dict[str, tuple[str, Break]] = {
    "ack floor trusted before the catch-up is done": (
        "limits",
        lambda m: m.setattr(claims, "floor_counts", lambda *_: True),
    ),
    "no gap rule, per worker": (
        "limits",
        lambda m: m.setattr(Continuity, "check", lambda c, n: (replace(c, expected=n + 1), False)),
    ),
    "no gap rule, per partition": ("per-partition", slot_without_gap_rule),
    "lagging replica believed": ("limits", lambda m: m.setattr(PerWorkerPlane, "confirm_with_leader", False)),
    "acks what is not done": ("limits", acks_early),
    "does not hold what arrives early": ("limits", does_not_hold),
    "T read before the filter": ("limits", reads_t_before_the_filter_is_on),
    "releases what is only queued": (
        "limits",
        lambda m: m.setattr(Holding, "cursor", property(lambda holding: holding.queued)),
    ),
    "acks others' messages on a work queue": (
        "workqueue",
        lambda m: m.setattr(holding, "_foreign_ack", lambda _: True),
    ),
    "drops the filter at once on an interest stream": (
        "interest",
        lambda m: m.setattr(holding, "_keeps_filter", lambda *_: False),
    ),
    "a lost claim is not written again by who holds it": (
        "limits",
        lambda m: m.setattr(holding, "_write_again", lambda state, *_: (state, ())),
    ),
    "a lost claim is given away before all have spoken": (
        "limits",
        lambda m: m.setattr(Membership, "know", lambda *_: True),
    ),
    "a claim that a new leader does not find is a new partition": ("per-partition", forgets_what_was),
    "no fence": ("limits", lambda m: m.setattr(Identity, "may_act", lambda *_: True)),
    "lease counted from the answer": ("limits", counts_the_lease_from_later_than_it_was_sent),
    "takeover before the lease is out": ("limits", takes_over_before_the_lease_is_out),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, break_it = BROKEN[name]
    break_it(monkeypatch)
    assert first_failure(range(400), SHAPES[shape]) is not None


def test_a_failing_seed_tells_a_short_story(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Continuity, "check", lambda c, n: (replace(c, expected=n + 1), False))
    failure = first_failure(range(50), SHAPES["limits"])
    assert failure is not None
    story = failure.story()
    assert f"seed {failure.seed} (per-worker, limits) broke a promise:" in story
    assert "lost" in story
    assert "granted" in story
    assert len(story.splitlines()) <= 70
    assert "all promises held" in simulate(0, plan=Plan(events=0)).story()


def test_the_proof_fails_and_names_the_seed_when_a_rule_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Continuity, "check", lambda c, n: (replace(c, expected=n + 1), False))
    result = execute(PROOF, RunContext(seed=0, options={"seeds": 12}))
    assert not result.ok
    assert f"--seed {result.figures['first_failed']}" in capsys.readouterr().err
