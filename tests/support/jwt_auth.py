"""The part of NATS decentralised auth that tests need: operator, account and user JWTs, and their server."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from dataclasses import dataclass
from typing import Any

import nkeys

_ALL = -1


@dataclass(frozen=True)
class Key:
    """A key pair, derived from its seed."""

    seed: str

    @classmethod
    def new(cls, prefix: int) -> Key:
        return cls(nkeys.encode_seed(os.urandom(32), prefix).decode())

    @property
    def public(self) -> str:
        public: bytes = nkeys.from_seed(bytearray(self.seed.encode())).public_key
        return public.decode()

    def sign(self, data: bytes) -> bytes:
        signature: bytes = nkeys.from_seed(bytearray(self.seed.encode())).sign(data)
        return signature


def _segment(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def encode(issuer: Key, subject: str, name: str, kind: str, claims: dict[str, Any], **more: Any) -> str:
    """A JWT of version 2: ed25519-nkey over header.body, with the hash of the body as its id."""
    body: dict[str, Any] = {
        "iat": 1_700_000_000,
        "iss": issuer.public,
        "name": name,
        "sub": subject,
        "nats": {**claims, "type": kind, "version": 2},
        **more,
    }
    digest = hashlib.sha256(json.dumps(body).encode()).digest()
    body["jti"] = base64.b32encode(digest).rstrip(b"=").decode()
    header = _segment(json.dumps({"typ": "JWT", "alg": "ed25519-nkey"}).encode())
    signed = f"{header}.{_segment(json.dumps(body).encode())}"
    return f"{signed}.{_segment(issuer.sign(signed.encode()))}"


class Operator:
    """One operator with one JetStream account and a system account."""

    def __init__(self) -> None:
        self._key = Key.new(nkeys.PREFIX_BYTE_OPERATOR)
        self._account = Key.new(nkeys.PREFIX_BYTE_ACCOUNT)
        self._system = Key.new(nkeys.PREFIX_BYTE_ACCOUNT)

    def server_config(self) -> str:
        """Server configuration that trusts this operator and knows its accounts."""
        operator = encode(self._key, self._key.public, "op", "operator", {"system_account": self._system.public})
        unlimited = ("subs", "data", "payload", "imports", "exports", "conn", "leaf", "mem_storage", "disk_storage")
        limits: dict[str, Any] = dict.fromkeys(unlimited, _ALL)
        limits |= {"streams": _ALL, "consumer": _ALL, "wildcards": True}
        account = encode(self._key, self._account.public, "acc", "account", {"limits": limits})
        system = encode(self._key, self._system.public, "sys", "account", {"limits": {"conn": _ALL, "subs": _ALL}})
        return (
            f"operator: {operator}\nsystem_account: {self._system.public}\nresolver: MEMORY\n"
            f"resolver_preload: {{ {self._account.public}: {account}, {self._system.public}: {system} }}\n"
        )

    def credentials(self, *, signer: Key | None = None, expires: int | None = None) -> str:
        """The content of a credentials file for a new user; a `signer` other than the account makes it invalid."""
        user = Key.new(nkeys.PREFIX_BYTE_USER)
        more = {"exp": expires} if expires is not None else {}
        limits = {"subs": _ALL, "data": _ALL, "payload": _ALL}
        jwt = encode(signer or self._account, user.public, "user", "user", {"pub": {}, "sub": {}, **limits}, **more)
        return (
            f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
        )
