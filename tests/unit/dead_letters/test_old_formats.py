"""Letters of earlier versions, recorded on a real server (tests/data/letters), are still read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parti.dead_letters import DeadLetter, LetterExtension, LetterKind, read_letter
from parti.dead_letters.format import is_letter
from parti.wire.stored import StoredMessage

RECORDED = Path(__file__).parents[2] / "data" / "letters"


def recorded(kind: str) -> list[DeadLetter]:
    messages = json.loads((RECORDED / f"{kind}.json").read_text())["messages"]
    stored = [StoredMessage.from_json(message) for message in messages]
    assert all(is_letter(message) for message in stored)
    return [read_letter(message) for message in stored]


def test_of_a_worker() -> None:
    (letter,) = recorded("worker")
    assert (letter.stream, letter.subject, letter.original_sequence) == ("OLDW", "OLDW.a", 1)
    assert (letter.reason, letter.error, letter.attempts) == ("rejected", "cannot take it", 1)
    assert (letter.worker, letter.consumer, letter.epoch, letter.data) == ("w1", "parti-w1", 0, b"one")
    theirs = {"Kind": "order", "Nats-Msg-Id": "p-1", "Parti-Reason": "theirs", "Parti-Task-Id": "t-9"}
    assert dict(letter.headers) == theirs, "a message with a task's id is not therefore a task of delivery"
    assert letter.extension == LetterExtension()


@pytest.mark.parametrize(
    ("kind", "stream", "subject"), [("static_group", "OLDG", "1.OLDG.a"), ("elastic_group", "OLDE", "OLDE.a")]
)
def test_of_a_group(kind: str, stream: str, subject: str) -> None:
    (letter,) = recorded(kind)
    assert (letter.stream, letter.subject, letter.consumer, letter.worker) == (stream, subject, "g", "m1")
    assert (letter.reason, letter.error, letter.data, letter.headers["Kind"]) == (
        "rejected",
        "no good",
        b"one",
        "order",
    )
    assert letter.epoch > 0


def test_of_the_pipeline() -> None:
    (letter,) = recorded("pipeline")
    assert (letter.stream, letter.subject, letter.original_sequence) == ("OLDP", "OLDP.k7", 7)
    assert (letter.consumer, letter.worker, letter.epoch) == ("orders", "driver-1", 5)
    assert (letter.reason, letter.error) == ("max_deliver", "ValueError: seven")
    assert dict(letter.headers) == {"trace": "abc", "Nats-Msg-Id": "p-7"}


def test_of_delivery() -> None:
    first, again, cut = recorded("delivery")
    assert (first.kind, first.extension.id, first.origin) == (LetterKind.DELIVERY, "evt-1", "OLDD:1")
    assert (first.subject, first.place) == ("OLDD.shop.orders.YQ==", "OLDD_DLQ.shop.orders.rejected")
    assert (first.reason, first.error, first.attempts) == ("rejected", "the endpoint answered 422", 1)
    told = first.extension
    assert (told.outcome, told.status, told.response, told.trigger) == ("rejected", 422, b"no such order", "t1")
    assert (told.first_seen, told.history, told.cut) == (1794968527.688, (), 0)
    assert dict(first.headers) == {"X-Own": "kept"}
    assert json.loads(first.data)["documentId"] == "a"
    assert [before["letter"] for before in again.extension.history] == [1]
    assert (again.extension.id, again.original_sequence) == ("evt-1", 2)
    assert (cut.extension.cut, cut.data) == (1_048_512, b"")
