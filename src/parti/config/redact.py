"""Masks what must never be shown: secrets, by the name of their field, and credentials inside a url."""

from __future__ import annotations

import re
from typing import Final

MASK: Final = "********"
"""Replaces a secret wherever a value is shown."""

_SECRET_NAME: Final = re.compile(
    r"(^|_)pass$|pass(word|wd|phrase)$|secret|token$|seed$|^creds$|credential|authorization|cookie|private_?key|signature|jwt$"
    r"|api_?key",
    re.IGNORECASE,
)
# Everything before the last @ of an authority may be a password, and a password may contain an @.
_USERINFO: Final = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)[^/\s,]*@")


def is_secret_name(name: str) -> bool:
    """Whether a field of this name usually holds a secret: password, token, seed, creds, authorization, ..."""
    return _SECRET_NAME.search(name) is not None


def redact_urls(text: str) -> str:
    """The text with the user part of every url masked: nats://********@host:4222."""
    return _USERINFO.sub(rf"\g<scheme>{MASK}@", text)


def redact_address(text: str) -> str:
    """A server address with its user part masked, also when it is written without a scheme."""
    scheme, separator, rest = text.rpartition("://")
    return f"{scheme}{separator}{MASK}@{rest.rpartition('@')[2]}" if "@" in rest else text
