"""Signatures by the Standard Webhooks scheme: the signed bytes are exactly the bytes that are sent.

`webhook-signature` holds one `v1,<base64 HMAC-SHA256>` per active key over `<id>.<timestamp>.<body>`, so a receiver
that knows the old or the new key accepts it. This is how keys are rotated.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field

from parti.errors import ConfigError

_PREFIX = "whsec_"
_LEAST_KEY = 16  # bytes; the scheme asks for 24 to 64, but shorter old keys are in use


@dataclass(frozen=True, slots=True)
class SigningKey:
    """One signing key; its bytes are never shown."""

    secret: bytes = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> SigningKey:
        """From `whsec_<base64>`, or from any other text, which is used as it is."""
        cleaned = text.strip()
        if cleaned.startswith(_PREFIX):
            coded = cleaned[len(_PREFIX) :].rstrip("=")
            try:
                secret = base64.b64decode(coded + "=" * (-len(coded) % 4), validate=True)  # often written unpadded
            except (binascii.Error, ValueError):
                raise ConfigError("a signing key starts with whsec_, but the rest is not base64") from None
        else:
            secret = cleaned.encode(errors="surrogateescape")  # an environment variable may hold any bytes
        if len(secret) < _LEAST_KEY:
            raise ConfigError(f"a signing key has {len(secret)} bytes: use at least {_LEAST_KEY}, better 32")
        return cls(secret)


def sign(keys: Sequence[SigningKey], webhook_id: str, timestamp: int, body: bytes) -> str:
    """The value of `webhook-signature`; the first key is the current one."""
    content = b"%s.%d.%s" % (webhook_id.encode(), timestamp, body)
    return " ".join("v1," + base64.b64encode(hmac.digest(key.secret, content, hashlib.sha256)).decode() for key in keys)


def legacy_signature(key: SigningKey, timestamp: int, body: bytes) -> str:
    """The value of `X-Syntrix-Signature` as syntrix makes it: one key, hexadecimal."""
    digest = hmac.digest(key.secret, b"%d.%s" % (timestamp, body), hashlib.sha256).hex()
    return f"t={timestamp},v1={digest}"
