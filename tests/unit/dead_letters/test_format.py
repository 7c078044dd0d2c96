"""Dead letters encoded and decoded: nothing of the message or of its metadata is lost."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parti.dead_letters import DeadLetter, LetterExtension, LetterKind, letter_headers, letter_id, read_letter
from parti.dead_letters.format import is_letter, letter_subject
from parti.wire.stored import StoredMessage

TASK = LetterExtension(
    kind=LetterKind.DELIVERY,
    id="evt-1",
    outcome="rejected",
    status=422,
    trigger="t1",
    host="example.com:443",
    first_seen=1_800_000_000.123,
    response=b"\x00no",
    history=({"letter": 1, "reason": "rejected"},),
    cut=9,
)
LETTER = DeadLetter("S", "S.a", 7, "rejected", "no good", 3, b"data", {"Kind": "order"}, "c", "w", 5)
NAMES = st.sampled_from(["Kind", "Nats-Msg-Id", "nats-ttl", "Parti-Reason", "Parti-Extension", "Parti-Task-Id", "X-1"])
TEXTS = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1)


def stored(letter: DeadLetter, identity: str = "id") -> StoredMessage:
    return StoredMessage(letter_subject(letter), 4, 1_500_000_000, letter.data, letter_headers(letter, identity))


@given(
    st.builds(
        DeadLetter,
        stream=TEXTS,
        subject=TEXTS,
        original_sequence=st.integers(0, 2**63),
        reason=TEXTS,
        error=TEXTS,
        attempts=st.integers(0, 9),
        data=st.binary(),
        headers=st.dictionaries(NAMES, TEXTS),
        consumer=TEXTS,
        worker=TEXTS,
        epoch=st.integers(0, 2**63),
        extension=st.sampled_from([LetterExtension(), TASK, LetterExtension(LetterKind.GROUP, "g")]),
    )
)
def test_a_letter_comes_back_as_it_was_written(letter: DeadLetter) -> None:
    message = stored(letter)
    assert read_letter(message) == replace(letter, place=message.subject, sequence=4, time=1.5)
    assert is_letter(message)


def test_what_every_letter_tells_has_a_header_each_and_the_rest_is_one_json_object() -> None:
    headers = letter_headers(replace(LETTER, extension=TASK), "id")
    assert {name: headers[name] for name in ("Parti-Reason", "Parti-Stream", "Parti-Sequence", "Parti-Attempts")} == {
        "Parti-Reason": "rejected",
        "Parti-Stream": "S",
        "Parti-Sequence": "7",
        "Parti-Attempts": "3",
    }
    assert json.loads(headers["Parti-Extension"])["status"] == 422
    assert "Parti-Extension" not in letter_headers(LETTER, "id")


def test_headers_that_would_steer_the_letter_are_kept_out_of_its_way() -> None:
    headers = letter_headers(replace(LETTER, headers={"Nats-TTL": "1s", "Parti-Reason": "theirs"}), "mine")
    assert headers["Nats-Msg-Id"] == "mine"
    assert headers["Parti-Reason"] == "rejected"
    assert "Nats-TTL" not in headers


@pytest.mark.parametrize("text", ["", "no json", "[1]", "[" * 5_000, '{"kind":"something else"}', '{"status":"x"}'])
def test_an_extension_that_cannot_be_read_tells_nothing(text: str) -> None:
    message = stored(LETTER)
    odd = replace(message, headers=dict(message.headers) | {"Parti-Extension": text})
    assert read_letter(odd).extension == LetterExtension()


def test_fields_that_a_later_version_adds_are_passed_over() -> None:
    message = stored(LETTER)
    later = replace(
        message, headers=dict(message.headers) | {"Parti-Extension": '{"kind":"group","group":"g","new":1}'}
    )
    assert read_letter(later).extension == LetterExtension(LetterKind.GROUP, "g")


def test_an_epoch_marker_and_a_message_of_somebody_else_are_no_letters() -> None:
    assert not is_letter(StoredMessage("S_DLQ.parti-fence.p", 1, 0, b"{}", {"Parti-Reason": "fence"}))
    assert not is_letter(StoredMessage("S_DLQ.x", 1, 0, b"{}", {}))


def test_the_id_names_the_stream_its_creation_the_readers_and_the_message() -> None:
    found = letter_id(LETTER, created="2026-01-01T00:00:00Z", scope="parti-orders", timestamp=12.3456789)
    assert found == "S:2026-01-01T00:00:00Z:parti-orders:7:12.345679"
