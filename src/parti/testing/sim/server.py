"""The server side of the wire: the JetStream API, pulls and acks, over the simulated stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from parti.testing.sim.stream import NAME, Consumer, Pull, SimLink, SimStream, partitions_of

CREATED = "2026-01-01T00:00:00Z"
Json = dict[str, Any]


class Refused(Exception):
    """An API call that the server refuses, with its error code."""

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(description)
        self.error = {"code": code, "err_code": err_code, "description": description}


class SimServer:
    """Answers the requests of the shipped clients. Calls `buried` with the sequence of each dead-lettered message."""

    def __init__(self, stream: SimStream, now: Callable[[], float], buried: Callable[[int], None]) -> None:
        self.stream = stream
        self._now = now
        self._buried = buried
        self._letters: set[str] = set()

    # -- requests -----------------------------------------------------------------------------------------------------

    def request(self, subject: str, payload: bytes, headers: Mapping[str, str] | None) -> bytes:
        """The answer to one request, as bytes of the wire."""
        if not subject.startswith("$JS.API."):
            return json.dumps(self._letter(headers or {})).encode()
        tokens = subject.split(".")[2:]
        body = json.loads(payload) if payload else {}
        try:
            answer = self._api(tokens, body)
        except Refused as refused:
            answer = {"error": refused.error}
        return json.dumps(answer).encode()

    def _letter(self, headers: Mapping[str, str]) -> Json:
        name = headers["Nats-Msg-Id"]
        if duplicate := name in self._letters:
            return {"stream": f"{NAME}_DLQ", "seq": len(self._letters), "duplicate": duplicate}
        self._letters.add(name)
        self._buried(int(headers["Parti-Sequence"]))
        return {"stream": f"{NAME}_DLQ", "seq": len(self._letters)}

    def _api(self, tokens: list[str], body: Json) -> Json:
        match tokens:
            case ["STREAM", "INFO", _]:
                return self._stream_info()
            case ["STREAM", "CREATE", _]:
                return {}
            case ["STREAM", "MSG", "GET", name] if name == f"{NAME}_DLQ":  # letters stay for as long as a run takes
                return {"message": {"subject": name, "seq": body["seq"], "time": CREATED, "data": ""}}
            case ["STREAM", "MSG", "GET", _]:
                return self._message(body)
            case ["STREAM", "MSG", "DELETE", _]:
                if not self.stream.delete(int(body["seq"])):
                    raise Refused(400, 10043, "no message found")
                return {"success": True}
            case ["CONSUMER", "CREATE", _, name]:
                return self._create(name, body["config"], body.get("action", ""))
            case ["CONSUMER", "INFO", _, name]:
                return self._info(self._consumer(name))
            case ["CONSUMER", "DELETE", _, name]:
                self.stream.delete_consumer(self._consumer(name))
                return {"success": True}
            case ["CONSUMER", "RESET", _, name]:
                return self._reset(self._consumer(name), int(body["seq"]))
            case ["CONSUMER", "NAMES", _]:
                return {"consumers": sorted(self.stream.consumers), "total": len(self.stream.consumers)}
            case ["CONSUMER", "LIST", _]:
                infos = [self._info(consumer) for _, consumer in sorted(self.stream.consumers.items())]
                return {"consumers": infos, "total": len(infos)}
        raise NotImplementedError(f"the simulated server has no {'.'.join(tokens)}")

    def _stream_info(self) -> Json:
        stream = self.stream
        first = next((seq for seq in range(1, stream.last + 1) if stream.alive[seq]), stream.last + 1)
        return {
            "config": {"name": NAME, "retention": stream.retention.value, "storage": "file", "num_replicas": 3},
            "state": {"last_seq": stream.last, "first_seq": first},
            "created": CREATED,
        }

    def _message(self, body: Json) -> Json:
        seq = self.stream.next_of(body["next_by_subj"].split(".")[1], int(body["seq"]))
        if seq is None:
            raise Refused(404, 10037, "no message found")
        return {"message": {"subject": self.stream.subjects[seq], "seq": seq, "time": CREATED, "data": ""}}

    # -- consumers ----------------------------------------------------------------------------------------------------

    def _consumer(self, name: str) -> Consumer:
        try:
            return self.stream.consumers[name]
        except KeyError:
            raise Refused(404, 10014, "consumer not found") from None

    def _create(self, name: str, config: Json, action: str) -> Json:
        stream = self.stream
        known = stream.consumers.get(name)
        if action == "update" and known is None:
            raise Refused(400, 10149, "consumer does not exist")
        if action == "create" and known is not None:
            if known.config == config:
                return self._info(known)
            raise Refused(400, 10148, "consumer already exists")
        if stream.overlaps(name, partitions_of(config["filter_subjects"])):
            raise Refused(400, 10100, "filtered consumer not unique on workqueue stream")
        if known is None:
            return self._info(stream.create(name, config))
        stream.update(known, config)
        return self._info(known)

    def _reset(self, consumer: Consumer, seq: int) -> Json:
        if seq < consumer.start:
            raise Refused(400, 10204, "invalid reset")
        self.stream.reset(consumer, seq)
        return self._info(consumer)

    def _info(self, consumer: Consumer) -> Json:
        return {
            "name": consumer.name,
            "config": consumer.config,
            "created": consumer.created,
            "ack_floor": {"stream_seq": consumer.floor, "consumer_seq": 0},
            "delivered": {"stream_seq": consumer.delivered, "consumer_seq": consumer.sequence},
            "num_ack_pending": len(consumer.pending),
            "num_pending": self.stream.waiting(consumer),
        }

    # -- what a live connection sends ---------------------------------------------------------------------------------

    def published(self, link: SimLink, subject: str, reply: str, payload: bytes) -> None:
        """A pull, or an ack."""
        tokens = subject.split(".")
        if subject.startswith("$JS.ACK."):
            name, seq = tokens[3], int(tokens[5])
            if payload == b"+ACK":
                self.stream.ack(name, seq)
            else:
                self.stream.in_progress(name, seq)
            if reply and (sid := link.wants(reply)) is not None:
                link.send(f"MSG {reply} {sid} 0\r\n\r\n".encode())
            return
        body = json.loads(payload)
        expires = self._now() + body["expires"] / 1e9
        pull = Pull(link, reply, body["batch"], expires, body["idle_heartbeat"] / 1e9)
        self.stream.pull(tokens[-1], pull)
