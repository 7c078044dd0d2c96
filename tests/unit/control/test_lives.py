"""Which message kills its process: deaths are counted across lives, and no other message is blamed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from parti.control import lives, records
from parti.control.lives import Life, Suspicion, suspicion
from parti.model import Member, PartitionId, Tried, WorkerId
from parti.worker.tries import Tries

P, Q = PartitionId("p"), PartitionId("q")
counts = st.integers(0, 2**63 - 1)


def member(number: int) -> Member:
    return Member(WorkerId(f"w-{number % 3}"), f"n{number}")


def test_one_end_is_noted_and_changes_nothing() -> None:
    first = Life(member(0))
    found = suspicion(P, [first], previous={member(0)}, dead={member(0)})
    assert found == Suspicion(1)
    assert found.guilty(1) is None


def test_an_end_in_order_is_no_end() -> None:
    assert suspicion(P, [Life(member(0), ended=True)], previous={member(0)}, dead={member(0)}) == Suspicion()


def test_ends_in_a_row_add_up_also_over_an_orderly_move_in_between() -> None:
    first = lives.holding(Life(member(1)), P, epoch=5, found=Suspicion(1))
    assert suspicion(P, [first], previous={member(1)}, dead={member(1)}) == Suspicion(2)
    assert suspicion(P, [first], previous={member(1)}, dead=set()) == Suspicion(1), "it moved, nobody ended"


def test_the_claim_says_from_whom_it_was_taken_also_to_a_member_that_has_just_joined() -> None:
    first, other = Life(member(0)), lives.holding(Life(member(1)), P, epoch=5, found=Suspicion(1))
    assert suspicion(P, [first], previous={member(0)}, dead=set()) == Suspicion()
    assert suspicion(P, [first], previous={member(0)}, dead=set(), taken_from=member(0)) == Suspicion(1)
    assert suspicion(P, [first, other], previous={member(0)}, dead=set(), taken_from=member(1)) == Suspicion(2)
    silent = Life(member(2))
    found = suspicion(P, [other, silent], previous={member(2)}, dead=set(), taken_from=member(2))
    assert found == Suspicion(2), "it had the partition after the other one, and ended before it could say so"


def test_who_survived_begins_anew() -> None:
    well = lives.survived(lives.holding(Life(member(1)), P, epoch=5, found=Suspicion(2)), P)
    older = lives.holding(Life(member(0)), P, epoch=3, found=Suspicion(1))
    assert suspicion(P, [older, well], previous=set(), dead={member(0)}) == Suspicion()
    assert suspicion(P, [older, well], previous={member(1)}, dead={member(0), member(1)}) == Suspicion(1)


def test_only_one_that_was_alone_and_was_there_before_is_guilty_and_only_in_its_own_partition() -> None:
    life = Life(member(2), counts={P: (7, 2), Q: (8, 2)}, trials=((P, 41),), suspects={P: (40, 41)})
    found = suspicion(P, [life], previous=set(), dead={member(2)})
    assert found == Suspicion(3, (41,), 41)
    assert (found.guilty(3), found.guilty(4)) == (41, None)
    assert suspicion(Q, [life], previous=set(), dead={member(2)}) == Suspicion(3)
    once = Life(member(2), counts={P: (7, 2)}, trials=((P, 41),), suspects={P: (40,)})
    assert suspicion(P, [once], previous=set(), dead={member(2)}) == Suspicion(3, (41,))
    crowd = Life(member(2), counts={P: (7, 2)}, trials=((P, 41), (Q, 3)), suspects={P: (41,)})
    assert suspicion(P, [crowd], previous=set(), dead={member(2)}) == Suspicion(3, (41,))


def test_what_was_buried_is_remembered_by_those_after() -> None:
    life = lives.buried(lives.holding(Life(member(0)), P, 4, Suspicion(3, (9,), 9)), P, 9)
    found = suspicion(P, [life], previous=set(), dead={member(0)})
    assert found == Suspicion(4, buried=(9,))
    assert suspicion(P, [lives.holding(Life(member(1)), P, 5, found)], previous=set(), dead=set()).buried == (9,)


def test_a_process_that_lives_on_names_the_message_that_blocked_it() -> None:
    life = Life(member(0), ended=True, trials=((P, 9),))
    assert suspicion(P, [life], previous={member(0)}, dead={member(0)}) == Suspicion(1, (9,))
    assert suspicion(Q, [life], previous={member(0)}, dead={member(0)}) == Suspicion()


@given(
    st.lists(
        st.builds(
            Life,
            st.integers(0, 99).map(member),
            st.booleans(),
            st.dictionaries(st.sampled_from([P, Q]), st.tuples(st.integers(0, 99), st.integers(0, 9))),
            st.lists(st.tuples(st.sampled_from([P, Q]), st.integers(0, 9)), max_size=3).map(tuple),
            st.dictionaries(st.just(Q), st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)),
            st.dictionaries(st.just(P), st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)),
        ),
        max_size=4,
    )
)
def test_lives_survive_being_stored(told: list[Life]) -> None:
    told = [replace(x, member=Member(WorkerId("w-1"), x.member.nonce)) for x in told]
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

    def live(self, number: int, killed: int | None, moves: bool, knows: bool = True) -> None:
        """One process: it works until it meets the poison, is killed from outside at a message, or moves away.

        `knows`: who is dead; one that has just joined knows only what the claim says.
        """
        me = member(number)
        self.epoch += 1
        previous = {self.told[-1].member} if self.told else set()
        taken_from = self.told[-1].member if self.told and self.told[-1].member in self.dead else None
        dead = self.dead if knows else set()
        found = suspicion(P, self.told, previous=previous, dead=dead, taken_from=taken_from)
        life = lives.holding(Life(me), P, self.epoch, found) if found.ends else Life(me)
        for first in range(1, 6, 2):  # two lanes: two messages at once, unless one of them is a suspect
            together = [n for n in (first, first + 1) if n <= 5]
            guilty = found.guilty(self.max_deliver)
            if guilty is not None and guilty in together:
                together.remove(guilty)
                self.buried = guilty
            rounds = [[n] for n in together] if set(together) & set(found.suspects) else [together]
            for running in rounds:
                if found.ends:
                    life = replace(life, trials=tuple((P, n) for n in running))
                if {self.poison, killed} & set(running):
                    self.deaths += self.poison in running
                    self.dead.add(me)
                    self.told.append(life)
                    return
        life = lives.survived(replace(life, trials=()), P)
        if moves and me not in self.dead:
            life = replace(life, ended=True)
            self.dead.add(me)
        self.told.append(life)


@given(st.integers(1, 5), st.lists(st.tuples(st.booleans(), st.booleans()), min_size=12, max_size=12))
def test_the_poison_is_buried_after_max_deliver_lives_and_nothing_else_is(
    max_deliver: int, each: list[tuple[bool, bool]]
) -> None:
    fleet = Fleet(max_deliver, poison=3)
    for number, (moved, knows) in enumerate(each):
        if fleet.buried is not None:
            break
        fleet.live(number, None, moved, knows)
    assert fleet.buried == 3
    assert fleet.deaths == max(3, max_deliver), "at least three: the first end names nobody, the second a few"


@given(st.integers(1, 5), st.lists(st.none() | st.integers(1, 5), min_size=3, max_size=20))
def test_kills_from_outside_bury_a_message_only_if_they_hit_it_twice_in_a_row(
    max_deliver: int, kills: list[int | None]
) -> None:
    fleet = Fleet(max_deliver, poison=99)
    last: int | None = None
    for number, killed in enumerate(kills):
        if killed is not None and last is not None and (killed - 1) // 2 == (last - 1) // 2:
            continue  # one that was in its handler at the last kill too: nobody could tell that from a poison
        last = killed
        fleet.live(number, killed, moves=False)
        assert fleet.buried is None


@given(
    st.dictionaries(st.sampled_from([P, Q]), st.lists(st.builds(Tried, counts, counts, st.booleans()), max_size=3)),
    st.text(max_size=30),
)
def test_what_failed_survives_its_record(tried: dict[PartitionId, list[Tried]], stream: str) -> None:
    life = Life(member(0), stream=stream, tried={p: tuple(known) for p, known in tried.items() if known})
    assert records.decode_lives(records.encode_lives(life.member.worker, [life])) == (life,)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.booleans()), max_size=40), st.integers(0, 6))
def test_attempts_of_all_owners_are_added_up_until_their_partition_has_passed_the_message(
    starts: list[tuple[int, int, bool]], cursor: int
) -> None:
    """Owners hear of each other late, twice, or in any order: nothing counts twice, nothing is forgotten."""
    owners = [Tries() for _ in range(4)]
    for owner, sequence, told in starts:
        owners[owner].count(sequence)
        if told:
            for number, other in enumerate(owners):
                if number != owner:
                    other.heard(member(owner), owners[owner].to_tell(0))
    asked = owners[0]
    for _ in range(2):
        for number in (3, 1, 2):
            asked.heard(member(number), owners[number].to_tell(0))
    asked.passed(cursor)
    expected = Counter(sequence for _, sequence, _ in starts if sequence > cursor)
    assert {each.sequence: each.attempts for each in asked.failed.values()} == expected
    again = Tries()  # the same process gets the partition once more
    again.resume(asked.to_tell(cursor))
    assert again.to_tell(cursor) == asked.to_tell(cursor)


def test_what_a_process_was_at_when_it_ended_is_an_attempt() -> None:
    life = replace(Life(member(0)), trials=((P, 7), (P, 8), (Q, 7)), tried={P: (Tried(8, 2),)})
    assert lives.spent(life, P, dead=False) == (Tried(8, 2),)
    assert lives.spent(life, P, dead=True) == (Tried(8, 2), Tried(7, 1, ended=True))


def test_a_process_that_lives_names_the_message_that_cost_it_its_lease() -> None:
    life = replace(Life(member(0)), trials=((P, 7), (P, 8)), tried={P: (Tried(8, 2),)}, stream="s")
    first, later = lives.blocked(life, (P, 7), "s"), lives.blocked(life, (P, 8), "s")
    assert lives.spent(first, P, dead=True) == (Tried(8, 2), Tried(7, 1, ended=True))
    assert lives.spent(later, P, dead=True) == (Tried(8, 3, ended=True),)
    assert lives.spent(lives.blocked(life, None, "s"), P, dead=True) == (Tried(8, 2),)
    anew = lives.blocked(replace(life, stream=""), (P, 8), "s")  # it had nothing to say before, or of another stream
    assert (anew.stream, lives.spent(anew, P, dead=True)) == ("s", (Tried(8, 1, ended=True),))
