"""Partitions may not share a subject: such a message would have two owners, and one of them would skip it.

A trie of tokens finds two that do among 10,000 in milliseconds; comparing each with each would take minutes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from parti.errors import OverlappingPartitions


class _Node:
    __slots__ = ("below", "end", "some", "tail")

    def __init__(self) -> None:
        self.below: dict[str, _Node] = {}
        self.some: tuple[str, str] = ("", "")
        """Any one (owner, subject) that passes through here."""
        self.end: tuple[str, str] | None = None
        self.tail: tuple[str, str] | None = None
        """Of a subject whose `>` stands here: it takes one token or more from here on."""


class SubjectTrie:
    """Subjects with wildcards, each with the name of its owner."""

    def __init__(self) -> None:
        self._root = _Node()

    def add(self, owner: str, subject: str) -> None:
        """From now on `subject` belongs to `owner`."""
        node, entry = self._root, (owner, subject)
        for token in subject.split("."):
            if token == ">":
                node.tail = entry
                return
            node = node.below.setdefault(token, _Node())
            node.some = entry
        node.end = entry

    def overlapping(self, subject: str) -> tuple[str, str] | None:
        """(owner, subject) of one that shares at least one literal subject with this one; None when none does."""
        tokens = subject.split(".")
        waiting = [(self._root, 0)]
        while waiting:
            node, at = waiting.pop()
            if at == len(tokens):
                if node.end is not None:
                    return node.end
                continue
            if node.tail is not None:
                return node.tail
            token = tokens[at]
            if token == ">":
                for below in node.below.values():
                    return below.some
            elif token == "*":
                waiting += [(below, at + 1) for below in node.below.values()]
            else:
                waiting += [(node.below[t], at + 1) for t in (token, "*") if t in node.below]
        return None


def refuse_overlaps(owned: Iterable[tuple[str, Sequence[str]]]) -> None:
    """OverlappingPartitions when two of (owner, its subjects) share a subject, with both names."""
    trie = SubjectTrie()
    for owner, subjects in owned:
        for subject in subjects:
            found = trie.overlapping(subject)
            if found is not None:
                raise OverlappingPartitions(found[0], found[1], owner, subject)
        for subject in subjects:
            trie.add(owner, subject)
