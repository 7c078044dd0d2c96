"""Grouping into slots, and the rules for subjects."""

from __future__ import annotations

import pytest

from parti.control.subject_buckets import check_subjects, group, slot_of
from parti.errors import ConfigError
from parti.model import Assignment, Checkpoint, Member, Partition, PartitionId, Retention, WorkerId
from parti.subjects import partition_of


def test_a_partition_lies_in_the_slot_that_the_server_computes_for_its_tokens() -> None:
    assert slot_of(Partition(("tool", "7")), 64) == partition_of(("tool", "7"), 64)


def test_a_slot_weighs_what_its_members_weigh_and_every_partition_is_in_one() -> None:
    partitions = [Partition((f"k{i}",), i % 3) for i in range(500)]
    slots = group(partitions, 16)
    assert sum(len(members) for members in slots.values()) == 500
    assert all(slot.weight == sum(p.load for p in members) for slot, members in slots.items())
    with pytest.raises(ConfigError):
        group(partitions, 0)


def test_a_partition_has_up_to_ten_subjects_or_one_wildcard() -> None:
    ten = [f"a.{i}" for i in range(10)]
    assert check_subjects(PartitionId("p"), ten) == ten
    assert check_subjects(PartitionId("p"), ["a.*.7"]) == ["a.*.7"]
    for wrong in ([], [*ten, "a.10"], ["a.*", "b"], ["a.>", "b"]):
        with pytest.raises(ConfigError):
            check_subjects(PartitionId("p"), wrong)


def test_values_explain_themselves_and_order_by_key() -> None:
    assert repr(Partition(("a", "b"), 5)) == "<Partition a.b weight=5>"
    assert Partition(("a",)) < Partition(("a", "x")) < Partition(("b",))
    assert str(Member(WorkerId("worker-1"), "n")) == "worker-1#n"
    with pytest.raises(ConfigError, match="negative"):
        Partition(("a",), -1)


def test_an_assignment_names_the_partitions_of_a_worker() -> None:
    owners = {PartitionId("b"): WorkerId("w"), PartitionId("a"): WorkerId("w")}
    assert Assignment(owners=owners).of(WorkerId("w")) == ("a", "b")


def test_a_checkpoint_of_a_later_epoch_does_not_count_for_an_earlier_claim() -> None:
    checkpoint = Checkpoint(Member(WorkerId("w"), "n"), {PartitionId("p"): (3, 70)})
    assert [checkpoint.position(PartitionId("p"), epoch) for epoch in (2, 3, 4)] == [0, 70, 70]
    assert checkpoint.position(PartitionId("q"), 3) == 0


def test_only_a_work_queue_refuses_overlap() -> None:
    assert [r for r in Retention if not r.overlap] == [Retention.WORKQUEUE]
