"""The stage of the proof of delivery: the stream, an endpoint that fails at random, and the expected result.

The endpoint does what docs/delivery.md asks of receivers: it refuses a request with an older epoch than it has seen.
"""

from __future__ import annotations

import base64
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import msgspec

from parti.clock import SystemClock
from parti.dead_letters import DeadLetter, DeadLetterReader
from parti.delivery.names import DeliveryNames
from parti.delivery.policy import AttemptOutcome
from parti.delivery.recorder import AttemptRecord
from parti.errors import PartiError
from parti.testing import eventually
from parti.testing.history import Effect, History
from parti.testing.http_server import (
    Answer,
    Drip,
    FaultHttpServer,
    Garbage,
    Hang,
    Huge,
    ReceivedRequest,
    Reply,
    ResetConnection,
    redirect,
)
from parti.wire.api import JetStreamApi
from parti.wire.errors import MessageNotFound, StreamNotFound
from parti_lab.prove.delivery_duplicates import Accepted, explain
from parti_lab.prove.delivery_faults import DeliveryFault

STREAM = "PROVE"
WITHIN = 120.0
_FATAL = {"/redirect": "rejected", "/refused": "rejected", "/poison": "exhausted", "/tls": "exhausted"}


def subject_of(stream: str, document: str) -> str:
    """The subject that publishers must use for a document, where a stream has several partitions."""
    return f"{stream}.db.docs.{base64.urlsafe_b64encode(document.encode()).decode()}"


class DeliveryStage:
    """The stream, the endpoint, the published tasks and their expected results."""

    def __init__(self, js: JetStreamApi, endpoint: FaultHttpServer, rng: random.Random, documents: int) -> None:
        self.js = js
        self.endpoint = endpoint
        self.rng = rng
        self.history = History()
        self.letters = DeadLetterReader(js, STREAM)
        self.expected: dict[str, tuple[str, bytes]] = {}
        """Tasks that must become dead letters: id -> reason and data."""
        self.requests: Counter[str] = Counter()
        self.published = 0
        self.stale_refused = 0
        self.late: list[tuple[str, int]] = []  # id and attempt, read after a later one of the same owner was accepted
        self.timeout = "500ms"
        """For requests that may meet a fault; requests that are certain to be answered have a longer timeout."""
        self.accepted: dict[str, list[Accepted]] = {}
        """By id: when and by which owner the task was accepted; more than one entry is a duplicate."""
        self._clock = SystemClock()
        self._epochs: dict[str, int] = {}
        self._documents = documents
        self._numbers: Counter[str] = Counter()
        self._left: set[str] = set()
        endpoint.otherwise(self._reply)

    def _reply(self, request: ReceivedRequest) -> Reply:
        """Answer with random faults; a request answered with 2xx is an effect."""
        webhook_id = request.headers["webhook-id"]
        self.requests[webhook_id] += 1
        slot, epoch = request.headers["x-parti-partition"], int(request.headers["x-parti-epoch"])
        if epoch < self._epochs.get(slot, 0):
            self.stale_refused += 1
            return Answer(409)
        self._epochs[slot] = epoch
        if request.path in _FATAL:
            location = "http://169.254.169.254/latest/meta-data/"
            return {"/redirect": redirect(location), "/refused": Answer(422, body=b"no" * 5000)}.get(
                request.path, Answer(503)
            )
        if self.rng.random() < 0.25:
            return self.rng.choice(_FAULTS)
        attempt = int(request.headers["x-parti-attempt"])
        before = self.accepted.get(webhook_id)
        if before and before[-1].epoch == epoch and attempt < before[-1].attempt:
            # After a stall the endpoint may read a timed-out request after the next attempt; the log shows it.
            self.late.append((webhook_id, attempt))
            return Answer(200)
        body = request.json()
        number, document = body["payload"]["n"], body["documentId"]
        self.history.effect(Effect(slot, document, "p", number, f"epoch-{epoch}", epoch))
        self._left.discard(webhook_id)
        this = Accepted(self._clock.now(), epoch, attempt)
        self.accepted.setdefault(webhook_id, []).append(this)
        # The status decides: the task is accepted, even if the body is too long or never ends.
        whim = self.rng.random()
        return Huge(size=1 << 20) if whim < 0.01 else Drip(size=100, interval=0.1) if whim < 0.02 else Answer(200)

    async def publish(self, count: int) -> None:
        """Publish tasks of random documents; one in twelve must become a dead letter."""
        for _ in range(count):
            document = f"doc-{self.rng.randrange(self._documents)}"
            number = self._numbers[document] = self._numbers[document] + 1
            webhook_id = f"{document}-{number}"
            path = self.rng.choice(list(_FATAL)) if self.rng.random() < 1 / 12 else "/hook"
            url = self.endpoint.url.replace("http:", "https:") if path == "/tls" else self.endpoint.url
            data = self.task(document, number, url + path)
            if path in _FATAL:
                self.expected[webhook_id] = (_FATAL[path], data)
            else:
                self._left.add(webhook_id)
            await self._store(document, webhook_id, data)
            if path not in _FATAL:
                self.history.published(document, "p", number)
            self.published += 1

    def task(self, document: str, number: int, url: str) -> bytes:
        task: dict[str, Any] = {
            "triggerId": "prove",
            "database": "db",
            "collection": "docs",
            "documentId": document,
            "event": "update",
            "url": url,
            "timeout": self.timeout if url.endswith("/hook") else "10s",
            "payload": {"n": number},
        }
        if url.endswith(("/poison", "/tls")):
            task["retryPolicy"] = {"maxAttempts": 3, "initialBackoff": "50ms"}
        return json.dumps(task).encode()

    async def _store(self, document: str, webhook_id: str, data: bytes) -> None:
        """Publish until the server has stored it; the message id makes a second publish harmless."""

        async def stored() -> bool:
            try:
                await self.js.publish(subject_of(STREAM, document), data, headers={"Nats-Msg-Id": webhook_id})
            except PartiError:
                return False
            return True

        await eventually(stored, WITHIN, "a publish")

    async def settled(self) -> bool:
        """Whether every task has arrived or is a dead letter."""
        if self._left:
            return False
        letters, stored = DeliveryNames(STREAM).dead_letters, 0
        try:
            async for page in self.js.stream_subjects(letters, f"{letters}.db.>"):  # the others are drivers' markers
                stored += sum(page.values())
        except StreamNotFound:
            pass  # the stream does not exist: nothing was delivered, and there are no dead letters
        except PartiError:
            return False
        return stored >= len(self.expected)

    async def judge(self) -> dict[str, int]:
        """Counts of what is wrong with the dead letters."""
        found: dict[str, DeadLetter] = {}
        doubled = incomplete = unspent = 0
        async for letter in self.letters.walk():
            told = letter.extension
            doubled += told.id in found
            found[told.id] = letter
            reason, data = self.expected.get(told.id, ("", b""))
            tried = 3 if reason == "exhausted" else 1
            answered = told.status >= 300 or told.outcome == "tls"
            incomplete += not (
                letter.reason == reason and letter.data == data and letter.attempts == tried and answered
            )
            # A failed TLS handshake is an attempt that the endpoint never saw as a request.
            unspent += letter.attempts > self.requests[told.id] and told.outcome != "tls"
        return {
            "dead_letters": len(found),
            "dead_letters_missing": len(self.expected.keys() - found.keys()),
            "dead_letters_wrong": incomplete + doubled,
            "attempts_without_a_request": unspent,
        }

    async def duplicates(self, faults: list[DeliveryFault], in_flight: int) -> dict[str, int]:
        """Counts of second acceptances by the fault that explains them."""
        unheard = {(record.id, record.attempt) for record in [r async for r in self._unheard()]}
        found = explain(self.accepted, faults, unheard, in_flight=in_flight)
        backwards = sum(attempt not in unheard for attempt in self.late)
        found["unexplained"] += backwards
        return {f"duplicates_{kind}": count for kind, count in found.items()} | {
            "read_late": len(self.late) - backwards
        }

    async def _unheard(self) -> AsyncIterator[AttemptRecord]:
        """The attempts that ended without an answer, from the workers' log."""
        stream = DeliveryNames(STREAM).attempts
        for outcome in (AttemptOutcome.TIMEOUT, AttemptOutcome.NETWORK):
            sequence = 0
            with suppress(MessageNotFound, StreamNotFound):
                while True:
                    stored = await self.js.msg_get(stream, seq=sequence + 1, next_by_subj=f"{stream}.{outcome.value}")
                    sequence = stored.seq
                    yield msgspec.json.decode(stored.data, type=AttemptRecord)


_FAULTS: tuple[Reply, ...] = (
    Answer(500),
    Answer(503, {"Retry-After": "0"}),
    Answer(429, {"Retry-After": "1"}),
    Answer(408),
    Hang(),
    ResetConnection(),
    Drip(size=100, interval=0.1, status=503),
    Garbage(),
)
