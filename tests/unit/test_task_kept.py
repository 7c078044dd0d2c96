"""What is kept of the park is what the park holds, or nothing: never less, and never in another order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from parti.tasks.kept import Kept
from parti.wire.stored import StoredMessage

KEYS = ("a", "b")
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["append", "again", "remove", "cut", "drain"]), st.sampled_from(KEYS), st.integers(0, 9)),
    max_size=60,
)


@given(limit=st.sampled_from([0, 2_500, 10**9]), operations=OPERATIONS)
def test_a_queue_that_is_kept_is_the_one_on_the_server(limit: int, operations: list[tuple[str, str, int]]) -> None:
    kept, server, sequence = Kept(limit), {key: list[StoredMessage]() for key in KEYS}, 0
    for key in KEYS:
        kept.begin(key)
    for what, key, number in operations:
        queue = server[key]
        if what == "append":
            sequence += 1
            queue.append(StoredMessage(key, sequence, 0, b"x" * 100 * number))
            kept.append(key, queue[-1])
        elif what == "again" and queue:  # its answer got lost
            kept.append(key, queue[-1])
        elif what == "remove" and queue:
            kept.removed(queue.pop(0 if number < 7 else number % len(queue)).seq)
        elif what == "cut":
            del queue[:number]
            kept.forget(key)
        elif what == "drain" and not queue:
            kept.begin(key)
        assert 0 <= kept.bytes <= max(limit, 0)
        for each in KEYS:
            if each in kept:
                assert kept.last(each) == (server[each][-1] if server[each] else None)
                assert kept.after(each, 0) == (server[each][0] if server[each] else None)
                assert kept.after(each, sequence) is None
    for key in KEYS:
        kept.forget(key)
    assert kept.bytes == 0
