"""Which parts of an unused durable are still needed: decided for any claims, members and filters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from parti.control.identity import LeaseRecord, LeaseStatus
from parti.control.lease import LeaseTerms, Sighting
from parti.control.membership import Membership, Seat
from parti.manager.sweep import Unused, held_ids, still_needed
from parti.model import Claim, ClaimState, Member, PartitionId, Retention, WorkerId

WORKERS = [WorkerId(f"worker-{n}") for n in range(4)]
members_ = st.builds(Member, st.sampled_from(WORKERS), st.sampled_from(["a", "b"]))
records = st.builds(LeaseRecord, members_, st.sampled_from(LeaseStatus))
seats = st.dictionaries(st.sampled_from(WORKERS), st.tuples(records, st.booleans()), max_size=4)
claims_ = st.dictionaries(
    st.sampled_from([f"s.{n}" for n in range(6)]),
    st.builds(
        Claim,
        st.just(PartitionId("p")),
        st.sampled_from(ClaimState),
        owner=st.none() | members_,
        previous=st.none() | members_,
    ),
)
filters_ = st.sets(st.sampled_from([f"s.{n}" for n in range(6)]))


def membership(found: dict[WorkerId, tuple[LeaseRecord, bool]]) -> Membership:
    terms = LeaseTerms()
    return Membership(
        terms, 0.0, {w: Seat(record, Sighting(1, 0.0), 0.0, dead=dead) for w, (record, dead) in found.items()}
    )


@given(filters_, claims_, seats, st.sampled_from(Retention), st.booleans())
def test_a_filter_goes_from_an_interest_stream_only_when_a_live_owner_has_caught_up(
    filters: set[str],
    claims: dict[str, Claim],
    found: dict[WorkerId, tuple[LeaseRecord, bool]],
    retention: Retention,
    sealed: bool,
) -> None:
    members = membership(found)
    unused = Unused("d", WORKERS[0], {"filter_subjects": sorted(filters)}, sealed)
    needed = still_needed(unused, retention, claims, members)
    assert set(needed) <= filters
    for subject in filters - set(needed):
        claim = claims.get(subject)
        if claim is not None and claim.state is ClaimState.STABLE:
            assert claim.owner is not None
            record, dead = found[claim.owner.worker]
            assert not dead
            assert record.member == claim.owner
            assert not record.status.stopped
        else:
            assert retention is not Retention.INTEREST
            assert sealed, "what says of nobody whose it is goes only for reasons that are certain"
            assert claim is None or claim.state is ClaimState.UNASSIGNED


@given(seats)
def test_an_id_is_held_until_its_holder_is_dead_or_has_left(found: dict[WorkerId, tuple[LeaseRecord, bool]]) -> None:
    held = held_ids(membership(found))
    for worker, (record, dead) in found.items():
        assert (worker in held) == (not dead and record.status is not LeaseStatus.LEFT)


@given(seats, st.sets(st.sampled_from([Member(w, n) for w in WORKERS for n in ("a", "b")])))
def test_who_is_gone_by_a_claims_word_holds_nothing_and_whoever_came_behind_does(
    found: dict[WorkerId, tuple[LeaseRecord, bool]], gone: set[Member]
) -> None:
    alone = held_ids(membership(found))
    assert held_ids(membership(found), gone) == {w for w in alone if found[w][0].member not in gone}
