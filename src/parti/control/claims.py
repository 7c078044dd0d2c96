"""The only legal changes of a claim. Each function is one transition of the diagram; no other change can be written.

    UNASSIGNED --assign--> COMMIT --accept--> COMMIT+ --caught_up--> STABLE --prepare--> PREPARE --release--> COMMIT
                             |                                                              |
                             +--roll_back, redirect--> COMMIT                               +--abort--> STABLE

The leader writes assign, prepare, abort, roll_back, redirect and take_over; the new owner writes ready, accept and
caught_up; the old owner writes release. Every change of who may act raises the epoch. Because accept is the owner's own
CAS, an unaccepted COMMIT can be undone exactly: either it was accepted, or nobody acted on it.

A record that was deleted or damaged is rewritten by the member that holds the partition (`reclaim`). If no member does,
a `mislaid` claim replaces it, so that the partition does not look new, and `find` gives it an owner.
"""

from __future__ import annotations

from dataclasses import replace

from parti.errors import UsageError
from parti.model import Claim, ClaimState, Member


class IllegalTransition(UsageError):
    """The claim does not allow this change: read it again and decide again."""

    def __init__(self, what: str, claim: Claim) -> None:
        super().__init__(f"cannot {what}: the claim is {claim}")
        self.claim = claim


def assign(claim: Claim, to: Member, *, term: int, above: int = 0) -> Claim:
    """Give an unowned partition an owner, which starts at the cursor once it has accepted.

    `above`: makes the epoch higher than this, for a partition without a known history that may have had owners before.
    """
    _require(claim.state is ClaimState.UNASSIGNED and not claim.lost, f"assign to {to}", claim)
    known = replace(claim, epoch=max(claim.epoch, above))
    return _commit(known, to, previous=claim.previous, cursor=claim.cursor, term=term)


def prepare(claim: Claim, to: Member | None, *, term: int) -> Claim:
    """Start a planned move: the owner continues until the new one is ready. To None: the partition is being retired."""
    _require(claim.state is ClaimState.STABLE and claim.owner != to, f"prepare for {to}", claim)
    return replace(
        claim,
        state=ClaimState.PREPARE,
        pending=to,
        previous=None,
        taken_from=None,
        target=None,
        epoch=claim.epoch + 1,
        term=term,
    )


def ready(claim: Claim, by: Member, *, target: int) -> Claim:
    """The new owner filters the partition and holds its messages; it receives everything above `target`."""
    _require(claim.state is ClaimState.PREPARE and claim.pending == by, f"be ready as {by}", claim)
    return replace(claim, target=target)


def release(claim: Claim, by: Member, *, cursor: int) -> Claim:
    """The owner has stopped and finished what was in flight: everything up to `cursor` is done.

    The caller lists in `ahead` what is done above it; the list of an earlier move is dropped.
    """
    _require(claim.state is ClaimState.PREPARE and claim.owner == by, f"release as {by}", claim)
    claim = replace(claim, ahead=None)
    cursor = max(claim.cursor, cursor)
    if claim.pending is None:
        return _unassigned(claim, by, cursor, claim.term)
    moved = _commit(claim, claim.pending, previous=by, cursor=cursor, term=claim.term)
    return replace(moved, target=claim.target)


def accept(claim: Claim, by: Member, *, target: int) -> Claim:
    """From here on `by` acts under this epoch. STABLE at once when there is nothing to catch up on."""
    _require(claim.state is ClaimState.COMMIT and claim.owner == by and not claim.accepted, f"accept as {by}", claim)
    taken = replace(claim, accepted=True, target=target)
    return replace(taken, state=ClaimState.STABLE) if taken.caught_up else taken


def caught_up(claim: Claim, by: Member, *, cursor: int) -> Claim:
    """Everything up to the target is processed, not only read: the old owner may drop its filter, the floor counts."""
    _require(claim.state is ClaimState.COMMIT and claim.owner == by and claim.accepted, f"be caught up as {by}", claim)
    _require(claim.target is not None and cursor >= claim.target, f"be caught up at {cursor}", claim)
    return replace(claim, state=ClaimState.STABLE, cursor=cursor, ahead=None)


def abort(claim: Claim, *, term: int) -> Claim:
    """Cancel the move: the owner keeps the partition under a new epoch, whether it had already stopped or not.

    STABLE and not COMMIT: the owner may be acting all the time, so this must not look like a change that can be undone.
    """
    _require(claim.state is ClaimState.PREPARE and claim.owner is not None, "abort", claim)
    return replace(claim, state=ClaimState.STABLE, epoch=claim.epoch + 1, pending=None, target=claim.cursor, term=term)


def roll_back(claim: Claim, *, term: int) -> Claim:
    """The new owner never accepted: the previous owner gets the partition back."""
    _require(_undoable(claim) and claim.previous is not None, "roll back", claim)
    assert claim.previous is not None
    return _commit(claim, claim.previous, previous=claim.previous, cursor=claim.cursor, term=term)


def redirect(claim: Claim, to: Member | None, *, term: int) -> Claim:
    """The new owner never accepted: another member gets the partition, or no member for now."""
    _require(_undoable(claim), f"redirect to {to}", claim)
    if to is None:
        return _unassigned(claim, claim.previous, claim.cursor, term)
    return _commit(claim, to, previous=claim.previous, cursor=claim.cursor, term=term)


def take_over(claim: Claim, to: Member | None, *, start: int, term: int) -> Claim:
    """The owner is certainly gone (lease and margin): continue from `start`, or from the cursor if that is higher.

    The owner's ack floor does not count (docs/evidence/handoff.md#h3).
    """
    _require(claim.owner is not None and not _undoable(claim), f"take over for {to}", claim)
    start = max(start, claim.cursor)
    # On an interest stream, messages that were never caught up may be retained only by the owner before the last.
    unfinished = claim.state is ClaimState.COMMIT and claim.previous is not None
    previous = claim.previous if unfinished else claim.owner
    claim = replace(claim, taken_from=claim.owner)
    if to is None:
        return _unassigned(claim, previous, start, term)
    taken = _commit(claim, to, previous=previous, cursor=start, term=term)
    # The member that had prepared keeps its T; it has filtered the partition since then.
    return replace(taken, target=claim.target) if claim.pending == to else taken


def reclaim(known: Claim, by: Member, *, cursor: int, epoch: int = 0) -> Claim:
    """The record of a partition that `by` holds was lost: rewrite it as `by` knows it, under a new epoch.

    Only the holder of a lease may write this: at most one process has one, and no other was given the partition since.
    `epoch`: the epoch of the record now in its place. A move that was under way starts over.
    """
    unfinished = known.state is ClaimState.COMMIT
    _require(known.owner == by and (known.accepted or not unfinished), f"reclaim as {by}", known)
    cursor = max(cursor, known.cursor)
    return replace(
        known,
        state=ClaimState.COMMIT if unfinished else ClaimState.STABLE,
        epoch=max(known.epoch, epoch) + 1,
        pending=None,
        cursor=cursor,
        target=known.target if unfinished else cursor,
    )


def mislaid(known: Claim, *, cursor: int, epoch: int = 0, term: int) -> Claim:
    """Replaces a lost record when no member is known to hold the partition; it assigns the partition to no member."""
    unfinished = known.state is ClaimState.COMMIT and known.previous is not None
    previous = known.previous if unfinished or known.owner is None else known.owner
    return Claim(
        known.partition,
        epoch=max(known.epoch, epoch) + 1,
        previous=previous,
        cursor=max(known.cursor, cursor),
        term=term,
        lost=True,
        ahead=known.ahead,
    )


def find(claim: Claim, to: Member, *, start: int, epoch: int, previous: Member | None, term: int) -> Claim:
    """A mislaid partition certainly has no holder: `to` continues from `start`, the highest recorded position."""
    _require(claim.lost, f"find for {to}", claim)
    found = replace(claim, epoch=max(claim.epoch, epoch), lost=False)
    return _commit(found, to, previous=previous or claim.previous, cursor=max(claim.cursor, start), term=term)


def retake(claim: Claim, by: Member) -> Claim:
    """The claim names `by`, but `by` holds nothing (the record was overwritten): start over, as if newly assigned."""
    undecided = claim.state is ClaimState.COMMIT and not claim.accepted
    _require(claim.owner == by and not undecided, f"retake as {by}", claim)
    return _commit(claim, by, previous=claim.previous or by, cursor=claim.cursor, term=claim.term)


def _undoable(claim: Claim) -> bool:
    return claim.state is ClaimState.COMMIT and not claim.accepted


def _commit(claim: Claim, to: Member, *, previous: Member | None, cursor: int, term: int) -> Claim:
    return replace(
        claim,
        state=ClaimState.COMMIT,
        epoch=claim.epoch + 1,
        owner=to,
        pending=None,
        previous=previous,
        cursor=cursor,
        target=None,
        accepted=False,
        term=term,
    )


def _unassigned(claim: Claim, previous: Member | None, cursor: int, term: int) -> Claim:
    return Claim(
        claim.partition,
        epoch=claim.epoch + 1,
        previous=previous,
        cursor=cursor,
        term=term,
        updated=claim.updated,
        ahead=claim.ahead,
        taken_from=claim.taken_from,
    )


def _require(allowed: bool, what: str, claim: Claim) -> None:
    if not allowed:
        raise IllegalTransition(what, claim)
