"""The judge itself: a check that cannot fail is a defect, so tests show that each violation is found."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from parti.testing.history import Effect, History, Intervals


def effect(counter: int, *, epoch: int = 1, owner: str = "a", key: str = "k", partition: str = "p") -> Effect:
    return Effect(partition, key, "pub", counter, owner, epoch)


def history(published: int) -> History:
    run = History()
    for counter in range(published):
        run.published("k", "pub", counter)
    return run


def test_a_run_without_fault_breaks_no_promise() -> None:
    run = history(100)
    assert all(run.effect(effect(counter)) == [] for counter in range(100))
    verdict = run.verdict()
    assert verdict.ok()
    assert (verdict.published, verdict.effects) == (100, 100)


def test_a_message_without_effect_is_lost() -> None:
    run = history(10)
    for counter in range(10):
        if counter not in (4, 7):
            run.effect(effect(counter))
    verdict = run.verdict()
    assert verdict.lost == 2
    assert verdict.examples["lost"] == ("pub-4 of k", "pub-7 of k")
    assert not verdict.ok()


def test_an_effect_seen_twice_is_duplicated_and_a_crash_may_allow_it() -> None:
    run = history(3)
    for counter, epoch in ((0, 1), (1, 1), (1, 2), (2, 2)):
        run.effect(effect(counter, epoch=epoch, owner=f"w{epoch}"))
    verdict = run.verdict()
    assert (verdict.duplicated, verdict.inversions) == (1, 0)
    assert not verdict.ok()
    assert verdict.ok(duplicates=1)


def test_an_older_message_after_a_newer_one_is_an_inversion() -> None:
    run = history(3)
    assert run.effect(effect(0)) == []
    assert run.effect(effect(2)) == []
    assert run.effect(effect(1)) == ["inversions"]


def test_a_replay_by_the_next_owner_is_no_inversion_but_within_one_epoch_it_is() -> None:
    run = history(3)
    for counter in range(3):
        run.effect(effect(counter))
    assert run.effect(effect(1, epoch=2, owner="b")) == ["duplicated"]
    assert run.effect(effect(2, epoch=2, owner="b")) == ["duplicated"]
    assert run.effect(effect(1, epoch=2, owner="b")) == ["duplicated", "inversions"]


def test_order_is_judged_per_key_and_producer() -> None:
    run = History()
    for key in ("x", "y"):
        for counter in range(2):
            run.published(key, "pub", counter)
    assert run.effect(effect(1, key="x")) == []
    assert run.effect(effect(0, key="y")) == []
    assert run.effect(Effect("p", "x", "other", 0, "a", 1)) == []
    assert run.verdict().phantom == 1


def test_two_owners_within_one_epoch_are_found() -> None:
    run = history(2)
    assert run.effect(effect(0, owner="a", epoch=3)) == []
    assert run.effect(effect(1, owner="b", epoch=3)) == ["two_owners"]


def test_an_effect_of_an_older_epoch_after_a_newer_one_is_stale() -> None:
    run = history(3)
    run.effect(effect(0, owner="a", epoch=1))
    run.effect(effect(1, owner="b", epoch=2))
    assert run.effect(effect(2, owner="a", epoch=1)) == ["stale_accepted"]


def test_a_publish_of_unknown_outcome_is_neither_lost_nor_a_phantom() -> None:
    run = history(1)
    run.effect(effect(0))
    run.maybe_published("k", "pub", 1)
    assert run.verdict().ok()
    run.effect(effect(1))
    assert run.verdict().ok()
    run.effect(effect(2))
    assert run.verdict().phantom == 1


def test_memory_does_not_grow_with_the_number_of_messages() -> None:
    run = History()
    for counter in range(50_000):
        run.published("k", "pub", counter)
        run.effect(effect(counter, epoch=counter // 100, owner=str(counter // 100)))
    lane = run._lane("k", "pub")
    assert lane.done.runs == lane.published.runs == 1
    assert len(run._owners["p"]) <= 16
    assert run.verdict().ok()


def test_examples_are_few_however_many_violations_there_are() -> None:
    run = history(1000)
    verdict = run.verdict()
    assert verdict.lost == 1000
    assert len(verdict.examples["lost"]) == 10


@given(st.lists(st.integers(0, 60)), st.lists(st.integers(0, 60)))
def test_intervals_behave_like_a_set(first: list[int], second: list[int]) -> None:
    a, b = Intervals(), Intervals()
    seen: set[int] = set()
    for value in first:
        assert a.add(value) is (value not in seen)
        seen.add(value)
    for value in second:
        b.add(value)
    assert a.count == len(seen)
    assert list(a.missing_from(b)) == sorted(seen - set(second))
    assert all((value in a) is (value in seen) for value in range(-1, 62))
