"""The streams of a generated case on a real server, and a ledger of all messages ever in the stream that is read."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from typing import Any

from parti.errors import TransientError
from parti.testing import NeverHappened, eventually_blocking, insist_blocking
from parti.wire.blocking import BlockingConnection
from parti.wire.options import ConnectOptions
from parti_lab.prove.plain_reader import Plain, PlainReader
from parti_lab.prove.spark_case import Act, Case

_ODD = ("käse", "🧀", "a-b_c/d", "x" * 300, "a*b", "b>", "MSG", "$JS", "'\"", "{}", "%s", "\\")
_LARGEST = 1 << 20
_FRONT = frozenset({"front", "limit", "bytes", "flood", "publish", "age"})
_SILENCE = 5.0  # seconds without an arrival after which sent messages count as lost
_AGED = 0.25  # max_age in seconds during a storm that ages messages; the server's minimum is 0.1


class SparkWorld:
    """One case's streams. `ledger` has every message ever seen in the stream that is read."""

    def __init__(self, urls: tuple[str, ...], case: Case, seed: int) -> None:
        self.case = case
        self.rng = random.Random(f"{seed}:{case.number}:world")
        self._connection: BlockingConnection | None = None
        self.plain = PlainReader(*urls)
        self.origin = f"G{case.number}"
        self.name = self.origin if case.stream.kind == "plain" else f"{self.origin}R"
        self.ledger: dict[int, Plain] = {}
        self.present: set[int] = set()
        self.front: set[int] = set()
        """Sequences that the stream removed from its front, by limits or a purge."""
        self.mortal: set[int] = set()
        """Sequences of messages with a TTL that ends during the case."""
        self.step = 0
        self.gone_at: dict[int, int] = {}
        """The step at which a sequence was seen to be gone."""
        self.stormy: int | None = None
        """The sequence after which messages were added and removed during the read; their times are unknown."""
        self.forgotten: set[int] = set()
        """Sequences of the deleted stream; the recreated one continues after them."""
        self.remade_at = 0
        """The step at which the stream was recreated."""
        self._thread: threading.Thread | None = None
        self._urls = urls
        self._last_noted = 0
        self._number = 0
        odd = "odd" in case.stream.features
        names = [_ODD[i % len(_ODD)] if odd else f"k{i}" for i in range(case.stream.subjects)]
        self.subjects = [f"{self.origin}.{name}.{i}" for i, name in enumerate(names)]
        self.filters = (f"{self.origin}.*.0", f"{self.origin}.*.1") if self.rng.random() < 0.5 else (self.subjects[0],)

    @property
    def connection(self) -> BlockingConnection:
        """An open connection: the faults of a case restart servers."""
        if self._connection is None or self._connection.closed:
            self._connection = BlockingConnection.open(ConnectOptions(servers=self._urls))
        return self._connection

    def build(self) -> None:
        """After this returns the stream is as the case defines it, and the ledger is complete."""
        plan = self.case.stream
        self.api(f"STREAM.CREATE.{self.origin}", self._config())
        if plan.retention == "interest":
            config = {"durable_name": "keeper", "ack_policy": "explicit"}
            self.api(f"CONSUMER.CREATE.{self.origin}.keeper", {"stream_name": self.origin, "config": config})
        for index, mirror in enumerate(plan.mirrors):
            self._mirror(f"{self.origin}M{index}", self.origin, mirror)
        self._publish(plan.messages)
        self._synced([f"{self.origin}M{index}" for index in range(len(plan.mirrors))])
        if plan.kind == "plain":
            self._note("publish")
        for act in plan.acts:
            self.act(act)
        if plan.kind != "plain":
            self._derive(plan.kind)
            self._synced([self.name])
            self._note("publish")
        if "sealed" in plan.features:
            config = self.api(f"STREAM.INFO.{self.origin}")["config"] | {"sealed": True}
            self.api(f"STREAM.UPDATE.{self.origin}", config)

    def act(self, act: Act) -> None:
        """Apply a change to the stream, and record what it removed."""
        if self._thread is not None:
            return  # one change at a time: during a storm it is unknown what an act removed
        self.step += 1
        here = sorted(self.present)
        some = int(len(here) * act.share)
        match act.name:
            case "publish":
                self._publish(act.count)
            case "delete":
                self._delete(self.rng.sample(here, some))
            case "run":
                begin = self.rng.randrange(max(len(here) - some, 1))
                self._delete(here[begin : begin + some])
            case "tail":
                self._delete(here[len(here) - some :])
            case "purge_subject":
                self.api(f"STREAM.PURGE.{self.origin}", {"filter": self.rng.choice(self.subjects)})
            case "front":
                last = here[some - 1] if some else 0
                self.api(f"STREAM.PURGE.{self.origin}", {"seq": last + 1})
            case "limit":
                config = self.api(f"STREAM.INFO.{self.origin}")["config"]
                self.api(f"STREAM.UPDATE.{self.origin}", config | {"max_msgs": max(len(here) - some, 1)})
            case "bytes":
                state = self.api(f"STREAM.INFO.{self.origin}")
                limit = max(int(state["state"]["bytes"] * (1 - act.share)), 2 * _LARGEST)
                self.api(f"STREAM.UPDATE.{self.origin}", state["config"] | {"max_bytes": limit})
            case "flood":
                self._publish(act.count)  # more than the stream keeps: half of them are gone before they are read
                self._note("publish")
                config = self.api(f"STREAM.INFO.{self.origin}")["config"]
                self.api(f"STREAM.UPDATE.{self.origin}", config | {"max_msgs": act.count // 2})
            case "storm":
                self._storm(act.count, {"max_msgs": max(len(here), 50)})
            case "aging":
                self._storm(act.count, {"max_age": int(_AGED * 1e9)})
            case "age":
                self._age(here[:some])
            case "remake":
                self._remake(act.count)
            case "gap":
                self._publish(act.count, f"{self.origin}.gap.9")
                self.api(f"STREAM.PURGE.{self.origin}", {"filter": f"{self.origin}.gap.9"})
                if self.rng.random() < 0.7:
                    self._publish(20)
        if self.case.stream.kind == "plain" and act.name not in ("storm", "aging"):
            self._note(act.name)

    def api(self, suffix: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return insist_blocking(lambda: self.connection.api(suffix, body))

    def close(self) -> None:
        """Delete the streams, so that later cases have the server to themselves."""
        if self._thread is not None:
            self._thread.join()
        names = self.api("STREAM.NAMES").get("streams") or []
        for name in sorted((each for each in names if each.startswith(self.origin)), reverse=True):
            self.api(f"STREAM.DELETE.{name}")
        self.connection.close()
        self.plain.close()

    def _config(self) -> dict[str, Any]:
        plan = self.case.stream
        config: dict[str, Any] = {
            "name": self.origin,
            "subjects": [f"{self.origin}.>"],
            "retention": plan.retention,
            "storage": plan.storage,
            "num_replicas": plan.replicas,
            "allow_direct": plan.direct,
        }
        extra: dict[str, dict[str, Any]] = {
            "ttl": {"allow_msg_ttl": True},
            "counter": {"allow_msg_counter": True},
            "schedule": {"allow_msg_schedules": True, "allow_msg_ttl": True},
            "per_subject": {"max_msgs_per_subject": 3 if plan.subjects > 3 else 200},
            "compressed": {"compression": "s2"} if plan.storage == "file" else {},
            "sequence": {"first_seq": 1_000_000 + plan.messages},
        }
        for feature in plan.features:
            config |= extra.get(feature, {})
        return config

    def _mirror(self, name: str, of: str, kind: str) -> None:
        mirror: dict[str, Any] = {"name": of}
        if kind == "filtered":
            mirror["filter_subject"] = f"{self.origin}.*.0"
        plan = self.case.stream
        body = {"name": name, "mirror": mirror, "storage": plan.storage, "num_replicas": plan.replicas}
        self.api(f"STREAM.CREATE.{name}", body)

    def _derive(self, kind: str) -> None:
        if kind == "sourced":
            sources = [{"name": self.origin, "filter_subject": f"{self.origin}.*.0"} if len(self.subjects) > 3 else {}]
            body = {"name": self.name, "sources": [{"name": self.origin} | sources[0]], "allow_direct": True}
            self.api(f"STREAM.CREATE.{self.name}", body | {"num_replicas": self.case.stream.replicas})
        else:
            self._mirror(self.name, self.origin, kind)

    def _synced(self, names: list[str]) -> None:
        for name in names:

            def current(name: str = name) -> bool:
                info = self.api(f"STREAM.INFO.{name}")
                parts = [*(info.get("sources") or ()), info.get("mirror")]
                return all(part is None or (part["lag"] == 0 and part["active"] != -1) for part in parts)

            eventually_blocking(current, 60, f"{name} caught up")

    def _publish(self, count: int, subject: str | None = None) -> None:
        if not count:
            return
        due = self._last() + count
        while (missing := due - self._last()) > 0:
            frames = bytearray()
            for _ in range(missing):
                frames += self._frame(subject)
                if len(frames) > 1 << 20:
                    self.connection.send(bytes(frames))
                    frames.clear()
            self.connection.send(bytes(frames))
            self._arrived(due)

    def _arrived(self, due: int) -> None:
        """Return when all messages are stored, or no more arrive: a cluster loses messages while it elects a leader."""
        last = -1
        while last < due:

            def more(before: int = last) -> bool:
                return self._last() > before

            try:
                eventually_blocking(more, _SILENCE, "more is stored")
            except NeverHappened:
                return
            last = self._last()

    def _age(self, old: list[int]) -> None:
        """Let messages really reach their age; those after them may too, because they are only slightly younger."""
        if not old:
            return
        config = self.api(f"STREAM.INFO.{self.origin}")["config"]
        age = time.time_ns() - self.ledger[old[-1]].microseconds * 1_000
        self.api(f"STREAM.UPDATE.{self.origin}", config | {"max_age": max(age, int(1e8)), "duplicate_window": int(1e8)})

        def gone() -> bool:
            return int(self.api(f"STREAM.INFO.{self.origin}")["state"]["first_seq"]) > old[-1]

        eventually_blocking(gone, 30, "the old have reached their age")
        self.api(f"STREAM.UPDATE.{self.origin}", config)

    def _remake(self, count: int) -> None:
        """Delete and recreate the stream; its sequences continue after the old ones, so each row shows its stream."""
        self._note("publish")
        config = self.api(f"STREAM.INFO.{self.origin}")["config"]
        last = max(self._last(), max(self.ledger, default=0))
        self.forgotten |= self.ledger.keys()
        self.remade_at = self.step
        self.api(f"STREAM.DELETE.{self.origin}")
        self.api(f"STREAM.CREATE.{self.origin}", config | {"first_seq": last + 1_000})
        self._publish(count)

    def _storm(self, count: int, limit: dict[str, int]) -> None:
        """Start to publish on a stream that discards old messages, and continue while it is read, until `settle`."""
        config = self.api(f"STREAM.INFO.{self.origin}")["config"]
        if self._thread is not None or "counter" in self.case.stream.features or config["max_msgs_per_subject"] > 0:
            return
        self.api(f"STREAM.UPDATE.{self.origin}", config | {"duplicate_window": int(1e8)} | limit)
        self._note("limit")
        before = self._last()
        self.stormy = before
        expected = [(f"{self.origin}.storm.0", b"storm %d" % number) for number in range(count)]
        for number, (subject, data) in enumerate(expected):
            self.ledger[before + 1 + number] = Plain(before + 1 + number, subject, 0, (), data)
        urls = self._urls
        connection = BlockingConnection.open(ConnectOptions(servers=urls))
        self._first_of_storm(connection, before, *expected[0])

        def blow() -> None:
            with connection:
                for start in range(1, count, 100):
                    some = expected[start : start + 100]
                    frames = [b"PUB %s %d\r\n%s\r\n" % (name.encode(), len(data), data) for name, data in some]
                    connection.send(b"".join(frames))
                    connection.ping()

        self._thread = threading.Thread(target=blow)
        self._thread.start()

    def _first_of_storm(self, connection: BlockingConnection, before: int, subject: str, data: bytes) -> None:
        """Store it once, even if answers are lost; afterwards the stream has a leader that hears this connection."""
        while self._last() == before:
            with contextlib.suppress(TransientError):
                connection.request(subject, data)

    def settle(self) -> None:
        """After this returns the stream no longer changes."""
        if self._thread is None:
            return
        self._thread.join()
        assert self.stormy is not None
        due = max(self.ledger)
        eventually_blocking(lambda: self._last() >= due, 60, "the storm is stored")
        config = self.api(f"STREAM.INFO.{self.origin}")["config"]
        self.api(f"STREAM.UPDATE.{self.origin}", config | {"max_age": 0})  # keep the rest until it is judged
        self.present |= {sequence for sequence in self.ledger if sequence > self.stormy}
        self._note("limit")

    def _delete(self, sequences: list[int]) -> None:
        for sequence in sequences:
            # A message that its TTL or a limit removed meanwhile is gone as well.
            self.plain.call(f"STREAM.MSG.DELETE.{self.origin}", {"seq": sequence, "no_erase": True})

    def _last(self) -> int:
        return int(self.api(f"STREAM.INFO.{self.origin}")["state"]["last_seq"])

    def _frame(self, subject: str | None) -> bytes:
        self._number += 1
        features = self.case.stream.features
        data = b"%d" % self._number
        headers: list[tuple[str, str]] = []
        if subject is None:
            subject = self.rng.choice(self.subjects)
            data += b" " + self._payload()
            headers = self._headers()
        if "counter" in features:
            data, headers = b"", [("Nats-Incr", "+1")]
        if "ttl" in features and self.rng.random() < 0.3:
            headers.append(("Nats-TTL", self.rng.choice(("1s", "1h"))))
        if "schedule" in features and self.rng.random() < 0.01 and not subject.endswith("gap.9"):
            target = f"{self.origin}.due.7"
            headers += [("Nats-Schedule", "@at 2099-01-01T00:00:00Z"), ("Nats-Schedule-Target", target)]
            subject = f"{self.origin}.planned{self._number}.8"
        if not headers:
            return b"PUB %s %d\r\n%s\r\n" % (subject.encode(), len(data), data)
        block = b"NATS/1.0\r\n" + b"".join(f"{key}:{value}\r\n".encode() for key, value in headers) + b"\r\n"
        sizes = (subject.encode(), len(block), len(block) + len(data))
        return b"HPUB %s %d %d\r\n%s%s\r\n" % (*sizes, block, data)

    def _payload(self) -> bytes:
        match self.case.stream.sizes:
            case "tiny":
                return b""
            case "mixed":
                return self.rng.randbytes(self.rng.choice((0, 3, 100, 2_000)))
            case "large":
                few = self.rng.random() < 0.01
                return bytes(_LARGEST - 1_000) if few else self.rng.randbytes(self.rng.choice((0, 9_000)))

    def _headers(self) -> list[tuple[str, str]]:
        if "headers" not in self.case.stream.features or self.rng.random() < 0.3:
            return []
        kinds = [
            [("k", f" {self._number}")],
            [("again", " 1"), ("again", " 2"), ("again", "")],
            [("Nats-Msg-Id", f" {self.origin}-{self._number}"), ("spaced", "  two  ")],
            [("Größe", " ü"), ("Nats-Stream", " X"), ("Nats-Sequence", " 7"), ("colon", " a:b:c")],
        ]
        return self.rng.choice(kinds)

    def remember(self) -> None:
        """Record what a killed server restored: messages that a limit removed before they were recorded may be back."""
        for found in self.plain.messages(self.name):
            if found.sequence not in self.ledger:
                self.ledger[found.sequence] = found
                self.mortal.add(found.sequence)

    def _note(self, what: str) -> None:
        """Update ledger and presence from the leader."""
        info = self.plain.call(f"STREAM.INFO.{self.name}", {"deleted_details": True})
        state = info["state"]
        now = set(range(state["first_seq"], state["last_seq"] + 1)) - set(state.get("deleted") or ())
        if len(now) != state["messages"]:  # the server's list is wrong after some purges: ask for each message
            now = {found.sequence for found in self.plain.messages(self.name)}
        known = max(self.ledger, default=0)
        for found in self.plain.messages(self.name, known + 1):
            self.ledger[found.sequence] = found
            # A killed server may restore messages that were purged just before: it lost the purge.
            if ("Nats-TTL", b"1s") in found.headers or found.sequence <= self._last_noted:
                self.mortal.add(found.sequence)
        self._last_noted = max(self._last_noted, state["last_seq"])
        now &= self.ledger.keys()
        for sequence in self.present - now:
            self.gone_at[sequence] = self.step
            if what in _FRONT and self._loses(info["config"]) and sequence < state["first_seq"]:
                self.front.add(sequence)
        self.front -= self.mortal
        self.present = now

    def _loses(self, config: dict[str, Any]) -> bool:
        """Whether a removal from the front is a loss: not where the server normally removes messages one by one."""
        one_by_one = {"ttl", "schedule", "per_subject"} & self.case.stream.features
        return config["retention"] != "workqueue" and (
            config["max_msgs"] > 0 or config["max_bytes"] > 0 or config["max_age"] > 0 or not one_by_one
        )
