"""The example receiver as a process: it accepts requests signed by the scheme, by us or others, and nothing else."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from parti.testing import NatsServer, eventually
from parti.testing.ports import is_free, pick_port
from support.delivery import Scene, scene

EXAMPLE = Path(__file__).parents[3] / "examples" / "webhook_receiver.py"
OLD, NEW = b"o" * 24, b"n" * 32


def whsec(key: bytes) -> str:
    return "whsec_" + base64.b64encode(key).decode()


def signed(key: bytes, webhook_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """The headers of the scheme, written from its text and from nothing of ours."""
    to_sign = b".".join([webhook_id.encode(), str(timestamp).encode(), body])
    signature = base64.b64encode(hmac.HMAC(key, to_sign, hashlib.sha256).digest()).decode()
    return {
        "webhook-id": webhook_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": f"v1a,ignored v1,{signature}",
    }


@pytest.fixture
async def stage(server: NatsServer, name: str) -> AsyncIterator[Scene]:
    async with scene(server, name) as made:
        yield made


@pytest.mark.slow
async def test_the_receiver_takes_our_requests_and_refuses_forged_ones(stage: Scene) -> None:
    port = pick_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(EXAMPLE), "--port", str(port), stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"WEBHOOK_SECRET": f"{whsec(NEW)}"},
    )  # fmt: skip
    try:
        await eventually(lambda: not is_free("127.0.0.1", port), 60)
        url = f"http://127.0.0.1:{port}/hook"
        body = json.dumps({"event": "update", "documentId": "x"}).encode()
        now = int(time.time())
        async with aiohttp.ClientSession() as session:
            for headers, expected in (
                (signed(NEW, "m1", now, body), 204),
                (signed(NEW, "m1", now, body), 204),
                (signed(OLD, "m2", now, body), 401),
                (signed(NEW, "m3", now, body + b" "), 401),
                (signed(NEW, "m4", now - 1000, body), 401),
                ({}, 401),
            ):
                async with session.post(url, data=body, headers=headers) as response:
                    assert response.status == expected
        # While keys are rotated we sign with both; the receiver knows one of them.
        config = stage.config(allow_addresses=(f"127.0.0.1/32@{port}",))
        await stage.publish(stage.task("d", url=url, secretsRef="hook"), headers={"Nats-Msg-Id": "ours"})
        async with stage.delivering(config, environ={"PARTI_WEBHOOK_SECRET_HOOK": f"{whsec(OLD)} {whsec(NEW)}"}):
            await eventually(stage.settled)
        assert (await stage.js.stream_info(f"{stage.stream}_DLQ"))["state"]["messages"] == 0
    finally:
        process.terminate()
        out, _ = await process.communicate()
    assert out.decode().splitlines() == ["event m1 update x", "event ours update d"]
