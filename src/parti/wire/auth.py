"""Signs a server's nonce with an nkey seed or a credentials file; secrets leave this module only as signatures."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from parti.errors import ConfigError

if TYPE_CHECKING:
    import nkeys

_JWT = re.compile(r"-+BEGIN NATS USER JWT-+\s+(\S+)\s+-+END NATS USER JWT-+")
_SEED = re.compile(r"-+BEGIN USER NKEY SEED-+\s+(\S+)\s+-+END USER NKEY SEED-+")


@dataclass(frozen=True, slots=True, repr=False)
class NkeyIdentity:
    """The client's identity: a signing key, and for decentralised auth the user's JWT."""

    seed: str
    jwt: str | None = None

    @classmethod
    def from_creds(cls, text: str, *, source: str) -> NkeyIdentity:
        """The identity in the content of a credentials file (`nsc generate creds`)."""
        jwt, seed = _JWT.search(text), _SEED.search(text)
        if jwt is None or seed is None:
            raise ConfigError(f"{source} is no NATS credentials file: it needs a USER JWT and a USER NKEY SEED block")
        identity = cls(seed.group(1), jwt.group(1))
        identity.public_key(source=source)
        return identity

    @classmethod
    def from_seed(cls, text: str, *, source: str) -> NkeyIdentity:
        """The identity of a bare nkey seed; comment lines and the credentials file's block markers are skipped."""
        lines = [line.strip() for line in text.splitlines()]
        seeds = [line for line in lines if line.startswith("S")]
        if not seeds:
            raise ConfigError(f"{source} holds no nkey seed: a seed begins with SU")
        identity = cls(seeds[0])
        identity.public_key(source=source)
        return identity

    def public_key(self, *, source: str = "the nkey seed") -> str:
        return _key_pair(self.seed, source).public_key.decode()  # type: ignore[no-any-return]

    def sign(self, nonce: str) -> str:
        """The signature of the nonce as the CONNECT frame carries it: base64url without padding."""
        signature: bytes = _key_pair(self.seed, "the nkey seed").sign(nonce.encode())
        return base64.urlsafe_b64encode(signature).rstrip(b"=").decode()


def read_secret_file(path: str, *, what: str) -> str:
    """The text of a file that holds a secret; the error names the path, never the content."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text file"
        raise ConfigError(f"cannot read the {what} {path!r}: {reason}") from None


def _key_pair(seed: str, source: str) -> nkeys.KeyPair:
    import nkeys  # loads libsodium: only when a key is used

    try:
        return nkeys.from_seed(bytearray(seed.encode()))
    except (nkeys.NkeysError, ValueError):
        raise ConfigError(f"{source} holds a malformed nkey seed") from None
