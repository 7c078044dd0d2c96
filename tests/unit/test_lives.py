"""Which message ends its process: counted over lives, and nobody else is taken for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from parti.control import lives, records
from parti.control.lives import Life, Suspicion, suspicion
from parti.model import Member, PartitionId, WorkerId

P, Q = PartitionId("p"), PartitionId("q")


def member(number: int) -> Member:
    return Member(WorkerId(f"w-{number % 3}"), f"n{number}")


def test_one_end_is_noted_and_changes_nothing() -> None:
    first = Life(member(0))
    found = suspicion(P, [first], previous={member(0)}, dead={member(0)})
    assert found == Suspicion(1)
    assert not found.wary(3)


def test_an_end_in_order_is_no_end() -> None:
    assert suspicion(P, [Life(member(0), ended=True)], previous={member(0)}, dead={member(0)}) == Suspicion()


def test_ends_in_a_row_add_up_also_over_an_orderly_move_in_between() -> None:
    first = lives.holding(Life(member(1)), P, epoch=5, found=Suspicion(1))
    assert suspicion(P, [first], previous={member(1)}, dead={member(1)}) == Suspicion(2)
    assert suspicion(P, [first], previous={member(1)}, dead=set()) == Suspicion(1), "it moved, nobody ended"


def test_who_survived_begins_anew() -> None:
    well = lives.survived(lives.holding(Life(member(1)), P, epoch=5, found=Suspicion(2)), P)
    older = lives.holding(Life(member(0)), P, epoch=3, found=Suspicion(1))
    assert suspicion(P, [older, well], previous=set(), dead={member(0)}) == Suspicion()
    assert suspicion(P, [older, well], previous={member(1)}, dead={member(0), member(1)}) == Suspicion(1)


def test_only_the_message_on_trial_is_named_and_only_in_its_own_partition() -> None:
    life = Life(member(2), counts={P: (7, 2), Q: (8, 2)}, trial=(P, 41))
    assert suspicion(P, [life], previous=set(), dead={member(2)}) == Suspicion(3, 41)
    assert suspicion(Q, [life], previous=set(), dead={member(2)}) == Suspicion(3, None)
    assert suspicion(P, [life], previous=set(), dead={member(2)}).guilty(3) == 41
    assert suspicion(P, [life], previous=set(), dead={member(2)}).guilty(4) is None


def test_what_was_buried_is_remembered_by_those_after() -> None:
    life = lives.buried(lives.holding(Life(member(0)), P, 4, Suspicion(3, 9)), P, 9)
    found = suspicion(P, [life], previous=set(), dead={member(0)})
    assert found == Suspicion(4, None, (9,))
    assert suspicion(P, [lives.holding(Life(member(1)), P, 5, found)], previous=set(), dead=set()).buried == (9,)


def test_a_process_that_lives_on_names_the_message_that_blocked_it() -> None:
    life = Life(member(0), ended=True, trial=(P, 9))
    assert suspicion(P, [life], previous={member(0)}, dead={member(0)}) == Suspicion(1, 9)
    assert suspicion(Q, [life], previous={member(0)}, dead={member(0)}) == Suspicion()


@given(
    st.lists(
        st.builds(
            Life,
            st.integers(0, 99).map(member),
            st.booleans(),
            st.dictionaries(st.sampled_from([P, Q]), st.tuples(st.integers(0, 99), st.integers(0, 9))),
            st.none() | st.tuples(st.sampled_from([P, Q]), st.integers(0, 9)),
            st.dictionaries(st.just(P), st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)),
        ),
        max_size=4,
    )
)
def test_lives_survive_being_stored(told: list[Life]) -> None:
    told = [Life(Member(WorkerId("w-1"), x.member.nonce), x.ended, x.counts, x.trial, x.buried) for x in told]
    assert list(records.decode_lives(records.encode_lives(WorkerId("w-1"), told))) == told  # type: ignore[arg-type]


@dataclass
class Fleet:
    """Processes that handle one partition after the other; one message ends whoever starts it."""

    max_deliver: int
    poison: int
    told: list[Life] = field(default_factory=list)
    dead: set[Member] = field(default_factory=set)
    epoch: int = 0
    deaths: int = 0
    buried: int | None = None

    def live(self, number: int, killed: int | None, moves: bool) -> None:
        """One process: it works until it meets the poison, is killed from outside at a message, or moves away."""
        me = member(number)
        self.epoch += 1
        previous = {self.told[-1].member} if self.told else set()
        found = suspicion(P, self.told, previous=previous, dead=self.dead)
        life = lives.holding(Life(me), P, self.epoch, found) if found.ends else Life(me)
        for sequence in range(1, 6):
            if sequence == found.guilty(self.max_deliver):
                self.buried = sequence
                continue
            if found.wary(self.max_deliver):
                life = Life(me, False, life.counts, (P, sequence))
            if sequence in (self.poison, killed):
                self.deaths += sequence == self.poison
                self.dead.add(me)
                break
        else:
            life = lives.survived(Life(me, False, life.counts), P)
        if moves and me not in self.dead:
            life = Life(me, True, life.counts)
            self.dead.add(me)
        self.told.append(life)


@given(st.integers(1, 5), st.lists(st.booleans(), min_size=12, max_size=12))
def test_the_poison_is_buried_after_max_deliver_lives_and_nothing_else_is(max_deliver: int, moves: list[bool]) -> None:
    fleet = Fleet(max_deliver, poison=3)
    for number, moved in enumerate(moves):
        if fleet.buried is not None:
            break
        fleet.live(number, None, moved)
    assert fleet.buried == 3
    assert fleet.deaths == max(2, max_deliver), "at least two: the first end names nobody"


@given(st.integers(2, 5), st.lists(st.none() | st.integers(1, 5), min_size=3, max_size=20))
def test_a_message_is_buried_only_if_it_was_named_at_the_last_of_enough_ends(
    max_deliver: int, kills: list[int | None]
) -> None:
    """Kills from outside, wherever they hit: a run of fewer than max_deliver of them buries nothing."""
    fleet = Fleet(max_deliver, poison=99)
    run = 0
    for number, killed in enumerate(kills):
        run = run + 1 if killed is not None else 0
        if run >= max_deliver:
            break
        fleet.live(number, killed, moves=False)
    assert fleet.buried is None
