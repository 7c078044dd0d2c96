"""Which urls and headers a task may name: everything that could change the request's meaning is refused."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from urllib.parse import quote

from yarl import URL

from parti.delivery.errors import BadHeader, BadUrl
from parti.delivery.masking import masked

_PORTS = {"http": 80, "https": 443}
_ASCII = "".join(chr(code) for code in range(0x21, 0x7F))
_LONGEST_URL = 4096
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
_NUMERIC = re.compile(r"(0[xX][0-9a-fA-F]*|[0-9]+)")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_LONGEST_VALUE = 8192
_MOST_HEADERS = 64
_OURS = frozenset(
    {
        "host",
        "content-length",
        "transfer-encoding",
        "connection",
        "keep-alive",
        "upgrade",
        "te",
        "trailer",
        "expect",
        "proxy-authorization",
        "proxy-connection",
        "accept-encoding",
        "x-syntrix-signature",
        "x-parti-attempt",
        "x-parti-partition",
        "x-parti-epoch",
    }
)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A url that may be called; the repr shows no path or query, which may hold a token."""

    url: URL = field(repr=False)
    host: str
    """host:port, the unit of limits and of the breaker."""
    port: int
    secure: bool


@lru_cache(maxsize=2_048)
def parse_endpoint(text: str) -> Endpoint:
    """The endpoint, or `BadUrl` with the problem. Does not check its address: the guard does that later."""
    if len(text) > _LONGEST_URL:
        raise BadUrl(f"the url has {len(text)} characters, more than {_LONGEST_URL}")
    if any(c.isspace() or not c.isprintable() for c in text) or "\\" in text:
        raise BadUrl("the url holds blanks, control characters or a backslash")
    try:
        url = URL(text)
        port = url.explicit_port
    except Exception:  # yarl documents ValueError, but raises other errors for very unusual text
        raise BadUrl("the url cannot be read") from None
    if url.scheme not in _PORTS:
        raise BadUrl(f"the url's scheme is {url.scheme[:20]!r}: use http or https")
    host = url.raw_host
    if not host:
        raise BadUrl("the url has no host")
    # yarl may parse a host differently than the text shows it; the shown host must be the one called.
    authority = re.split(r"[/?#]", text.partition("://")[2], maxsplit=1)[0]
    if "@" in authority or url.user is not None or url.password is not None:
        raise BadUrl("the url holds a user or password: use a header")
    if port == 0:
        raise BadUrl("the url's port is 0")
    _check_host(host)
    shown = f"[{host}]" if ":" in host else host.lower()
    number = port or _PORTS[url.scheme]
    return Endpoint(_as_given(text, url), f"{shown}:{number}", number, url.scheme == "https")


def _as_given(text: str, url: URL) -> URL:
    """The url with path and query as written: quoting them again would break a signed url.

    Only characters that a request line cannot hold, those beyond ASCII, are quoted.
    """
    rest = text.partition("://")[2].partition("#")[0]
    target = rest[len(re.split(r"[/?]", rest, maxsplit=1)[0]) :]
    if not target.startswith("/"):
        target = "/" + target
    return URL(f"{url.scheme}://{url.host_port_subcomponent}{quote(target, safe=_ASCII)}", encoded=True)


def _check_host(host: str) -> None:
    if ":" in host:
        if "%" in host:
            raise BadUrl("the url's host is an address with a zone")
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise BadUrl(f"the url's host {host[:80]!r} is no IPv6 address") from None
        return
    labels = host.removesuffix(".").split(".")
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise BadUrl(f"the url's host {host[:80]!r} is no host name")
    if _NUMERIC.fullmatch(labels[-1]):
        # Some resolver treats each of 2130706433, 0177.0.0.1, 127.1, 0x7f.1 and 127.0.0.1. as loopback.
        try:
            canonical = str(ipaddress.IPv4Address(host))
        except ValueError:
            canonical = ""
        if canonical != host:
            raise BadUrl(f"the url's host {host[:80]!r} is a number and no IPv4 address in its plain form")


def check_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    """The task's headers, or `BadHeader`: headers that belong to the request itself, and line breaks, are refused."""
    if not headers:
        return {}
    if len(headers) > _MOST_HEADERS:
        raise BadHeader(f"the task has {len(headers)} headers, more than {_MOST_HEADERS}")
    seen: set[str] = set()
    for name, value in headers.items():
        lowered = name.lower()
        if not _HEADER_NAME.fullmatch(name):
            raise BadHeader(f"{masked(name)} is no header name")
        if lowered in _OURS or lowered.startswith("webhook-"):
            raise BadHeader(f"the task may not set the header {masked(name)}: it belongs to the request itself")
        if lowered in seen:
            raise BadHeader(f"the task sets the header {masked(name)} twice")
        seen.add(lowered)
        if len(value) > _LONGEST_VALUE or not _HEADER_VALUE.fullmatch(value):
            raise BadHeader(f"the value of the task's header {masked(name)} is too long or holds control characters")
    return dict(headers)
