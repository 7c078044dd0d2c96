"""The tasks kept in memory are the first of the parked tasks, and the count of the others is right."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from parti.delivery.kept import Kept
from parti.wire.stored import StoredMessage

KEYS = ("a", "b")
KINDS = ["append", "read", "again", "remove", "cut", "drain", "count"]
OPERATIONS = st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(KEYS), st.integers(0, 9)), max_size=60)


@given(limit=st.sampled_from([0, 2_500, 10**9]), operations=OPERATIONS)
def test_what_is_kept_and_what_is_counted_is_what_the_server_has(
    limit: int, operations: list[tuple[str, str, int]]
) -> None:
    kept, server, sequence = Kept(limit), {key: list[StoredMessage]() for key in KEYS}, 0
    for key in KEYS:
        kept.begin(key)
    for what, key, number in operations:
        queue = server[key]
        newest = kept.last(key)
        have = [stored for stored in queue if newest and stored.seq <= newest.seq]
        if what == "append":
            sequence += 1
            queue.append(StoredMessage(key, sequence, 0, b"x" * 100 * number))
            kept.append(key, queue[-1])
        elif what == "read" and key in kept:  # with the head, or behind what is kept
            kept.took(key, queue[len(have) : len(have) + number])
        elif what == "again":  # the server had it before: whether it is counted, nobody knows
            kept.forget(key)
        elif what == "remove" and queue:
            middle = number >= 7 and have
            kept.removed(key, queue.pop(number % len(have) if middle else 0).seq)
        elif what == "cut":
            del queue[:number]
            kept.cut(key, queue[0].seq if queue else sequence + 1)
        elif what == "drain" and not queue:
            kept.begin(key)
        elif what == "count":
            kept.begin(key, len(queue))
        assert 0 <= kept.bytes <= max(limit, 0)
        assert kept.room >= 0
        for each in KEYS:
            if each not in kept:
                continue
            known = len(server[each]) - kept.left(each)
            assert kept.first(each) == (server[each][0] if known else None)
            assert kept.last(each) == (server[each][known - 1] if known else None)
            oldest = kept.first(each)
            assert kept.after(each, oldest.seq if oldest else 0) == (server[each][1] if known > 1 else None)
    for key in KEYS:
        kept.forget(key)
    assert kept.bytes == 0
