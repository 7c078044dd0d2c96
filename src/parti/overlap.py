"""Two partitions may not share a subject: its messages would have two owners, and one of them would skip them.

A trie of subject tokens finds an overlap among 10,000 subjects in milliseconds; comparing all pairs would take minutes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from parti.errors import OverlappingPartitions


class _Node:
    __slots__ = ("below", "end", "some", "tail")

    def __init__(self) -> None:
        self.below: dict[str, _Node] = {}
        self.some: tuple[str, str] = ("", "")
        """Any one (owner, subject) whose path includes this node."""
        self.end: tuple[str, str] | None = None
        self.tail: tuple[str, str] | None = None
        """The (owner, subject) whose `>` is at this node: it matches one or more tokens from here."""


class SubjectTrie:
    """Subjects with wildcards, each with the name of its owner."""

    def __init__(self) -> None:
        self._root = _Node()

    def add(self, owner: str, subject: str) -> None:
        """Register `subject` for `owner`."""
        node, entry = self._root, (owner, subject)
        for token in subject.split("."):
            if token == ">":
                node.tail = entry
                return
            node = node.below.setdefault(token, _Node())
            node.some = entry
        node.end = entry

    def overlapping(self, subject: str) -> tuple[str, str] | None:
        """(owner, subject) of a registered subject that shares at least one literal subject with this one, or None."""
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
    """Raise OverlappingPartitions, with both names, when two of the (owner, subjects) pairs share a subject."""
    trie = SubjectTrie()
    for owner, subjects in owned:
        for subject in subjects:
            found = trie.overlapping(subject)
            if found is not None:
                raise OverlappingPartitions(found[0], found[1], owner, subject)
        for subject in subjects:
            trie.add(owner, subject)
