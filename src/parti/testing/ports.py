"""Loopback ports that stay free while their server is down."""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

_LOWEST = 10_000  # lower ports belong to the well-known services of a developer's machine
_RANDOM = random.SystemRandom()  # forked test workers must not draw the same ports


def is_free(host: str, port: int) -> bool:
    """Whether `host:port` has no listener; `OSError` when listening there is not permitted."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As Go does: a port whose old connections are in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
        return True


def pick_port(host: str = "127.0.0.1") -> int:
    """A port that is free now and that the kernel does not assign by itself.

    Ports assigned by the kernel (`bind(0)`) do not suit a server that is killed and restarted on the same port:
    meanwhile the kernel may give the port to an outgoing connection, and a client that keeps dialling the dead port on
    loopback can even connect to itself (the kernel picks the same number as source port), which then blocks the
    restart. So ports come from below the ephemeral range.
    """
    highest = _first_ephemeral_port() - 1
    if highest > _LOWEST + 1_000:
        for _ in range(200):
            port = _RANDOM.randint(_LOWEST, highest)
            if is_free(host, port):
                return port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _first_ephemeral_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 49_152  # IANA's range, which macOS uses
