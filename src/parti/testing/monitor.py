"""Reads the monitoring endpoints of a cluster's nodes, and derives the cluster's state."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_ASK_WITHIN = 5.0
_EVERYTHING = "/jsz?accounts=true&streams=true&consumers=true"


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One node's answers; empty if it did not answer."""

    jetstream: Mapping[str, Any]
    health: Mapping[str, Any]

    @classmethod
    def of(cls, monitor_url: str) -> NodeReport:
        return cls(ask(monitor_url + _EVERYTHING), ask(monitor_url + "/healthz"))

    @property
    def meta_size(self) -> int:
        return int(self.jetstream.get("meta_cluster", {}).get("cluster_size", 0))

    def groups(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The node's Raft groups, as (label, the node's view of the group)."""
        yield "meta", self.jetstream.get("meta_cluster") or {}
        for account in self.jetstream.get("account_details") or []:
            for stream in account.get("stream_detail") or []:
                label = stream_label(account["name"], stream["name"])
                yield label, stream.get("cluster") or {}
                for consumer in stream.get("consumer_detail") or []:
                    yield f"{label} consumer {consumer['name']}", consumer.get("cluster") or {}


def stream_label(account: str, stream: str) -> str:
    """The name of a stream's group in reports."""
    return f"{account} stream {stream}"


def leader_of(reports: Mapping[str, NodeReport], label: str) -> str | None:
    """The node that leads this group. Others may still report an old leader, so only the leader's own report counts."""
    for node, report in reports.items():
        if any(found == label and group.get("leader") == node for found, group in report.groups()):
            return node
    return None


def what_lags(reports: Mapping[str, NodeReport], size: int) -> list[str]:
    """Why these nodes, of a cluster of `size`, are not current, as text; empty when they are."""
    reasons: list[str] = []
    led: set[str] = set()
    replicated: set[str] = {"meta"}
    for node, report in reports.items():
        if report.health.get("status") != "ok":
            reasons.append(f"{node}: {report.health.get('error', 'no answer')}")
        if report.meta_size != size:
            reasons.append(f"{node} knows {report.meta_size} of {size} nodes")
        for label, group in report.groups():
            replicas = group.get("replicas") or []
            if replicas:
                replicated.add(label)
            if not group.get("leader"):
                reasons.append(f"{node} knows no leader of {label}")
            # /healthz alone is not enough: a node calls itself healthy before the leader has heard from it, and a
            # follower reports its fellow followers as never current. The leader's list is what counts.
            elif group["leader"] == node:
                led.add(label)
                reasons += [
                    f"{replica.get('name')} lags behind {node} in {label}"
                    for replica in replicas
                    if replica.get("name") in reports and (not replica.get("current") or replica.get("offline"))
                ]
    reasons += [f"nobody leads {label}" for label in sorted(replicated - led)]
    return reasons


def ask(url: str) -> dict[str, Any]:
    """The monitoring answer, or an empty one while the node cannot answer."""
    try:
        with urllib.request.urlopen(url, timeout=_ASK_WITHIN) as answer:  # noqa: S310 - http on loopback, made by us
            body = json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            body = json.load(error)  # /healthz explains the problem in the body of a 503
    except (OSError, ValueError):
        return {}
    return body if isinstance(body, dict) else {}
