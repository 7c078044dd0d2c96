"""The address guard: no socket for an address that is not public, however the url is written.

Sockets are counted where they are made. Only loopback is ever connected to, and only on the test server's own port.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import AsyncIterator, Sequence

import pytest

from parti.config.deliver import DeliverSection
from parti.delivery.errors import AddressBlocked, BadHeader, BadUrl
from parti.delivery.guard import AddressGuard, AddrInfo, is_public
from parti.delivery.lookups import Lookup
from parti.delivery.transport import HttpTransport, Request
from parti.delivery.urls import check_headers, parse_endpoint
from parti.errors import ConfigError
from parti.testing.http_server import FaultHttpServer, redirect

NAMES = {
    "inside.test": ["10.0.0.7"],
    "loop.test": ["127.0.0.1"],
    "loop6.test": ["::1"],
    "mixed.test": ["93.184.215.14", "127.0.0.1"],
    "metadata.test": ["169.254.169.254"],
    "mapped.test": ["::ffff:127.0.0.1"],
    "nat64.test": ["64:ff9b::7f00:1"],
    "zero.test": ["0.0.0.0"],
    "localhost": ["127.0.0.1"],
    "0x7f.1.test": ["127.0.0.1"],
}

BLOCKED = [
    # plain literals of every kind of address that is not public
    "http://127.0.0.1/", "http://127.0.0.1:80/", "http://127.8.8.8/", "http://0.0.0.0/", "http://0.1.2.3/",
    "http://10.0.0.1/", "http://172.16.0.1/", "http://172.31.255.255/", "http://192.168.1.1/", "http://100.64.0.1/",
    "http://169.254.169.254/latest/meta-data/", "http://169.254.0.1/", "http://192.0.0.192/", "http://192.0.2.1/",
    "http://198.18.0.1/", "http://198.51.100.7/", "http://203.0.113.9/", "http://192.88.99.1/", "http://224.0.0.1/",
    "http://239.255.255.250/", "http://240.0.0.1/", "http://255.255.255.255/", "http://168.63.129.16/",
    "https://127.0.0.1/", "HTTP://127.0.0.1/", "http://127.0.0.1./", "http://127.0.0.1#@example.com/",
    # IPv6, and IPv4 inside IPv6
    "http://[::1]/", "http://[::]/", "http://[::ffff:127.0.0.1]/", "http://[::ffff:7f00:1]/",
    "http://[0:0:0:0:0:ffff:7f00:1]/", "http://[::127.0.0.1]/", "http://[::ffff:0:127.0.0.1]/",
    "http://[64:ff9b::7f00:1]/", "http://[64:ff9b::10.0.0.1]/", "http://[64:ff9b:1::1]/", "http://[2002:7f00:1::]/",
    "http://[2002:a00:1::1]/", "http://[2001::1]/", "http://[2001:db8::1]/", "http://[3fff::1]/",
    "http://[fe80::1]/", "http://[fe80::1%25eth0]/", "http://[fec0::1]/", "http://[fc00::1]/",
    "http://[fd00:ec2::254]/", "http://[ff02::1]/", "http://[100::1]/", "http://[5f00::1]/",
    # other ways to write an IPv4 address
    "http://2130706433/", "http://017700000001/", "http://0x7f000001/", "http://0x7f.1/", "http://0177.0.0.1/",
    "http://127.1/", "http://127.0.1/", "http://0x7f.0.0.1/", "http://127.0.0.01/", "http://00.0.0.0/",
    "http://127.0.0.1.0/", "http://1/", "http://①②⑦.⓪.⓪.①/", "http://127。0。0。1/", "http://0x/",
    # users, and characters that parsers disagree about
    "http://example.com@127.0.0.1/", "http://user:pass@127.0.0.1/", "http://127.0.0.1:80@example.com/",
    "http://example.com\\@127.0.0.1/", "http://127.0.0.1\\.example.com/", "http:// 127.0.0.1/",
    "http://127.0.0.1\t/", "http://127.0.0.1\r\nHost: x/", "http://127.0.0.1%00.example.com/",
    "http://[127.0.0.1]/", "http://[::1/", "http:///127.0.0.1/", "http:127.0.0.1/", "//127.0.0.1/", "127.0.0.1",
    # other schemes, and ports nobody opened
    "ftp://127.0.0.1/", "file:///etc/passwd", "gopher://127.0.0.1:70/", "unix:///var/run/docker.sock",
    "http+unix://%2Fvar%2Frun/", "javascript:alert(1)", "data:text/plain,x", "ws://127.0.0.1/", "",
    "http://93.184.215.14:22/", "http://127.0.0.1:6379/", "http://127.0.0.1:0/", "http://127.0.0.1:65536/",
    # names that resolve to what is blocked
    "http://inside.test/", "http://loop.test/", "http://LOOP.test/", "http://loop.test./", "http://loop6.test/",
    "http://mixed.test/", "http://metadata.test/", "http://mapped.test/", "http://nat64.test/", "http://zero.test/",
    "http://localhost/", "http://0x7f.1.test/",
]  # fmt: skip


class Sockets:
    """Makes sockets and counts them."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, family: int, kind: int, protocol: int) -> socket.socket:
        self.made += 1
        return socket.socket(family, kind, protocol)


def lookup(host: str) -> Sequence[AddrInfo]:
    """A resolver of the test's own: no question leaves the process."""
    addresses = NAMES.get(host.lower().removesuffix("."))
    if addresses is None:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")
    return [_info(address, 0) for address in addresses]


def _info(address: str, port: int) -> AddrInfo:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return (family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port))


@pytest.fixture
def sockets() -> Sockets:
    return Sockets()


@pytest.fixture
async def endpoint() -> AsyncIterator[FaultHttpServer]:
    async with FaultHttpServer() as server:
        yield server


async def send(url: str, guard: AddressGuard, resolve: Lookup = lookup) -> int:
    target = parse_endpoint(url)
    guard.check_port(target.port)
    transport = HttpTransport(DeliverSection(), guard, lookup=resolve)
    await transport.open()
    try:
        return (await transport.post(Request(target.url, {}, b"{}", 2.0))).status
    finally:
        await transport.close()


def test_there_are_at_least_sixty_forms() -> None:
    assert len(set(BLOCKED)) >= 60


@pytest.mark.parametrize("url", BLOCKED)
async def test_no_socket_is_opened_for_a_blocked_url(url: str, sockets: Sockets, endpoint: FaultHttpServer) -> None:
    guard = AddressGuard([endpoint.allowed], create=sockets)
    with pytest.raises((BadUrl, AddressBlocked)):
        await send(url, guard)
    assert sockets.made == guard.opened == 0
    assert endpoint.connections == 0


@pytest.mark.parametrize("url", BLOCKED)
async def test_no_socket_is_opened_even_when_the_url_is_not_looked_at_first(url: str, sockets: Sockets) -> None:
    """The guard at the socket stands alone: whatever the HTTP client makes of a url, a blocked address gets none."""
    from yarl import URL

    transport = HttpTransport(DeliverSection(), AddressGuard(create=sockets), lookup=lookup)
    await transport.open()
    try:
        with pytest.raises(Exception):  # noqa: B017, PT011 - of whatever kind, as long as no socket was made
            await transport.post(Request(URL(url), {}, b"{}", 2.0))
    finally:
        await transport.close()
    assert sockets.made == 0


async def test_the_one_address_and_port_that_was_allowed_is_reached(
    sockets: Sockets, endpoint: FaultHttpServer
) -> None:
    guard = AddressGuard([endpoint.allowed], create=sockets)
    assert await send(f"{endpoint.url}/x", guard) == 200
    assert sockets.made == 1
    with pytest.raises(AddressBlocked):
        await send(f"http://127.0.0.2:{endpoint.port}/x", guard)
    with pytest.raises(AddressBlocked):
        await send("http://127.0.0.1/x", guard)
    assert sockets.made == 1


async def test_a_name_that_turns_to_a_blocked_address_between_two_looks_gets_no_socket(
    sockets: Sockets, endpoint: FaultHttpServer
) -> None:
    answers = iter([["127.0.0.1"], ["127.0.0.2"], ["10.0.0.1"]])

    def rebinding(host: str) -> Sequence[AddrInfo]:
        return [_info(address, 0) for address in next(answers)]

    guard = AddressGuard([endpoint.allowed], create=sockets)
    assert await send(f"http://rebind.test:{endpoint.port}/", guard, rebinding) == 200
    for _ in range(2):
        with pytest.raises(AddressBlocked):
            await send(f"http://rebind.test:{endpoint.port}/", guard, rebinding)
    assert sockets.made == 1


def test_the_guard_checks_the_address_of_the_socket_itself(sockets: Sockets) -> None:
    """A resolver that lies cannot help: the check is on the address that would be connected to."""
    guard = AddressGuard(create=sockets)
    for address in ("127.0.0.1", "::1", "169.254.169.254", "not an address"):
        with pytest.raises(AddressBlocked):
            guard.socket(_info(address, 80))
    assert sockets.made == 0


async def test_a_redirect_is_never_followed(sockets: Sockets, endpoint: FaultHttpServer) -> None:
    endpoint.on("/r", redirect("http://169.254.169.254/"), redirect(f"{endpoint.url}/elsewhere", 307))
    guard = AddressGuard([endpoint.allowed], create=sockets)
    assert await send(f"{endpoint.url}/r", guard) == 302
    assert await send(f"{endpoint.url}/r", guard) == 307
    assert [request.path for request in endpoint.received] == ["/r", "/r"]
    assert guard.blocked == 0


async def test_a_proxy_of_the_environment_is_not_asked(
    sockets: Sockets, endpoint: FaultHttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, endpoint.url)
    with pytest.raises(AddressBlocked):
        await send("http://10.0.0.1/", AddressGuard([endpoint.allowed], create=sockets))
    assert endpoint.connections == sockets.made == 0


@pytest.mark.parametrize("address", ["8.8.8.8", "93.184.215.14", "2606:4700::1111", "2a00:1450:4001::200e"])
def test_public_addresses_are_public(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))
    AddressGuard().check(address, 443)


def test_an_allowed_network_without_a_port_opens_the_usual_ports_only() -> None:
    guard = AddressGuard(["10.1.0.0/16", "fd00::/8@8443"])
    guard.check("10.1.2.3", 443)
    guard.check("fd00::1", 8443)
    for host, port in (("10.1.2.3", 8080), ("10.2.0.1", 443), ("fd00::1", 443)):
        with pytest.raises(AddressBlocked):
            guard.check(host, port)


@pytest.mark.parametrize("entry", ["10.0.0.0", "10.0.0.1/8", "10.0.0.0/8@", "10.0.0.0/8@0", "10.0.0.0/8@x", "host/8"])
def test_a_malformed_entry_of_the_allow_list_is_refused(entry: str) -> None:
    if entry == "10.0.0.0":
        assert AddressGuard([entry])  # one address is a network of one
        return
    with pytest.raises(ConfigError, match="allow_addresses"):
        AddressGuard([entry])


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "x"}, {"content-length": "1"}, {"Transfer-Encoding": "chunked"}, {"Connection": "close"},
        {"webhook-id": "x"}, {"Webhook-Signature": "x"}, {"X-Syntrix-Signature": "x"}, {"X-A": "a\r\nHost: b"},
        {"X-A": "a\nb"}, {"X-A": "a\0"}, {"X A": "b"}, {"X-A:": "b"}, {"": "b"}, {"X-\r\nA": "b"}, {"X-A": "ł"},
        {"X-A": "1", "x-a": "2"}, {"X-A": "a" * 9000}, {f"X-{n}": "" for n in range(65)},
    ],
)  # fmt: skip
def test_headers_that_change_the_request_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(BadHeader):
        check_headers(headers)


def test_other_headers_pass_as_they_are() -> None:
    headers = {"Authorization": "Bearer x", "X-Tenant": "a b", "Content-Type": "application/json"}
    assert check_headers(headers) == headers
    assert check_headers(None) == {}


def test_a_header_line_in_place_of_a_name_is_not_shown() -> None:
    with pytest.raises(BadHeader) as caught:
        check_headers({"Authorization: Bearer s3cret": "x"})
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "sent"),
    [
        ("https://a.test/a%2Fb?X-Amz-Credential=k%2F1&s=a+b%20c", "/a%2Fb?X-Amz-Credential=k%2F1&s=a+b%20c"),
        ("https://a.test/a/../b//c;d?e=%7E~&f=%c3%a4#part", "/a/../b//c;d?e=%7E~&f=%c3%a4"),
        ("https://a.test?x=1", "/?x=1"),
        ("https://a.test", "/"),
        ("https://a.test#/x", "/"),
        ("https://a.test/ü?ö=1", "/%C3%BC?%C3%B6=1"),
    ],
)
def test_a_url_is_sent_as_it_was_written(url: str, sent: str) -> None:
    endpoint = parse_endpoint(url)
    assert endpoint.url.raw_path_qs == sent
    assert endpoint.url.host_port_subcomponent == "a.test"


def test_an_endpoint_shows_neither_path_nor_query() -> None:
    shown = repr(parse_endpoint("https://Example.com/hook/s3cret?token=t"))
    assert "s3cret" not in shown
    assert "token" not in shown
    assert "example.com:443" in shown
