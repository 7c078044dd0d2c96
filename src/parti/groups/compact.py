"""The compact layout: one filter for a whole block of partitions, for groups without members in other languages.

With one filter per partition a member with a backlog on a file stream is slow: 16 filters over 2,000 keys deliver 2,500
messages per second, one filter delivers 45,000 (the filter cliff, docs/evidence/jetstream.md#j8). Here the subjects of
the work queue carry the partition as nested residues of the same hash, `h mod 2 . h mod 4 . ... . h mod n`: a member
that owns every partition with the same remainder needs one filter for all of them.
"""

from __future__ import annotations

from collections.abc import Collection

from parti.groups.records import PartitioningFilter


def depth(partitions: int) -> int:
    """The number of leading subject tokens that are residues; the last one is the partition."""
    return max(1, partitions.bit_length() - 1)


def moduli(partitions: int) -> list[int]:
    return [2**level for level in range(1, depth(partitions) + 1)] if partitions > 1 else [1]


def block_order(partitions: int) -> list[int]:
    """The partitions ordered so that neighbours share remainders: few filters cover a block of them."""
    bits = partitions.bit_length() - 1
    return [int(f"{place:0{bits}b}"[::-1], 2) if bits else 0 for place in range(partitions)]


def cover(owned: Collection[int], partitions: int) -> tuple[str, ...]:
    """The fewest filters that match exactly the owned partitions."""
    found: list[str] = []
    levels = depth(partitions) if partitions > 1 else 0
    mine = set(owned)

    def look(level: int, residue: int) -> None:
        below = range(residue, partitions, 2**level)
        have = sum(partition in mine for partition in below)
        if have == len(below):
            fixed = [str(residue % 2**each) for each in range(1, level + 1)]
            found.append(".".join([*fixed, *["*"] * (max(levels, 1) - level), ">"]))
        elif have:
            look(level + 1, residue)
            look(level + 1, residue + 2**level)

    if mine:
        look(0, 0)
    return tuple(found)


def transform(each: PartitioningFilter, partitions: int) -> dict[str, str]:
    """The subject transform of one partitioning filter."""
    indexes = "".join(f",{index}" for index in each.wildcards)
    tokens = [f"{{{{Partition({modulus}{indexes})}}}}" for modulus in moduli(partitions)]
    star = 0
    for token in each.filter.split("."):
        if token == "*":
            star += 1
            token = f"{{{{Wildcard({star})}}}}"
        tokens.append(token)
    return {"src": each.filter, "dest": ".".join(tokens)}
