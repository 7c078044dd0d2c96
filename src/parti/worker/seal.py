"""The owner of a durable, written into its metadata: namespace, worker, the stream's creation time, our version. Pure.

A name alone proves nothing: `<prefix>-a-b-c` may be worker `c` of namespace `a-b`, worker `b-c` of namespace `a`, or a
consumer that a person created. A consumer that is not ours is never updated, reset or deleted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parti import __version__

_NAMESPACE, _STREAM, _VERSION, _WORKER = "parti.namespace", "parti.stream", "parti.version", "parti.worker"


@dataclass(frozen=True, slots=True)
class Seal:
    """The mark in every durable of parti since durables have their namespace in their name."""

    namespace: str
    """Empty for a worker without a manager."""
    stream: str
    """The stream's creation time: a durable of another stream says nothing about positions."""
    worker: str = ""
    """The worker id of a per-worker durable."""
    version: str = __version__

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Seal | None:
        """Read from a consumer's configuration; None if it has none: of an earlier version, or not made by parti."""
        found = config.get("metadata") or {}
        if _VERSION not in found:
            return None
        return cls(found.get(_NAMESPACE, ""), found.get(_STREAM, ""), found.get(_WORKER, ""), found[_VERSION])

    def metadata(self) -> dict[str, str]:
        entries = {_NAMESPACE: self.namespace, _STREAM: self.stream, _VERSION: self.version}
        return entries | ({_WORKER: self.worker} if self.worker else {})


def foreign(config: Mapping[str, Any], namespace: str) -> str:
    """Why a consumer with this configuration is not of this namespace; empty when it is, or may be."""
    seal = Seal.read(config)
    if seal is not None and seal.namespace != namespace:
        return f"it is of namespace {seal.namespace!r}" if seal.namespace else "it is of a worker without a manager"
    if seal is not None:
        return ""
    # Since durables have their namespace in their name they all carry a seal.
    return _not_made_by_parti(config) or ("it has no mark of parti" if namespace else "")


def is_unsealed(config: Mapping[str, Any]) -> bool:
    """Whether it may be a durable of an earlier version, which wrote no seal."""
    return Seal.read(config) is None and not _not_made_by_parti(config)


def _not_made_by_parti(config: Mapping[str, Any]) -> str:
    if config.get("deliver_subject"):
        return "it is a push consumer"
    policy = config.get("ack_policy", "none")
    return f"its ack policy is {policy!r}" if policy != "explicit" else ""
