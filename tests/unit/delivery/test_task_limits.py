"""The breaker, the gate and the sharing of partitions: pure decisions, with time as an argument."""

from __future__ import annotations

import asyncio
import math
import random
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parti.clock import SimulatedClock
from parti.config.deliver import DeliverSection
from parti.delivery.breaker import Breaker
from parti.delivery.gate import Gate, Postponed
from parti.delivery.line import TriggerLine
from parti.delivery.order import OrderRules
from parti.delivery.ownership import OwnershipView
from parti.delivery.policy import AttemptOutcome

OPEN = OrderRules()


def breaker(**changes: float) -> Breaker:
    return Breaker(DeliverSection(**{"breaker_calls": 4, "breaker_open": 30.0, **changes}))  # type: ignore[arg-type]


def test_a_host_that_fails_often_enough_is_left_alone_and_then_probed_once() -> None:
    made = breaker()
    for now in range(3):
        assert not made.record(now, failed=True)
        assert made.ask(now) == 0
    assert made.record(3, failed=True)
    assert made.ask(4) == pytest.approx(29)
    assert made.ask(33) == 0  # the probe
    assert made.ask(33) > 0  # nobody else meanwhile
    made.record(34, failed=True)
    assert made.ask(35) > 0
    assert made.ask(64.5) == 0
    made.record(65, failed=False)
    assert made.ask(65) == made.ask(65) == 0
    assert repr(made) == "<Breaker closed>"


def test_few_or_old_failures_do_not_open_the_breaker() -> None:
    made = breaker()
    for now in range(20):
        made.record(now, failed=now % 3 == 0)
    assert not made.is_open
    for now in (100, 200, 300, 400, 500):
        made.record(now, failed=True)
    assert not made.is_open


def test_a_probe_that_never_took_place_is_not_waited_for() -> None:
    made = breaker(breaker_calls=1)
    made.record(0, failed=True)
    assert made.ask(31) == 0
    made.forget_probe()
    assert made.ask(31) == 0


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans(), st.booleans())))
def test_a_breaker_always_lets_a_probe_through_in_the_end(events: list[tuple[float, bool, bool]]) -> None:
    made, now = breaker(), 0.0
    for step, asked, failed in events:
        now += step
        if (asked and made.ask(now) == 0) or not asked:
            made.record(now, failed=failed)
    made.forget_probe()
    assert made.ask(now + 31) == 0


def gate(**changes: int) -> tuple[Gate, SimulatedClock]:
    clock = SimulatedClock()
    config = DeliverSection(**{"concurrency": 4, "host_concurrency": 2, "max_ack_pending": 200, **changes})  # type: ignore[arg-type]
    return Gate(config, clock, random.Random(1)), clock


async def admitted(made: Gate, host: str, rules: OrderRules = OPEN) -> asyncio.Task[Postponed | None]:
    task = asyncio.create_task(made.admit(host, "t", rules))
    await asyncio.sleep(0)
    return task


async def test_a_slow_host_takes_its_own_places_only() -> None:
    made, _ = gate()
    slow = [await admitted(made, "slow") for _ in range(10)]
    assert sum(task.done() for task in slow) == 2
    assert (await admitted(made, "quick")).done()
    made.release("quick", "t", OPEN, AttemptOutcome.DELIVERED)
    assert made.running == 2
    for task in slow[2:]:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    made.release("slow", "t", OPEN, AttemptOutcome.TIMEOUT)
    made.release("slow", "t", OPEN, AttemptOutcome.TIMEOUT)
    assert made.running == 0


async def test_places_that_become_free_go_round_the_hosts_that_wait() -> None:
    made, _ = gate(concurrency=2)
    first = [await admitted(made, "a"), await admitted(made, "a")]
    waiting = {host: [await admitted(made, host) for _ in range(3)] for host in ("b", "c")}
    assert all(task.done() for task in first)
    for _ in range(2):
        made.release("a", "t", OPEN, AttemptOutcome.DELIVERED)
        await asyncio.sleep(0)
    assert [sum(task.done() for task in tasks) for tasks in waiting.values()] == [1, 1]
    for _ in range(2):
        for host in ("b", "c"):
            made.release(host, "t", OPEN, AttemptOutcome.DELIVERED)
            await asyncio.sleep(0)
    assert all(task.done() for tasks in waiting.values() for task in tasks)


async def test_a_place_given_to_somebody_who_left_is_given_on() -> None:
    made, _ = gate(concurrency=1)
    await admitted(made, "a")
    gone, next_one = await admitted(made, "a"), await admitted(made, "b")
    made.release("a", "t", OPEN, AttemptOutcome.DELIVERED)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    await asyncio.sleep(0)
    assert next_one.done()
    assert made.running == 1


async def test_all_who_wait_may_leave_at_once() -> None:
    made, _ = gate(concurrency=1)
    await admitted(made, "a")
    waiting = [await admitted(made, host) for host in "aabbab"]
    for task in waiting:
        task.cancel()
    made.release("a", "t", OPEN, AttemptOutcome.DELIVERED)
    assert all(isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*waiting, return_exceptions=True))
    assert made.running == 0
    assert (await admitted(made, "b")).done()


async def test_nothing_is_sent_to_a_host_that_is_down() -> None:
    made, clock = gate(breaker_calls=2)
    for _ in range(2):
        await made.admit("a", "t", OPEN)
        made.release("a", "t", OPEN, AttemptOutcome.TIMEOUT)
    assert made.open_breakers == 1
    postponed = await made.admit("a", "t", OPEN)
    assert isinstance(postponed, Postponed)
    assert postponed.why == "breaker"
    assert await made.admit("b", "t", OPEN) is None
    clock.advance(40)
    assert await made.admit("a", "t", OPEN) is None
    made.release("a", "t", OPEN, AttemptOutcome.DELIVERED)
    assert made.open_breakers == 0


async def down(made: Gate, clock: SimulatedClock, host: str) -> None:
    """The host counts as down, and its time has passed: one probe is due."""
    for _ in range(DeliverSection().breaker_calls):
        assert (await admitted(made, host)).done()
        made.release(host, "t", OPEN, AttemptOutcome.SERVER_ERROR)
    assert made.open_breakers == 1
    clock.advance(DeliverSection().breaker_open + 1)


async def test_a_probe_that_has_to_wait_for_a_place_is_still_the_probe() -> None:
    made, clock = gate(concurrency=1)
    await down(made, clock, "down")
    assert (await admitted(made, "busy")).done()
    probe = await admitted(made, "down")
    assert not probe.done()
    made.release("busy", "t", OPEN, AttemptOutcome.DELIVERED)
    assert await probe is None
    made.release("down", "t", OPEN, AttemptOutcome.DELIVERED)
    assert made.open_breakers == 0


async def test_a_probe_that_was_cancelled_while_it_waited_leaves_room_for_another() -> None:
    made, clock = gate(concurrency=1)
    await down(made, clock, "down")
    assert (await admitted(made, "busy")).done()
    gone = await admitted(made, "down")
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    made.release("busy", "t", OPEN, AttemptOutcome.DELIVERED)
    assert await (await admitted(made, "down")) is None


async def test_a_rejection_says_nothing_against_the_host() -> None:
    made, _ = gate(breaker_calls=1)
    for outcome in (AttemptOutcome.REJECTED, AttemptOutcome.GONE, AttemptOutcome.REDIRECTED, None):
        assert await made.admit("a", "t", OPEN) is None
        made.release("a", "t", OPEN, outcome)
    assert made.open_breakers == 0


@pytest.mark.parametrize(("held", "most"), [(150, 100), (20, 32)])
async def test_a_host_that_fills_the_memory_without_moving_is_sent_away(held: int, most: int) -> None:
    made, _ = gate(max_ack_pending=most)
    for _ in range(held):
        made.hold("slow")
    assert await made.admit("slow", "t", OPEN) is None  # nobody else is there to be disturbed
    made.hold("quick")
    assert await made.admit("quick", "t", OPEN) is None
    assert await made.admit("slow", "t", OPEN) is None  # its other place: it has not been tried yet
    postponed = await made.admit("slow", "t", OPEN)
    assert isinstance(postponed, Postponed)
    assert postponed.why == "crowded"


@pytest.mark.parametrize("rules", [OPEN, OrderRules(concurrency=1)])
async def test_a_line_not_tried_lately_is_tried_at_once_and_then_judged_by_its_speed(rules: OrderRules) -> None:
    made, clock = gate(max_ack_pending=64, host_concurrency=32)
    for _ in range(2):
        for host, held in (("fails", 20), ("well", 40)):
            for _ in range(held):
                made.hold(host, 0, "t", rules)
        for _ in range(40):
            assert await made.admit("well", "t", rules) is None
            clock.advance(0.01)
            made.release("well", "t", rules, AttemptOutcome.DELIVERED)
            made.unhold("well", 0, "t", rules)
        assert await made.admit("fails", "u", OPEN) is None
        assert not made.crowds("fails", "u", OPEN)
        clock.advance(0.01)
        made.release("fails", "u", OPEN, AttemptOutcome.SERVER_ERROR)
        made.hold("well", 0, "t", rules)
        made.pressed = lambda: True
        assert made.crowds("fails", "u", OPEN)  # it ends calls as quickly, but its tasks stay
        for _ in range(20):
            made.unhold("fails", 0, "t", rules)
        made.unhold("well", 0, "t", rules)
        clock.advance(60)


async def test_a_line_whose_calls_hang_is_not_quick_when_they_time_out() -> None:
    made, clock = gate(max_ack_pending=64, host_concurrency=32, concurrency=100)
    made.hold("well")
    for _ in range(40):
        made.hold("hangs")
    calls = [await admitted(made, "hangs") for _ in range(5)]
    assert [task.done() and task.result() is None for task in calls] == [True] * 4 + [False]
    for _ in range(4):
        clock.advance(30)
        made.hold("well")
        made.release("hangs", "t", OPEN, AttemptOutcome.TIMEOUT)
        assert made.crowds("hangs", "t", OPEN)


async def test_memory_is_bounded_by_bytes_as_well() -> None:
    made, _ = gate(max_bytes=1_000)
    for _ in range(4):
        made.hold("hangs", 240)
    assert made.has_room
    made.hold("hangs", 240)
    assert not made.has_room
    assert await made.admit("hangs", "t", OPEN) is None
    made.hold("hangs", 300)  # out of the park: the feed has stopped
    postponed = await made.admit("hangs", "t", OPEN)
    assert isinstance(postponed, Postponed)
    assert postponed.why == "crowded"
    assert await made.admit("quick", "t", OPEN) is None
    made.unhold("hangs", 300)
    made.unhold("hangs", 240)
    assert made.has_room


async def test_hosts_that_hang_leave_places_for_those_that_have_few() -> None:
    made, _ = gate(concurrency=16, host_concurrency=8)
    for host in "ab":
        await answers(made, host)
    hanging = [await admitted(made, host) for host in "ab" for _ in range(8)]
    assert sum(task.done() for task in hanging) < 16
    assert (await admitted(made, "well")).done()
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)


async def test_a_host_has_few_places_until_it_has_answered_and_again_once_it_was_down() -> None:
    made, _ = gate(concurrency=100, host_concurrency=32, breaker_calls=2)
    calls = [await admitted(made, "a") for _ in range(20)]
    assert sum(task.done() for task in calls) == 4
    made.release("a", "", OrderRules(), AttemptOutcome.TIMEOUT)
    await turns()
    assert sum(task.done() for task in calls) == 5
    made.release("a", "", OrderRules(), AttemptOutcome.DELIVERED)
    await turns()
    assert all(task.done() for task in calls)
    made.close()


async def answers(made: Gate, host: str) -> None:
    """The host has answered once: before that it has few places."""
    assert await made.admit(host, "", OrderRules()) is None
    made.release(host, "", OrderRules(), AttemptOutcome.DELIVERED)


async def turns() -> None:
    """Let everything run that can run now."""
    for _ in range(6):
        await asyncio.sleep(0)


async def test_a_trigger_keeps_its_rate_and_its_concurrency() -> None:
    made, clock = gate(concurrency=100, host_concurrency=100)
    rules = OrderRules(rate=2.0)
    tasks = [await admitted(made, "a", rules) for _ in range(4)]
    for number in range(4):
        await turns()
        assert sum(task.done() for task in tasks) == number + 1  # one each half second, and no burst at the start
        clock.advance(0.5)
    busy = OrderRules(concurrency=1)
    assert await made.admit("b", "u", busy) is None
    second = asyncio.create_task(made.admit("b", "u", busy))
    await turns()
    assert not second.done()
    made.release("b", "u", busy, AttemptOutcome.DELIVERED)
    assert await second is None
    made.close()


async def test_a_process_has_its_part_of_a_trigger_s_rate() -> None:
    made, clock = gate(concurrency=100, host_concurrency=100)
    await answers(made, "a")
    made.share = lambda: 0.25
    tasks = [await admitted(made, "a", OrderRules(rate=100.0)) for _ in range(40)]
    for _ in range(100):
        await turns()
        clock.advance(0.01)
    assert 23 <= sum(task.done() for task in tasks) <= 27
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    made.close()


async def test_who_is_patient_for_so_long_only_is_sent_away() -> None:
    clock = SimulatedClock()
    made = Gate(DeliverSection(), clock, random.Random(1), patience=0.01)
    rules = OrderRules(rate=0.1)
    assert await made.admit("a", "t", rules) is None
    postponed = await made.admit("a", "t", rules)
    assert isinstance(postponed, Postponed)
    assert postponed.why == "trigger_limit"
    made.close()


async def test_documents_outside_a_host_that_is_down_are_called_one_at_a_time_until_it_is_up() -> None:
    made, clock = gate(breaker_calls=1, breaker_open=30)
    assert await made.admit("a", "t", OPEN) is None
    made.release("a", "t", OPEN, AttemptOutcome.TIMEOUT)
    called: list[int] = []
    for number in range(100):
        postponed = await made.admit("a", "t", OPEN)
        assert postponed is not None
        assert postponed.line is not None
        made.wait_outside(postponed.line, (0, str(number)), partial(called.append, number))
    for round_ in range(1, 4):
        await turns()
        clock.advance(31)
        await turns()
        assert called == list(range(round_))
        assert await made.admit("a", "t", OPEN) is None  # the probe
        made.release("a", "t", OPEN, AttemptOutcome.TIMEOUT if round_ < 3 else AttemptOutcome.DELIVERED)
    assert 3 < len(called) <= 40  # it is up: as many as it has room for
    for _ in range(200):
        await turns()
        clock.advance(1)
    assert called == list(range(100))
    made.close()


async def test_our_own_trouble_with_a_host_calls_in_one_document_at_a_time_and_blames_nobody() -> None:
    made, clock = gate(breaker_calls=1, breaker_open=30)
    assert await made.admit("a", "t", OPEN) is None
    assert not made.release("a", "t", OPEN, None, rest=8.0)
    called: list[int] = []
    for number in range(100):
        postponed = await made.admit("a", "t", OPEN)
        assert postponed is not None
        assert postponed.line is not None
        made.wait_outside(postponed.line, (0, str(number)), partial(called.append, number))
    for round_ in range(1, 4):
        for _ in range(3):  # not before its time, however often somebody looks
            await turns()
            clock.advance(2.5)
            await turns()
            assert len(called) == round_ - 1
        clock.advance(1)
        await turns()
        assert called == list(range(round_))
        assert await made.admit("a", "t", OPEN) is None  # the one that was called
        assert made.release("a", "t", OPEN, None, rest=8.0) is False
    clock.advance(9)
    await turns()
    assert await made.admit("a", "t", OPEN) is None
    made.release("a", "t", OPEN, AttemptOutcome.DELIVERED)
    assert 4 < len(called) <= 40
    made.close()


def test_a_host_that_rested_is_judged_by_what_it_says_afterwards() -> None:
    made = breaker(breaker_calls=4)
    made.rest(0.0, 5.0)
    assert made.ask(1.0) == 4.0
    assert made.ask(5.0) == 0.0
    assert not made.record(5.1, failed=True)  # one failure of four
    assert not made.is_open
    made = breaker(breaker_calls=1)
    assert made.record(0.0, failed=True)
    made.rest(1.0, 40.0)  # down, and not to be asked: it stays down
    assert made.ask(41.0) == 0.0
    made.record(41.0, failed=True)
    assert made.is_open


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 3.0, 25.0]), st.integers(0, 3), st.booleans())
def test_limits_hold_and_everybody_has_a_turn(seed: int, rate: float, concurrency: int, second_host: bool) -> None:
    """Random lanes come, call, leave and give up: no limit is ever passed, no place is lost, nobody waits for ever."""
    asyncio.run(_crowd(random.Random(seed), OrderRules(rate=rate, concurrency=concurrency), second_host))


class TickingClock(SimulatedClock):
    """Time passes while somebody looks: between two looks a moment may come."""

    def now(self) -> float:
        self._now += 2e-4
        return self._now

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds - 3e-4)  # as timers do that count in milliseconds


async def _crowd(rng: random.Random, rules: OrderRules, second_host: bool) -> None:
    clock = TickingClock()
    made = Gate(DeliverSection(concurrency=5, host_concurrency=3), clock, random.Random(1))
    starts: list[float] = []
    running: list[tuple[str, str, OrderRules]] = []
    most = 0

    async def lane(host: str, name: str, own: OrderRules) -> None:
        nonlocal most
        assert await made.admit(host, name, own) is None
        if own is rules:
            starts.append(clock.now())
            most = max(most, 1 + sum(entry[2] is rules for entry in running))
        running.append((host, name, own))
        assert len(running) <= made.running <= 5  # who was let in and has not noticed yet counts
        assert sum(entry[0] == host for entry in running) <= 3

    lanes = []
    for _ in range(60):
        ruled, host = rng.random() < 0.5, rng.choice("ab") if second_host else "a"
        lanes.append(asyncio.create_task(lane(host, "r" if ruled else "o", rules if ruled else OPEN)))
    given_up = 0
    for _ in range(3_000):
        await turns()
        if running and rng.random() < 0.7:
            made.release(*running.pop(rng.randrange(len(running))), AttemptOutcome.DELIVERED)
        waiting = [task for task in lanes if not task.done()]
        if not waiting and not running:
            break
        if waiting and given_up < 5 and rng.random() < 0.1:
            rng.choice(waiting).cancel()
            given_up += 1
        await turns()  # who was let in notices before time goes on
        due = [entry[0] - clock._now for entry in clock._sleepers]
        clock.advance(min(due) if due and rng.random() < 0.5 else rng.uniform(0, 0.1))
    stuck = [task for task in lanes if task.cancel()]
    results = await asyncio.gather(*lanes, return_exceptions=True)
    assert not stuck
    assert not [error for error in results if error and not isinstance(error, asyncio.CancelledError)]
    assert made.running == 0
    assert not rules.concurrency or most <= rules.concurrency
    if rules.rate:
        for index, start in enumerate(starts):
            assert sum(start <= other < start + 0.98 for other in starts[index:]) <= max(1.2 * rules.rate, 1) + 1e-9
    made.close()


@settings(deadline=None)  # the machine may be busy
@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 2**32))
def test_partitions_are_shared_evenly_without_needless_moves(partitions: int, members: int, seed: int) -> None:
    rng, names = random.Random(seed), [f"m{number}" for number in range(members)]
    owners: dict[int, str] = {}
    moves = 0
    for _ in range(200):
        me = rng.choice(names)
        take, surplus = OwnershipView(set(names), dict(owners)).plan(me, partitions)
        for slot in surplus:
            del owners[slot]
            moves += 1
        owners |= dict.fromkeys(take, me)
    load = [list(owners.values()).count(name) for name in names]
    assert max(load) <= -(-partitions // members)
    assert moves == 0


def test_a_member_that_joins_gets_its_share_and_no_more_is_moved() -> None:
    owners = dict.fromkeys(range(8), "a")
    view = OwnershipView({"a", "b"}, owners)
    assert view.plan("a", 8) == ([], [4, 5, 6, 7])
    assert view.plan("b", 8) == ([], [])
    assert view.plan("a", 8, leaving=[4, 5, 6, 7]) == ([], [])  # it has been told to give them up already
    for number in (4, 5, 6, 7):
        del owners[number]
    assert view.plan("a", 8) == ([], [])
    assert view.plan("b", 8) == ([4, 5, 6, 7], [])
    assert OwnershipView({"a", "b"}, {0: "a"}).plan("a", 1) == ([], [])
    assert OwnershipView({"a", "b"}, {0: "a"}).plan("b", 1) == ([], [])
    assert OwnershipView({"b"}, {}).plan("b", 1) == ([0], [])


@given(
    rate=st.sampled_from([1.0, 3.0, 20.0, 100.0]),
    share=st.sampled_from([1.0, 0.5, 0.25]),
    steps=st.lists(st.tuples(st.floats(0.0, 0.3), st.floats(0.0, 0.05)), min_size=1, max_size=400),
)
def test_no_second_of_an_endpoint_sees_more_than_a_tenth_above_the_rate_however_requests_bunch_up(
    rate: float, share: float, steps: list[tuple[float, float]]
) -> None:
    line, rules, now, arrived = TriggerLine(), OrderRules(rate=rate), 100.0, list[float]()
    for step, way in steps:
        now += step
        wait = line.hurry(now, rules, share)
        if wait:
            assert wait <= 1.05 + 1e-9
            now += wait + 1e-9
            assert not line.hurry(now, rules, share)  # who has waited goes
        arrived.append(now + way)
    arrived.sort()
    most = max(1, math.ceil(rate * share * 1.1))
    for first, last in zip(arrived, arrived[most:], strict=False):
        assert last - first >= 1.0 - 1e-6
