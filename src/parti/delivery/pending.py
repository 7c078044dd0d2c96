"""A task and a wake-up in flight: received from the server and not released yet."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from parti.config.deliver import DeliverSection
from parti.delivery import names as n
from parti.delivery.errors import Misrouted, TaskRefused, unforeseen
from parti.delivery.order import OrderRules, RuleBook, TaskOrder
from parti.delivery.task import DeliveryTask, decode_task, lane_key, task_id
from parti.delivery.urls import Endpoint, parse_endpoint

if TYPE_CHECKING:
    from parti.delivery.feed import Feed

NO_HOST = ""
_ID = re.compile(r"[\x21-\x2d\x2f-\x7e]{1,256}")
"""Without a dot: the signed text is `<id>.<timestamp>.<body>`, and must have only one reading."""
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}")
_HEADER_VALUE = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f]*")
_MOST_ATTEMPTS = 1_000_000
_LONGEST_HISTORY = 4_096  # characters; ten letters take a third of it
_LONG = 256  # characters of a document's name; longer names are not cached


class Pending:
    """One task: decoded, or refused with the reason. Only its lane changes it."""

    __slots__ = (
        "again",
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
        "ours",
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
        """As received: a publisher's headers may hold anything."""
        self.ours = False
        self.subject = ""
        self.again = False
        """Whether a previous owner may have received it."""
        self.sequence = 0
        """Sequence of the message in the stream it was delivered from; 0 for a task that was read from the park."""
        self.source = ""
        """Stream and sequence of the first publish, the base of unique ids."""
        self.feed: Feed | None = None
        """The feed that acknowledges it; None for a task that was read from the park."""
        self.park_sequence = 0
        self.received = 0.0
        self.first_seen = 0.0
        self.attempts = 0
        self.due = 0.0
        """Not to be tried before this time, by the clock."""
        self.failed_at: float | None = None
        self.task: DeliveryTask | None = None
        self.endpoint: Endpoint | None = None
        self.rules = OrderRules()
        self.refusal: TaskRefused | None = None
        self.host = NO_HOST
        self.unknown_fields = 0

    def __repr__(self) -> str:
        return f"<Pending {self.id} attempts={self.attempts} {'refused' if self.refusal else self.host}>"

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def database(self) -> str:
        return self.task.database if self.task is not None else ""

    @property
    def trigger(self) -> str:
        return self.task.trigger_id if self.task is not None else ""

    def refuse(self, refusal: TaskRefused) -> None:
        """Mark the task as undeliverable, with the reason."""
        self.refusal = refusal
        # Without a document there is no order to keep: it gets its own lane.
        self.key = self.key or f"refused-{self.source}"

    def carried(self) -> dict[str, str]:
        """The headers under which it is parked or scheduled: everything that must survive."""
        return {
            **_fit_headers(self.headers, self.ours),
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
    due: float = 0.0
    """Unix seconds by the clock of the process that stored it; the server's clock may be ahead."""


class TaskReader:
    """Turns messages into `Pending` tasks; never raises for the content of a message."""

    def __init__(self, config: DeliverSection, book: RuleBook) -> None:
        self._config = config
        self._book = book
        self._lanes = n.DeliveryNames(config.stream).lanes

    def read(
        self,
        data: bytes,
        headers: Mapping[str, str],
        *,
        stream: str,
        subject: str,
        sequence: int,
        time: float,
        ours: bool = False,
    ) -> Pending:
        """The task of one message; a problem with it becomes its `refusal`.

        `ours`: this library stored the message, in the park. Only there the headers for attempts and origin are
        trusted: in the task stream anyone may write them.
        """
        held = Pending()
        held.data, held.sequence, held.first_seen = data, sequence, time
        origin, number = stream, sequence
        if stream == self._lanes and (source := headers.get(n.SOURCED)):
            # "TRIGGERS 12 <filters> <transforms> <subject> <id>": written by the server for sourced messages.
            words = source.split(" ")
            if len(words) >= 5 and words[1].isdecimal():
                origin, number, subject = words[0], int(words[1][:20]), words[4]
        held.subject, held.source = subject, f"{origin}:{number}"
        if headers:
            held.headers, held.ours = headers, ours
            if ours:
                held.first_seen = _number(headers.get(n.FIRST_SEEN), time)
                held.attempts = int(min(max(0.0, _number(headers.get(n.ATTEMPTS), 0)), _MOST_ATTEMPTS))
                held.subject = headers.get(n.SUBJECT) or subject
                held.source = headers.get(n.ORIGIN) or held.source
        held.id = _fit_id(headers.get(n.TASK_ID) or headers.get(n.MSG_ID)) or task_id(origin, number)
        try:
            self._decode(held)
        except TaskRefused as refusal:
            held.refuse(refusal)
        except MemoryError:
            raise  # a local problem, not the task's
        except Exception as error:
            held.refuse(unforeseen(error, "read"))
        return held

    def _decode(self, held: Pending) -> None:
        decoded = decode_task(held.data, max_size=self._config.max_task)
        task = held.task = decoded.task
        held.unknown_fields = decoded.unknown_fields
        held.rules = self._book.of(task.trigger_id)
        per_trigger = self._config.lane_per_trigger or held.rules.order is TaskOrder.LATEST
        held.key = lane_key(task, per_trigger=per_trigger)
        if self._config.subjects == "checked" and self._config.partitions > 1:
            check_subject(held, self._config.stream)
        held.endpoint = parse_endpoint(task.url)
        held.host = held.endpoint.host


def check_subject(held: Pending, stream: str) -> None:
    """Raise `Misrouted` unless the subject belongs to the task's document: the subject decides the partition.

    If the publisher hashed a too long document name, the task says so; then the other parts must match. If it hashed
    the whole subject, only the hash can be compared.
    """
    task = held.task
    assert task is not None
    place = f"{stream}.{task.database}.{task.collection}."
    given, _, last = held.subject.rpartition(".")
    document = _document_token(task.document_id)
    if task.subject_hashed and given == f"{stream}.hashed":
        fits = last in {_subject_hash(f"{place}{document}{padding}") for padding in ("", "=" * (-len(document) % 4))}
    else:
        fits = f"{given}." == place and (task.subject_hashed or last.rstrip("=") == document)
    if not fits:
        raise Misrouted(
            f"the task came on {held.subject!r}, and its document's subject is {place}<base64url of the document id>"
        )


def subject_disagrees(held: Pending) -> bool:
    """Whether the subject names another document than the task does; the task decides."""
    task = held.task
    if task is None or task.subject_hashed:
        return False
    document = task.document_id
    token = _document_token(document) if len(document) > _LONG else _cached_token(document)
    return token != held.subject.rpartition(".")[2].rstrip("=")


def _subject_hash(subject: str) -> str:
    return hashlib.sha256(subject.encode(errors="surrogatepass")).hexdigest()[:32]


def _document_token(document: str) -> str:
    return base64.urlsafe_b64encode(document.encode(errors="surrogatepass")).decode().rstrip("=")


_cached_token = lru_cache(maxsize=8_192)(_document_token)


def _fit_headers(headers: Mapping[str, str], ours: bool) -> dict[str, str]:
    """The headers stored with the task: none that controls the server, and none that the server or a client refuses,
    because then a dead letter could not be stored."""
    kept: dict[str, str] = {}
    dropped = 0
    for name, value in headers.items():
        lowered = name.lower()
        if lowered.startswith("nats-") or (lowered.startswith("parti-") and not ours and name not in n.FROM_PUBLISHERS):
            continue
        if name == n.HISTORY and len(value) > _LONGEST_HISTORY:
            continue  # not written by this library
        if _HEADER_NAME.fullmatch(name) and _HEADER_VALUE.fullmatch(value):
            kept[name] = value
        else:
            dropped += 1
    if dropped:
        kept[n.DROPPED] = str(dropped)
    return kept


def _fit_id(given: str | None) -> str:
    """The publisher's id, if it is valid in a request header; an invalid one is replaced by its hash."""
    if not given or _ID.fullmatch(given):
        return given or ""
    return "msg_" + hashlib.sha256(given.encode(errors="surrogatepass")).hexdigest()[:32]


def _number(text: str | None, default: float) -> float:
    try:
        number = float(text) if text is not None else default
    except ValueError:
        return default
    return number if math.isfinite(number) else default
