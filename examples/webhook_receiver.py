"""Receive webhooks from `parti deliver`: verify the signature, process each event once, and answer quickly.

    WEBHOOK_SECRET=whsec_... python examples/webhook_receiver.py --port 8080

The signature follows the Standard Webhooks scheme: `webhook-signature` holds one or more `v1,<base64>`, each an
HMAC-SHA256 over `<webhook-id>.<webhook-timestamp>.<body>`. One match with one of the receiver's keys is enough, so keys
can be rotated. An event may arrive more than once, always with the same webhook-id; `seen` drops the repeats.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import hmac
import os
import time
from collections import OrderedDict
from collections.abc import Mapping

from aiohttp import web

TOLERANCE = 300  # seconds: an older request may be a recorded one that an attacker sends again
REMEMBERED = 10_000


def verify(keys: list[bytes], headers: Mapping[str, str], body: bytes, now: float) -> str | None:
    """Return None when the signature matches and the request is recent, else the reason to refuse it."""
    webhook_id, timestamp = headers.get("webhook-id", ""), headers.get("webhook-timestamp", "")
    if not webhook_id or not timestamp.isdecimal():
        return "webhook-id or webhook-timestamp is missing"
    if abs(now - int(timestamp)) > TOLERANCE:
        return "the timestamp is too old or too new"
    content = f"{webhook_id}.{timestamp}.".encode() + body
    expected = [base64.b64encode(hmac.new(key, content, hashlib.sha256).digest()).decode() for key in keys]
    for signature in headers.get("webhook-signature", "").split():
        version, _, given = signature.partition(",")
        if version == "v1" and any(hmac.compare_digest(given, own) for own in expected):
            return None
    return "no signature matches"


class Receiver:
    """Processes each event once, as long as its webhook-id is among the last `REMEMBERED` ones."""

    def __init__(self, keys: list[bytes]) -> None:
        self.keys = keys
        self.seen: OrderedDict[str, None] = OrderedDict()

    async def receive(self, request: web.Request) -> web.Response:
        body = await request.read()
        if problem := verify(self.keys, request.headers, body, time.time()):
            # 401 is final: parti stores the task as a dead letter, which can be replayed.
            return web.Response(status=401, text=problem)
        webhook_id = request.headers["webhook-id"]
        if webhook_id not in self.seen:
            self.seen[webhook_id] = None
            if len(self.seen) > REMEMBERED:
                self.seen.popitem(last=False)
            event = await request.json()
            print("event", webhook_id, event["event"], event["documentId"], flush=True)
        return web.Response(status=204)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8080)
    port = parser.parse_args().port
    words = os.environ["WEBHOOK_SECRET"].split()
    receiver = Receiver([base64.b64decode(word.removeprefix("whsec_")) for word in words])
    app = web.Application()
    app.router.add_post("/{path:.*}", receiver.receive)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


if __name__ == "__main__":
    main()
