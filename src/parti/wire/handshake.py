"""Shared by blocking and async data connections on opening: the TLS decision, and typed errors."""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from typing import Any

from parti.errors import AuthFailed, ConnectionFailed, PartiError, TlsFailed
from parti.wire.address import ServerAddress
from parti.wire.options import ConnectOptions

# The errors of a failed attempt at one server; another server of the list may still work.
OPEN_FAILURES = (ConnectionFailed, AuthFailed, TlsFailed)


def upgrade_wanted(options: ConnectOptions, address: ServerAddress, info: Mapping[str, Any]) -> bool:
    """Whether the connection must now be encrypted; raises TlsFailed if it cannot, never continues in clear text."""
    if options.tls_first:
        return False  # it is already encrypted
    wanted = bool(info.get("tls_required")) or options.ssl_context() is not None
    if wanted and not (info.get("tls_required") or info.get("tls_available")):
        raise TlsFailed(f"{address} offers no TLS, though it is asked for: enable it there, or use nats:// here")
    return wanted


def all_failed(failures: Sequence[PartiError]) -> PartiError:
    """One error for a list of servers that all failed; a refusal is preferred to an unreachable host."""
    refusals = [failure for failure in failures if not isinstance(failure, ConnectionFailed)]
    if refusals or len(failures) == 1:
        return (refusals or list(failures))[0]
    return ConnectionFailed("no server could be reached: " + "; ".join(str(failure) for failure in failures))


def server_error(line: bytes, address: ServerAddress) -> PartiError:
    """The typed error for an `-ERR '...'` line."""
    text = line.decode(errors="replace").removeprefix("-ERR").strip().strip("'")
    lowered = text.lower()
    if "permissions violation" in lowered:
        return AuthFailed(f"{address} refused: {text}; grant the user that permission")
    if "authorization" in lowered or "authentication" in lowered:
        return AuthFailed(f"{address} refused the credentials: {text}; correct user, password, token, nkey or creds")
    return ConnectionFailed(f"{address} ended the connection: {text}")


def tls_failed(error: ssl.SSLError, address: ServerAddress) -> TlsFailed:
    """The typed error for a failed TLS handshake."""
    reason = getattr(error, "verify_message", "") or error.reason or str(error)
    return TlsFailed(
        f"the TLS handshake with {address} failed: {reason}; check tls_ca, tls_cert, tls_key, the host name"
    )
