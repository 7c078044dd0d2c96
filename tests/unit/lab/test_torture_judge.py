"""The judge of `parti prove torture` finds each kind of violation, and reports none where there is none."""

from __future__ import annotations

import pytest

from parti_lab.prove.torture_judge import Happened, Judgement, Posted, TortureLedger


def post(ledger: TortureLedger, counter: int, fate: str = "", partition: str = "p0") -> None:
    ledger.post(Posted(partition, counter, partition, ledger.generation, 10 + counter, fate, float(counter)))


def happen(
    ledger: TortureLedger, counter: int, at: float, owner: str = "a", epoch: int = 1, began: float | None = None
) -> bool:
    effect = Happened(at, owner, epoch, at if began is None else began, 10 + counter, 1)
    return ledger.happen("p0", "p0", counter, effect)


def judge(ledger: TortureLedger, present: tuple[int, ...] = ()) -> Judgement:
    return ledger.judge(present, before=2.0, after=3.0)


@pytest.fixture
def ledger() -> TortureLedger:
    found = TortureLedger()
    for counter in range(4):
        post(found, counter)
    return found


def test_a_clean_run_is_clean(ledger: TortureLedger) -> None:
    for counter in range(4):
        assert happen(ledger, counter, float(counter))
    verdict = judge(ledger)
    assert (verdict.lost, verdict.repeats, verdict.inversions, verdict.two_owners, verdict.stale_started) == (0,) * 5
    assert ledger.outstanding() == 0
    assert ledger.lowest_open("p0") is None


def test_what_had_neither_effect_nor_letter_is_lost_and_said_to_be_gone_or_waiting(ledger: TortureLedger) -> None:
    happen(ledger, 0, 0.0)
    ledger.letter("p0#1", "rejected")
    assert ledger.lowest_open("p0") == (12, "p0#2")
    verdict = judge(ledger, present=(13,))
    assert (verdict.lost, verdict.lost_gone) == (2, 1)
    assert "p0#2" in verdict.examples["lost_gone"][0]
    assert "p0#3" in verdict.examples["lost_waiting"][0]


def test_a_letter_that_no_fate_explains_is_named(ledger: TortureLedger) -> None:
    ledger.letter("p0#1", "max_deliver")
    assert judge(ledger).letters_unexpected == 1


def test_a_first_effect_behind_a_later_one_is_an_inversion_and_a_repeat_is_none(ledger: TortureLedger) -> None:
    for at, counter in enumerate((0, 2, 1, 2)):
        happen(ledger, counter, float(at))
    verdict = judge(ledger)
    assert (verdict.inversions, verdict.repeats) == (1, 1)


def test_a_stale_epoch_is_refused_and_accused_only_when_it_began_late(ledger: TortureLedger) -> None:
    happen(ledger, 0, 1.0, "b", epoch=2)
    assert not happen(ledger, 1, 2.0, "a", epoch=1, began=0.5)
    assert judge(ledger).stale_started == 0
    assert not happen(ledger, 1, 3.0, "a", epoch=1, began=1.5)
    verdict = judge(ledger)
    assert (verdict.stale_refused, verdict.stale_started) == (2, 1)


def test_two_owners_of_one_epoch_are_found(ledger: TortureLedger) -> None:
    happen(ledger, 0, 1.0, "a")
    happen(ledger, 1, 2.0, "b")
    assert judge(ledger).two_owners == 1


@pytest.mark.parametrize(
    ("kind", "start", "owner", "explains", "unexplained"),
    [
        ("kill", 1.5, "a", True, 0),
        ("outage", 1.5, "", True, 0),
        ("kill", 1.5, "c", True, 1),  # it hit somebody else
        ("restart", 1.5, "a", False, 1),  # planned: nothing is repeated
        ("kill", 9.0, "a", True, 1),  # long after the effect was certain
    ],
)
def test_a_repeat_needs_a_fault_that_explains_it(
    ledger: TortureLedger, kind: str, start: float, owner: str, explains: bool, unexplained: int
) -> None:
    ledger.disturb(kind, start, owner, explains=explains).end = start
    happen(ledger, 0, 1.0, "a")
    happen(ledger, 0, 10.0, "b", epoch=2)
    verdict = judge(ledger)
    assert (verdict.repeats, verdict.unexplained) == (1, unexplained)


def test_what_may_end_leases_explains_no_repeat_by_itself(ledger: TortureLedger) -> None:
    slow = ledger.disturb("slow server", 0.5, "", explains=False)
    slow.end, slow.ends_leases = 2.0, True
    happen(ledger, 0, 1.0, "a")
    happen(ledger, 0, 1.5, "a", epoch=2)
    assert judge(ledger).unexplained == 1


def test_a_stream_made_anew_excuses_what_it_took_along_and_counts_anew(ledger: TortureLedger) -> None:
    happen(ledger, 0, 0.0)
    ledger.made_anew()
    happen(ledger, 1, 1.0)  # was on its way
    assert 11 not in ledger.done
    post(ledger, 4)
    verdict = judge(ledger, present=(14,))
    assert (verdict.lost, verdict.lost_gone) == (1, 0)


def test_an_effect_may_come_before_its_publish_is_acknowledged() -> None:
    ledger = TortureLedger()
    happen(ledger, 0, 0.0)
    post(ledger, 0)
    assert ledger.outstanding() == 0
    assert judge(ledger).lost == 0


@pytest.mark.parametrize(("slow_from", "slow_to", "unexplained"), [(2.0, 4.5, 0), (4.1, 5.0, 1), (-9.0, -8.0, 1)])
def test_a_lease_that_ended_early_explains_repeats_if_the_server_was_slow_also_when_that_is_known_later(
    ledger: TortureLedger, slow_from: float, slow_to: float, unexplained: int
) -> None:
    """A server is known to be slow when it answers at last: 0.1 s behind the lease that ended meanwhile (2700065)."""
    happen(ledger, 0, 3.9)
    happen(ledger, 0, 6.0, epoch=2)
    lease = ledger.disturb("fenced", 1.0, "a", explains=False)
    lease.end, lease.lease = 4.0, True
    slow = ledger.disturb("slow server", slow_from, "", explains=False)
    slow.end, slow.ends_leases = slow_to, True
    assert judge(ledger).unexplained == unexplained
