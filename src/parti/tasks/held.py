"""A task in hand, and a wake-up in hand: what came from the server and is not let go yet."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from parti.config.deliver import DeliverSection
from parti.tasks import names as n
from parti.tasks.errors import Misrouted, TaskRefused
from parti.tasks.order import Order, RuleBook, Rules
from parti.tasks.task import DeliveryTask, decode_task, lane_key, task_id
from parti.tasks.urls import Endpoint, parse_endpoint

if TYPE_CHECKING:
    from parti.tasks.feed import Feed

NO_HOST = ""
_ID = re.compile(r"[\x21-\x7e]{1,256}")


class Held:
    """One task: decoded, or refused with the reason. Only its lane changes it."""

    __slots__ = (
        "attempts",
        "data",
        "due",
        "endpoint",
        "failed_at",
        "feed",
        "first_seen",
        "headers",
        "host",
        "id",
        "key",
        "park_sequence",
        "received",
        "refusal",
        "rules",
        "sequence",
        "source",
        "subject",
        "task",
        "unknown_fields",
    )

    def __init__(self) -> None:
        self.id = ""
        self.key = ""
        self.data = b""
        self.headers: Mapping[str, str] = {}
        self.subject = ""
        self.sequence = 0
        """Of the message in the stream it was delivered from; 0 for one that was read from the park."""
        self.source = ""
        """Stream and sequence of the first publish, the base of ids that must not repeat."""
        self.feed: Feed | None = None
        """Whom to tell when it is let go; None for a task that was read from the park."""
        self.park_sequence = 0
        self.received = 0.0
        self.first_seen = 0.0
        self.attempts = 0
        self.due = 0.0
        """Not to be tried before, by the clock."""
        self.failed_at: float | None = None
        self.task: DeliveryTask | None = None
        self.endpoint: Endpoint | None = None
        self.rules = Rules()
        self.refusal: TaskRefused | None = None
        self.host = NO_HOST
        self.unknown_fields = 0

    def __repr__(self) -> str:
        return f"<Held {self.id} attempts={self.attempts} {'refused' if self.refusal else self.host}>"

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def database(self) -> str:
        return self.task.database if self.task is not None else ""

    @property
    def trigger(self) -> str:
        return self.task.trigger_id if self.task is not None else ""

    def carried(self) -> dict[str, str]:
        """The headers under which it is parked or scheduled: everything that must survive."""
        kept = {name: value for name, value in self.headers.items() if not name.lower().startswith("nats-")}
        return kept | {
            n.TASK_ID: self.id,
            n.ATTEMPTS: str(self.attempts),
            n.FIRST_SEEN: f"{self.first_seen:.3f}",
            n.SUBJECT: self.subject,
            n.ORIGIN: self.source,
        }


@dataclass(slots=True)
class Wake:
    """A schedule that has come due: the document's head may be tried again."""

    key: str
    sequence: int
    head: str
    """Id of the task that was tried, and how often."""
    attempts: int


class Reader:
    """Makes held tasks out of messages; never raises for what a message holds."""

    def __init__(self, config: DeliverSection, book: RuleBook) -> None:
        self._config = config
        self._book = book

    def read(
        self, data: bytes, headers: Mapping[str, str], *, stream: str, subject: str, sequence: int, time: float
    ) -> Held:
        """The task of one message; what is wrong with it is its `refusal`."""
        held = Held()
        held.data, held.headers = data, headers
        held.sequence = sequence
        held.first_seen = _number(headers.get(n.FIRST_SEEN), time)
        held.attempts = max(0, int(_number(headers.get(n.ATTEMPTS), 0)))
        origin, number = stream, sequence
        if source := headers.get(n.SOURCED):
            # "TRIGGERS 12 <filters> <transforms> <subject> <id>": written by the server for sourced messages.
            words = source.split(" ")
            if len(words) >= 5 and words[1].isdecimal():
                origin, number, subject = words[0], int(words[1]), words[4]
        held.subject = headers.get(n.SUBJECT) or subject
        held.source = headers.get(n.ORIGIN) or f"{origin}:{number}"
        held.id = _fit_id(headers.get(n.TASK_ID) or headers.get(n.MSG_ID)) or task_id(origin, number)
        try:
            decoded = decode_task(data, max_size=self._config.max_task)
            task = held.task = decoded.task
            held.unknown_fields = decoded.unknown_fields
            held.rules = self._book.of(task.trigger_id)
            per_trigger = self._config.lane_per_trigger or held.rules.order is Order.LATEST
            held.key = lane_key(task, per_trigger=per_trigger)
            if self._config.subjects == "checked" and self._config.partitions > 1:
                check_subject(held, self._config.stream)
            held.endpoint = parse_endpoint(task.url)
            held.host = held.endpoint.host
        except TaskRefused as refusal:
            held.refusal = refusal
            # Without a document it has no order to keep: a lane of its own.
            held.key = held.key or f"refused-{held.source}"
        return held


def check_subject(held: Held, stream: str) -> None:
    """`Misrouted` unless the subject is the one of the task's document: partitions are told by subjects.

    A publisher that hashed the document, as it was too long, says so; then the rest has to agree.
    """
    task = held.task
    assert task is not None
    place = f"{stream}.{task.database}.{task.collection}."
    given, _, last = held.subject.rpartition(".")
    if f"{given}." != place or not (task.subject_hashed or last.rstrip("=") == _document_token(task.document_id)):
        raise Misrouted(
            f"the task came on {held.subject!r}, and its document's subject is {place}<base64url of the document id>"
        )


def subject_disagrees(held: Held) -> bool:
    """Whether the subject names another document than the task does; the task is what counts."""
    task = held.task
    if task is None or task.subject_hashed:
        return False
    return _document_token(task.document_id) != held.subject.rpartition(".")[2].rstrip("=")


@lru_cache(maxsize=8_192)
def _document_token(document: str) -> str:
    return base64.urlsafe_b64encode(document.encode(errors="surrogatepass")).decode().rstrip("=")


def _fit_id(given: str | None) -> str:
    """The publisher's id, as it may stand in a header of a request; an unfit one becomes its own hash."""
    if not given or _ID.fullmatch(given):
        return given or ""
    return "msg_" + hashlib.sha256(given.encode(errors="surrogatepass")).hexdigest()[:32]


def _number(text: str | None, default: float) -> float:
    try:
        return float(text) if text is not None else default
    except ValueError:
        return default
