"""One partition with its own durable: stop, drain, settle, release; accept, reset, pull."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from parti.control import claims, per_partition, signals
from parti.control.per_partition import PerPartition, Phase
from parti.model import Claim, ClaimState, Member, PartitionId, WorkerId

P = PartitionId("slot-3")
A = Member(WorkerId("worker-0"), "a")
B = Member(WorkerId("worker-1"), "b")


def feed(state: PerPartition, *events: per_partition.Event) -> tuple[PerPartition, list[object]]:
    effects: list[object] = []
    for event in events:
        state, said = per_partition.step(state, event)
        effects += said
    return state, effects


def live() -> tuple[PerPartition, Claim]:
    offered = claims.assign(Claim(P, cursor=10), A, term=1)
    state, effects = feed(PerPartition(P, A), signals.ClaimSeen(offered, 1))
    (write,) = effects
    assert isinstance(write, signals.WriteClaim)
    assert write.claim.state is ClaimState.STABLE, "there is nothing to catch up with"
    state, effects = feed(state, signals.ClaimSeen(write.claim, 2))
    assert effects == [signals.Granted(write.claim.lease()), signals.ResetConsumer(P, 11, 1)]
    state, effects = feed(state, signals.ResetDone(1))
    assert (state.phase, effects) == (Phase.LIVE, [])
    return state, write.claim


def test_nothing_is_processed_before_the_reset_is_answered() -> None:
    state, _ = feed(live()[0], signals.Gap())
    assert state.phase is Phase.RESETTING
    _, verdict, _ = per_partition.deliver(state, 11, 1, state.ticket)
    assert verdict is signals.DeliveryVerdict.IGNORE


def test_deliveries_in_sequence_are_processed_in_order() -> None:
    state, _ = live()
    for sequence, seq in enumerate((11, 15, 16), start=1):
        state, verdict, effects = per_partition.deliver(state, seq, sequence, 1)
        assert (verdict, effects) == (signals.DeliveryVerdict.PROCESS, ())
    state, _ = feed(state, signals.MessageDone(11), signals.MessageDone(15))
    assert state.cursor == 15
    assert per_partition.deliver(state, 15, 4, 1)[1] is signals.DeliveryVerdict.ACK
    assert per_partition.deliver(state, 16, 4, 1)[1] is signals.DeliveryVerdict.ACK_WHEN_DONE


def test_a_gap_resets_to_what_is_done_and_not_to_what_is_only_queued() -> None:
    state, _ = live()
    for sequence, seq in enumerate((11, 15, 16), start=1):
        state, _, _ = per_partition.deliver(state, seq, sequence, 1)
    state, _ = feed(state, signals.MessageDone(11))
    state, verdict, effects = per_partition.deliver(state, 20, 9, 1)
    assert verdict is signals.DeliveryVerdict.IGNORE
    assert effects == (signals.ResetConsumer(P, 12, 2),)
    assert per_partition.deliver(state, 20, 4, 1)[1] is signals.DeliveryVerdict.IGNORE, "the old inbox is closed"
    state, _ = feed(state, signals.ResetDone(2))
    state, verdict, _ = per_partition.deliver(state, 15, 1, 2)
    assert verdict is signals.DeliveryVerdict.ACK_WHEN_DONE, "it is in the lane already"


def test_the_first_delivery_after_a_reset_must_carry_sequence_one() -> None:
    state, _ = live()
    _, verdict, effects = per_partition.deliver(state, 11, 2, 1)
    assert verdict is signals.DeliveryVerdict.IGNORE
    assert effects == (signals.ResetConsumer(P, 11, 2),)


def test_a_release_stops_drains_settles_and_passes_the_position_on() -> None:
    state, claim = live()
    state, _, _ = per_partition.deliver(state, 11, 1, 1)
    state, _, _ = per_partition.deliver(state, 15, 2, 1)
    prepare = claims.prepare(claim, B, term=1)
    state, effects = feed(state, signals.ClaimSeen(prepare, 3))
    assert effects == [signals.StopLane(P)]
    state, effects = feed(state, signals.LaneStopped(last_started=11, dropped_from=15))
    assert effects == []
    state, effects = feed(state, signals.MessageDone(11))
    assert effects == [signals.Revoked(claim.lease()), signals.Settle(P, 2)]
    assert state.unreleased == (prepare.epoch, 14)
    state, effects = feed(state, signals.Settled(1))
    assert effects == []
    state, effects = feed(state, signals.Settled(2))
    assert effects == [signals.WriteClaim(claims.release(prepare, A, cursor=14), 3)]
    released = claims.release(prepare, A, cursor=14)
    state, effects = feed(state, signals.ClaimSeen(released, 4))
    assert (state.phase, effects, state.unreleased) == (Phase.IDLE, [signals.Discard(P)], None)


def test_an_aborted_release_resets_and_goes_on() -> None:
    state, claim = live()
    prepare = claims.prepare(claim, B, term=1)
    state, _ = feed(state, signals.ClaimSeen(prepare, 3), signals.LaneStopped(0, None))
    aborted = claims.abort(prepare, term=1)
    state, effects = feed(state, signals.ClaimSeen(aborted, 4))
    assert effects == [signals.Granted(aborted.lease()), signals.ResetConsumer(P, 11, 3)]


def test_the_next_owner_starts_at_the_position_it_was_passed() -> None:
    prepared = claims.prepare(replace(live()[1], cursor=40), B, term=1)
    commit = claims.release(prepared, A, cursor=55)
    state, effects = feed(PerPartition(P, B), signals.ClaimSeen(commit, 9))
    assert effects == [signals.WriteClaim(claims.accept(commit, B, target=55), 9)]
    state, effects = feed(state, signals.ClaimSeen(claims.accept(commit, B, target=55), 10))
    assert effects[1] == signals.ResetConsumer(P, 56, 1)


def test_a_fenced_worker_holds_nothing() -> None:
    state, claim = live()
    state, effects = feed(state, signals.Fenced())
    assert effects == [signals.Revoked(claim.lease()), signals.Discard(P)]
    assert per_partition.deliver(state, 11, 1, 1)[1] is signals.DeliveryVerdict.IGNORE
    assert repr(state) == "<PerPartition slot-3 idle epoch=None cursor=10>"


@pytest.mark.parametrize("seed", range(40))
def test_reads_judged_at_once_and_told_late_lead_where_each_message_by_itself_does(seed: int) -> None:
    """Random reads, repeats, gaps, claims and losses: one slot is told everything at once, the other one late."""
    rng = random.Random(seed)
    prompt, claim = live()
    late, revision, top, taken = prompt, 3, prompt.queued, list[int]()
    untold: int | None = None

    def tell() -> None:
        nonlocal late, untold
        if untold is not None:
            late, said = per_partition.step(late, signals.MessageDone(untold))
            assert said == (), "a steady slot asks for nothing"
            untold = None

    for _ in range(400):
        if rng.random() < 0.5:
            inbox = prompt.ticket - (rng.random() < 0.1)
            first = prompt.expected + (rng.random() < 0.1)
            seqs = [top + rng.randint(1, 3) * (n + 1) if rng.random() < 0.9 else rng.randint(1, top) for n in range(3)]
            verdicts, effects, before = [], list[object](), prompt
            for n, seq in enumerate(seqs):
                prompt, verdict, said = per_partition.deliver(prompt, seq, first + n, inbox)
                verdicts.append(verdict)
                effects += said
            after = per_partition.deliver_new(late, seqs, first, inbox, untold)
            assert (after is not None) == (verdicts == [signals.DeliveryVerdict.PROCESS] * 3), (before, seqs)
            if after is not None:
                late, untold = after, None
                taken += seqs
                top = seqs[-1]
            else:
                tell()
                also = list[object]()
                for n, seq in enumerate(seqs):
                    late, verdict, said = per_partition.deliver(late, seq, first + n, inbox)
                    if verdict is signals.DeliveryVerdict.PROCESS:
                        taken.append(seq)
                        top = seq
                    also += said
                assert also == effects
        elif taken and rng.random() < 0.7:
            done = rng.choice([taken.pop(0), taken[0] - 1 if taken else late.queued])
            steady = prompt.steady
            prompt, _ = per_partition.step(prompt, signals.MessageDone(done))
            if steady:
                untold = done
            else:
                tell()
                late, _ = per_partition.step(late, signals.MessageDone(done))
        else:
            prepared = claims.prepare(claim, B, term=1)
            events: list[per_partition.Event] = [
                signals.Gap(),
                signals.ResetDone(prompt.ticket),
                signals.ClaimSeen(rng.choice([claim, prepared]), revision),
                signals.ClaimLost(revision, revision),
                signals.WriteFailed(),
            ]
            if prompt.phase is Phase.STOPPING:
                kept = rng.randint(0, len(taken))
                events = [
                    signals.LaneStopped(taken[kept - 1] if kept else 0, taken[kept] if kept < len(taken) else None)
                ]
                taken = taken[:kept]
            event = rng.choice(events)
            revision += 1
            tell()
            prompt, said = per_partition.step(prompt, event)
            late, late_said = per_partition.step(late, event)
            assert said == late_said
        if untold is None:
            assert late == prompt
