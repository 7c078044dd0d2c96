"""The address guard: no socket is opened to an address that is not public, unless the operator allowed it.

The check runs where the socket is created, on the address that is connected to. So a name that resolves to one address
for a check and to another for the connection (rebinding) gains nothing. An address written as a literal, for which HTTP
clients ask no resolver, is checked as well (docs/evidence/delivery.md#d6).
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp.abc import AbstractResolver, ResolveResult

from parti.delivery.errors import AddressBlocked
from parti.errors import ConfigError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
AddrInfo = tuple[int, int, int, str, tuple[Any, ...]]

# Ranges that Python 3.11 calls global but that a stranger must not call: multicast, relays and translators through
# which an internal IPv4 address can be reached (6to4, Teredo, NAT64), and metadata services of clouds.
_DENIED_V4 = tuple(
    ipaddress.IPv4Network(text)
    for text in ("192.88.99.0/24", "192.0.0.0/24", "168.63.129.16/32", "224.0.0.0/4", "240.0.0.0/4", "0.0.0.0/8")
)
_DENIED_V6 = tuple(
    ipaddress.IPv6Network(text)
    for text in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20", "2620:4f:8000::/48", "3ffe::/16")
)
_PUBLIC_V6 = ipaddress.IPv6Network("2000::/3")  # all that IANA assigns; mapped, NAT64 and local addresses lie outside


def is_public(address: Address) -> bool:
    """Whether the address belongs to the public internet and does not lead anywhere else."""
    if not address.is_global or address.is_multicast or address.is_reserved:
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _DENIED_V4)
    return address in _PUBLIC_V6 and not any(address in network for network in _DENIED_V6)


@dataclass(frozen=True, slots=True)
class Allowed:
    """One entry of the allow-list: a network, and one port of it, or None for the ports that are allowed anyway."""

    network: Network
    port: int | None = None

    @classmethod
    def parse(cls, text: str) -> Allowed:
        """From "10.1.0.0/16", "10.1.2.3/32@8080" or "fd00::/8@443"."""
        network, at, port = text.strip().partition("@")
        try:
            if at and not 0 < int(port) < 65_536:
                raise ValueError(port)
            return cls(ipaddress.ip_network(network), int(port) if at else None)
        except ValueError:
            raise ConfigError(
                f"deliver.allow_addresses {text!r}: write a network and perhaps a port, such as 10.1.2.0/24@8080"
            ) from None


def _nothing() -> None:
    """Do nothing: the default when nobody waits for a socket to close."""


LOCAL_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Socket errors that mean this machine or process is at its limits, independent of the host."""


class _Socket(socket.socket):
    """Notifies its guard when it is closed, or handed to uvloop to be closed."""

    guard: AddressGuard | None = None

    def close(self) -> None:
        self._gone()
        super().close()

    def detach(self) -> int:
        self._gone()
        return super().detach()

    def _gone(self) -> None:
        guard, self.guard = self.guard, None
        if guard is not None:
            guard.alive -= 1
            guard.on_closed()


class AddressGuard:
    """Decides about addresses and creates the sockets: `opened` counts them, `alive` counts those not closed."""

    def __init__(
        self,
        allow: Iterable[str] = (),
        ports: Iterable[int] = (80, 443),
        *,
        create: Callable[[int, int, int], socket.socket] = _Socket,
    ) -> None:
        self._allowed = tuple(Allowed.parse(entry) for entry in allow)
        self._ports = frozenset(ports)
        self._create = create
        self.opened = 0
        self.alive = 0
        self.starved = 0
        self.on_closed: Callable[[], None] = _nothing
        self.blocked = 0

    def __repr__(self) -> str:
        return f"<AddressGuard allowed={len(self._allowed)} opened={self.opened} blocked={self.blocked}>"

    def check_port(self, port: int) -> None:
        """Raise `AddressBlocked` for a port that is allowed at no address; saves a DNS query."""
        if port not in self._ports and all(entry.port != port for entry in self._allowed):
            self.blocked += 1
            raise AddressBlocked(f"port {port} is not allowed: see deliver.allow_ports and deliver.allow_addresses")

    def check(self, host: str, port: int) -> None:
        """Raise `AddressBlocked` unless this exact address and port may be connected to."""
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            self.blocked += 1
            raise AddressBlocked(f"{host[:80]!r} is no address") from None
        for entry in self._allowed:
            if address in entry.network and (entry.port == port or (entry.port is None and port in self._ports)):
                return
        if not is_public(address):
            self.blocked += 1
            raise AddressBlocked(f"{address} is not a public address: nothing was sent; see deliver.allow_addresses")
        if port not in self._ports:
            self.blocked += 1
            raise AddressBlocked(f"port {port} is not allowed: see deliver.allow_ports and deliver.allow_addresses")

    def socket(self, info: AddrInfo) -> socket.socket:
        """The socket for one address: the only place where delivery opens sockets."""
        family, kind, protocol, _, address = info
        self.check(str(address[0]), int(address[1]))
        try:
            made = self._create(family, kind, protocol)
        except OSError as error:
            self.starved += error.errno in LOCAL_ERRORS
            raise
        self.opened += 1
        if isinstance(made, _Socket):
            made.guard = self
            self.alive += 1
        return made


Find = Callable[[str, int, int], Awaitable[Sequence[AddrInfo]]]
"""From host, port and family to addresses."""


class GuardedResolver(AbstractResolver):
    """Resolves names. One address that is not allowed is enough to refuse them all: an honest name has none."""

    def __init__(self, guard: AddressGuard, find: Find) -> None:
        self._guard = guard
        self._find = find

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await self._find(host, port, family)
        results = []
        for found_family, _, protocol, _, address in found:
            self._guard.check(str(address[0]), port)
            results.append(
                ResolveResult(
                    hostname=host,
                    host=str(address[0]),
                    port=port,
                    family=found_family,
                    proto=protocol,
                    flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
                )
            )
        if not results:
            raise OSError(None, f"{host} has no address")
        return results

    async def close(self) -> None:
        """Nothing to close: see `Lookups`."""
