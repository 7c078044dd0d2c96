"""Records as bytes: round trips, sizes, and error messages for records that cannot be read."""

from __future__ import annotations

import json
import random
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parti.control import records
from parti.control.election import LeaderRecord
from parti.control.identity import LeaseRecord, LeaseStatus
from parti.control.records import RecordFault, Unreadable
from parti.errors import UsageError
from parti.model import Ahead, Assignment, Checkpoint, Claim, ClaimState, Member, PartitionId, WorkerId

MEMBERS = st.builds(Member, st.sampled_from(["worker-0", "worker-17"]).map(WorkerId), st.text(max_size=8))
COUNTS = st.integers(0, 2**53)
AHEAD = st.builds(Ahead, COUNTS, st.frozensets(COUNTS, max_size=5))


@st.composite
def claims(draw: st.DrawFn) -> Claim:
    state = draw(st.sampled_from(ClaimState))
    owned = state is not ClaimState.UNASSIGNED
    return Claim(
        PartitionId(draw(st.text(min_size=1, max_size=12))),
        state,
        draw(COUNTS),
        draw(MEMBERS) if owned else None,
        draw(st.none() | MEMBERS) if state is ClaimState.PREPARE else None,
        draw(st.none() | MEMBERS),
        draw(COUNTS),
        draw(st.none() | COUNTS),
        draw(st.booleans()),
        draw(COUNTS),
        draw(st.floats(0, 2e9)),
        draw(st.none() | AHEAD),
        taken_from=draw(st.none() | MEMBERS),
    )


@given(claims())
def test_a_claim_survives_the_round_trip(claim: Claim) -> None:
    assert records.decode_claim(records.encode_claim(claim)) == claim


@given(MEMBERS, st.sampled_from(LeaseStatus), COUNTS, st.text(max_size=5), st.booleans())
def test_a_lease_survives_the_round_trip(
    member: Member, status: LeaseStatus, beat: int, instance: str, clean: bool
) -> None:
    record = LeaseRecord(member, status, beat, instance, clean)
    assert records.decode_lease(records.encode_lease(record)) == record


@given(COUNTS, st.none() | MEMBERS, COUNTS)
def test_a_leader_record_survives_the_round_trip(term: int, leader: Member | None, beat: int) -> None:
    record = LeaderRecord(term, leader, beat)
    assert records.decode_leader(records.encode_leader(record)) == record


@given(
    MEMBERS,
    st.dictionaries(st.text(min_size=1).map(PartitionId), st.tuples(COUNTS, COUNTS), max_size=30),
    st.dictionaries(st.text(min_size=1).map(PartitionId), AHEAD, max_size=5),
)
def test_a_checkpoint_survives_the_round_trip(
    member: Member, positions: dict[PartitionId, tuple[int, int]], ahead: dict[PartitionId, Ahead]
) -> None:
    checkpoint = Checkpoint(member, positions, ahead)
    assert records.decode_checkpoint(records.encode_checkpoint(checkpoint)) == checkpoint


def assignment(partitions: int, workers: int, *, noisy: bool = False) -> Assignment:
    rng = random.Random(1)
    names = [f"{rng.getrandbits(128):032x}.{i}" if noisy else f"tool{i:05d}.chamber{i % 7}" for i in range(partitions)]
    owners = {PartitionId(name): WorkerId(f"worker-{i % workers}") for i, name in enumerate(names)}
    return Assignment(7, 42, "planned_scale", owners, {PartitionId(names[0]): 50} if names else {})


def test_fifty_thousand_partitions_fit_into_one_record() -> None:
    head, parts = records.encode_assignment(assignment(50_000, 100))
    assert parts == ()
    assert len(head) < 300_000
    read = records.decode_assignment(head)
    assert isinstance(read, Assignment)
    assert read == assignment(50_000, 100)


def test_names_that_do_not_compress_are_split_below_the_limit() -> None:
    original = assignment(50_000, 100, noisy=True)
    head, parts = records.encode_assignment(original)
    assert len(parts) >= 2
    assert all(len(part) <= records.DEFAULT_LIMIT for part in (head, *parts))
    assert records.parts_of(head) == len(parts)
    assert records.decode_assignment(head, parts) == original


def test_parts_of_another_version_are_never_half_applied() -> None:
    head, parts = records.encode_assignment(assignment(5_000, 10, noisy=True), limit=20_000)
    for wrong in (parts[:-1], (*parts[:-1], b"x" + parts[-1][1:]), parts[::-1], ()):
        read = records.decode_assignment(head, wrong)
        assert isinstance(read, Unreadable)
        assert read.fault is RecordFault.CORRUPT


def test_a_limit_too_small_for_the_head_is_refused() -> None:
    with pytest.raises(UsageError, match="raise it"):
        records.encode_assignment(assignment(5_000, 10, noisy=True), limit=20)


def test_a_record_of_a_newer_parti_is_reported_as_such() -> None:
    newer = json.loads(records.encode_claim(Claim(PartitionId("p"))))
    newer["v"] = 99
    newer["state"] = "a state of the future"
    read = records.decode_claim(json.dumps(newer).encode())
    assert isinstance(read, Unreadable)
    assert read.fault is RecordFault.FUTURE
    assert "99" in read.detail


def test_fields_unknown_to_us_in_our_own_schema_are_ignored() -> None:
    extended = json.loads(records.encode_claim(Claim(PartitionId("p"))))
    extended["comment"] = "added by hand"
    assert records.decode_claim(json.dumps(extended).encode()) == Claim(PartitionId("p"))


@pytest.mark.parametrize(
    "data",
    [b"", b"hello", b"[]", b"{}", b"2025-11-09T10:00:00Z", b'{"version":1,"partitions":[]}', b"\xff\xfe", b"x"],
)
def test_what_others_wrote_is_foreign_or_corrupt(data: bytes) -> None:
    read = records.decode_claim(data)
    assert isinstance(read, Unreadable)
    assert read.fault in (RecordFault.FOREIGN, RecordFault.CORRUPT)


def test_a_lease_under_a_claims_key_is_foreign() -> None:
    data = records.encode_lease(LeaseRecord(Member(WorkerId("worker-0"), "n")))
    read = records.decode_claim(data)
    assert isinstance(read, Unreadable)
    assert read.fault is RecordFault.FOREIGN


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": -1},
        {"epoch": "one"},
        {"state": "melting"},
        {"state": "stable", "owner": None},
        {"state": "unassigned", "owner": ["worker-0", "n"]},
        {"state": "stable", "owner": ["worker-0", "n"], "pending_owner": ["worker-1", "m"]},
        {"owner": "worker-0"},
    ],
)
def test_a_claim_that_breaks_its_own_rules_is_corrupt(change: dict[str, object]) -> None:
    body = {"kind": "parti.claim", "v": 1, "partition": "p", "state": "stable", "epoch": 1, "owner": ["worker-0", "n"]}
    read = records.decode_claim(json.dumps({**body, **change}).encode())
    assert isinstance(read, Unreadable)
    assert read.fault is RecordFault.CORRUPT


def test_a_compressed_bomb_is_refused_without_unpacking_it() -> None:
    bomb = zlib.compress(b" " * (80 * 1024 * 1024), 9)
    read = records.decode_assignment(bomb)
    assert isinstance(read, Unreadable)
    assert "larger" in read.detail


def test_an_index_outside_the_list_of_workers_is_corrupt() -> None:
    body = {"kind": "parti.assignment", "v": 1, "term": 1, "version": 1, "reason": "", "owners": {"p": 3}}
    read = records.decode_assignment(json.dumps(body).encode())
    assert isinstance(read, Unreadable)
    assert read.fault is RecordFault.CORRUPT


DECODERS = (
    records.decode_claim,
    records.decode_lease,
    records.decode_leader,
    records.decode_checkpoint,
    records.decode_assignment,
)


@settings(max_examples=300)
@given(
    st.binary(max_size=200)
    | st.binary(max_size=60).map(zlib.compress)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    ).map(lambda value: json.dumps(value).encode()),
)
def test_no_bytes_whatever_make_a_reader_raise(data: bytes) -> None:
    for decode in DECODERS:
        assert isinstance(decode(data), Unreadable)


@settings(max_examples=200)
@given(claims(), st.integers(0, 400), st.integers(0, 255))
def test_a_flipped_byte_is_read_or_reported_but_never_raises(claim: Claim, at: int, value: int) -> None:
    data = bytearray(records.encode_claim(claim))
    data[at % len(data)] = value
    assert isinstance(records.decode_claim(bytes(data)), Claim | Unreadable)
