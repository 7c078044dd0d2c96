"""Maps partitions to filter subjects, and a subject back to its partition and key. Pure.

Everything here is checked before any call to the server: a key with `*` or a blank would widen the filter, and two
partitions that share a subject would have two owners (docs/evidence/go-library.md#l3).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from parti.errors import ConfigError
from parti.model import Partition, PartitionId
from parti.overlap import SubjectTrie, refuse_overlaps
from parti.subjects import validate_subject

_REMEMBERED = 10_000  # subjects of wildcard partitions whose route is kept


def consumer_name(prefix: str, worker_id: str, namespace: str = "") -> str:
    """`<prefix>-<namespace>-<worker id>`, without a manager `<prefix>-<worker id>` (docs/requirements.md#r-001).

    Refused when it is not a valid consumer name; the Go library maps different such names to the same one.
    """
    name = f"{consumer_stem(prefix, namespace)}-{worker_id}"
    if not prefix or not worker_id:
        raise ConfigError(f"a durable needs a prefix and a worker id, not {prefix!r} and {worker_id!r}")
    bad = sorted({c for c in name if not (c.isascii() and (c.isalnum() or c in "-_"))})
    if bad:
        raise ConfigError(
            f"consumer name {name!r} contains {' '.join(map(repr, bad))}: use letters, digits, '-' and '_' in the "
            "prefix and the worker id"
        )
    return name


def consumer_stem(prefix: str, namespace: str) -> str:
    """The common prefix of all durable names of a namespace, without the hyphen that follows."""
    return f"{prefix}-{namespace}" if namespace else prefix


@dataclass(frozen=True, slots=True)
class SubjectTemplate:
    """The subjects of a partition's messages: for example `orders.{partition}.>`."""

    text: str

    def subject(self, partition: Partition) -> str:
        """The filter of one partition."""
        return validate_subject(
            self.text.replace("{partition}", partition.id), wildcards=True, what=f"subject of partition {partition.id}"
        )

    def partition_of(self, subject: str) -> PartitionId | None:
        """The partition that has this filter; None when this template cannot produce it."""
        before, _, after = self.text.partition("{partition}")
        try:
            found = Partition(tuple(subject.removeprefix(before).removesuffix(after).split(".")))
            return found.id if self.subject(found) == subject else None
        except ConfigError:
            return None

    def nothing(self, worker_id: str) -> str:
        """A filter that matches no published subject: an empty filter list would match the whole stream.

        See docs/evidence/go-library.md#w2.

        It contains the worker id, because two consumers of a work queue may not share a filter (10100).
        """
        literal = ".".join("_none_" if token in ("*", ">") else token for token in self.text.split("."))
        return validate_subject(literal.replace("{partition}", f"_parti_no_partition_{worker_id}"))


@dataclass(frozen=True, slots=True)
class Route:
    """The partition and key of a message."""

    partition: PartitionId
    subject: str
    key: str


class Routes:
    """The filters of an assignment: deduplicated, sorted, and without overlap."""

    def __init__(self, template: SubjectTemplate, partitions: Iterable[Partition]) -> None:
        self.partitions: Mapping[PartitionId, Partition] = {p.id: p for p in partitions}
        filters = [(p.id, template.subject(p)) for p in self.partitions.values()]
        by_subject = {subject: partition for partition, subject in filters}
        self.subjects: tuple[str, ...] = tuple(sorted(by_subject))
        self._literal = {s: p for s, p in by_subject.items() if not _has_wildcard(s)}
        self._patterns = SubjectTrie()
        for subject, partition in by_subject.items():
            if _has_wildcard(subject):
                self._patterns.add(partition, subject)
        if len(self._literal) < len(by_subject) and len({len(p.keys) for p in self.partitions.values()}) > 1:
            # Partitions with equally many keys cannot overlap: two differ in a literal token at the same place.
            refuse_overlaps((partition, (subject,)) for partition, subject in filters)
        self._cache: dict[bytes, Route | None] = {}

    def find(self, subject: bytes) -> Route | None:
        """The route of a literal subject in wire form; None when no partition of this worker has it."""
        try:
            return self._cache[subject]
        except KeyError:
            pass
        if len(self._cache) >= _REMEMBERED + len(self._literal):
            self._cache.clear()
        route = self._cache[subject] = self._resolve(subject.decode(errors="replace"))
        return route

    def _resolve(self, subject: str) -> Route | None:
        partition = self._literal.get(subject)
        if partition is not None:
            return Route(partition, subject, partition)
        found = self._patterns.overlapping(subject)
        if found is None:
            return None
        owner, pattern = found
        return Route(PartitionId(owner), subject, _matched(pattern, subject) or owner)


def _has_wildcard(subject: str) -> bool:
    return any(token in ("*", ">") for token in subject.split("."))


def _matched(pattern: str, subject: str) -> str:
    """The tokens that the wildcards matched, joined by dots."""
    wanted, given = pattern.split("."), subject.split(".")
    found: list[str] = []
    for position, token in enumerate(wanted):
        if token == ">":
            found += given[position:]
        elif token == "*":
            found.append(given[position])
    return ".".join(found)
