"""Checks during a torture run: compares the server's state with the ledger of effects.

The invariant: a sequence leaves the stream, and a position passes it, only after its own effect or letter. The server
is asked first and the ledger read afterwards, so that an effect in between neither excuses nor accuses.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import Any, Final

from parti.dead_letters import DeadLetter, DeadLetterReader, dead_letter_stream
from parti.errors import PartiError
from parti.manager.kv_store import Store
from parti.wire.api import JetStreamApi
from parti_lab.prove.torture_fleet import NAMESPACE
from parti_lab.prove.torture_judge import TortureLedger
from parti_lab.prove.torture_scenario import TortureScenario
from parti_lab.prove.torture_traffic import STREAM

_EVERY: Final = 0.7
_PROBE: Final = 0.25
_SPIN: Final = 0.004  # CPU-seconds of one probe
_EXAMPLES: Final = 12


class WatchedLetters:
    """Reads the dead-letter stream, from the last read position on."""

    def __init__(self, js: JetStreamApi, ledgers: list[TortureLedger]) -> None:
        self._letters = DeadLetterReader(js, STREAM)
        self._ledgers = ledgers
        self._next = 1
        self._known_ledgers = len(ledgers)
        self.odd = 0

    async def read(self) -> None:
        if (
            len(self._ledgers) > self._known_ledgers
        ):  # a second fleet may have written letters before its ledger existed
            self._known_ledgers, self._next = len(self._ledgers), 1
        async for letter in self._letters.walk(start=self._next):
            self._next = letter.sequence + 1
            self._take(letter)

    def _take(self, letter: DeadLetter) -> None:
        try:
            unit, counter, _ = json.loads(letter.data)
        except ValueError:
            self.odd += 1
            return
        for ledger in self._ledgers:
            ledger.letter(f"{unit}#{counter}", letter.reason)
            if letter.original_sequence:
                ledger.lettered(letter.original_sequence)

    @property
    def stream(self) -> str:
        return dead_letter_stream(STREAM)


class TortureWatch:
    """Checks periodically; `violations` counts sequences that left or were passed without an effect or letter."""

    def __init__(
        self, js: JetStreamApi, scenario: TortureScenario, ledger: TortureLedger, letters: WatchedLetters
    ) -> None:
        self._js = js
        self._scenario = scenario
        self._ledger = ledger
        self._letters = letters
        self._known: set[tuple[int, str]] = set()
        self._counts: dict[str, int] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.examples: list[str] = []
        self.looks = 0
        self.positions = True
        """Off once the stream was recreated: after that, positions are judged only by lost messages."""
        self.starvation: list[tuple[float, float]] = []

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._run()), loop.create_task(self._probe())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def violations(self) -> int:
        return sum(self._counts.values())

    @property
    def counts(self) -> dict[str, int]:
        return dict(self._counts)

    def starved(self, since: float) -> float:
        """How many times longer than on an idle machine work took since then; at least 1."""
        found = [ratio for at, ratio in self.starvation if at >= since]
        return max(1.0, sum(found) / len(found)) if found else 1.0

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_EVERY)
            with contextlib.suppress(PartiError, TimeoutError):  # the server may be down on purpose
                await self.look()

    async def _probe(self) -> None:
        """Measure wall time over CPU time of a little work (what other processes take from us), and our own stalls."""
        while True:
            asleep = time.monotonic()
            await asyncio.sleep(_PROBE)
            self._stood_still(asleep + _PROBE, time.monotonic())
            wall, cpu = time.perf_counter(), time.thread_time()
            while time.thread_time() - cpu < _SPIN:
                pass
            self.starvation.append((time.monotonic(), (time.perf_counter() - wall) / _SPIN))

    def _stood_still(self, start: float, end: float) -> None:
        """Record a stall. The sink is in this process: handlers that wait for it time out and are retried."""
        limit = self._scenario.timeout
        if limit and end - start > limit / 2:
            self._ledger.disturb("the sink stood still", start - limit, "", explains=True).end = end + limit

    async def look(self) -> None:
        """Check everything once."""
        generation = self._ledger.generation
        if self._scenario.retention != "limits":
            gone = await self._gone()
            missing = [s for s in gone if s not in self._ledger.done]
            if missing:
                await self._letters.read()
                if generation == self._ledger.generation:
                    for sequence in missing:
                        if sequence not in self._ledger.done:
                            self._violated(sequence, "left the stream")
        if self.positions:
            await self._look_at_positions()
        self.looks += 1

    async def consumers(self) -> list[str]:
        """A short description of every consumer, for a report."""
        return [
            f"{i['name']} floor={i['ack_floor']['stream_seq']} ack_pending={i['num_ack_pending']} "
            f"pending={i['num_pending']} filters={len(i['config'].get('filter_subjects') or [1])} "
            f"waiting={i.get('num_waiting')}"
            for i in await self._js.consumer_list(STREAM)
        ]

    async def present(self) -> set[int]:
        """The sequences in the stream now."""
        state = await self._state()
        gone = set(state.get("deleted") or ())
        return {s for s in range(int(state["first_seq"]), int(state["last_seq"]) + 1) if s not in gone}

    async def _gone(self) -> list[int]:
        state = await self._state()
        return [*range(1, int(state["first_seq"])), *(s for s in state.get("deleted") or () if s)]

    async def _state(self) -> dict[str, Any]:
        answer = await self._js.request(f"STREAM.INFO.{STREAM}", {"deleted_details": True})
        return dict(answer["state"])

    async def _look_at_positions(self) -> None:
        store = await Store.open(self._js, NAMESPACE, replicas=self._scenario.replicas)
        found: list[tuple[str, str, int]] = []
        for partition, (claim, _) in (await store.claims()).items():
            found.append((f"the claim of {partition} (epoch {claim.epoch})", partition, claim.cursor))
        for worker in await store.leases():
            checkpoint, _ = await store.checkpoint(worker)
            for name, (epoch, cursor) in (checkpoint.positions if checkpoint is not None else {}).items():
                found.append((f"the position {name}@{epoch} of {worker}", name, cursor))
        if self._scenario.layout == "per-partition":
            for info in await self._js.consumer_list(STREAM):
                filters = info["config"].get("filter_subjects") or [info["config"].get("filter_subject") or ""]
                tokens = filters[0].split(".")
                ours = str(info["name"]).startswith(f"parti-{NAMESPACE}-slot-")  # not those of another namespace
                if ours and len(filters) == 1 and len(tokens) >= 2:
                    floor = int(info["ack_floor"]["stream_seq"])
                    found.append((f"the ack floor of {info['name']}", tokens[1], floor))
        await self._letters.read()
        for what, where, cursor in found:
            lowest = self._ledger.lowest_open(where)
            if lowest is not None and lowest[0] <= cursor and self.positions:
                self._violated(lowest[0], f"was passed by {what} = {cursor}")

    def _violated(self, sequence: int, what: str) -> None:
        word = what.split()[0]
        if (sequence, word) in self._known:
            return
        self._known.add((sequence, word))
        self._counts[word] = self._counts.get(word, 0) + 1
        if len(self.examples) < _EXAMPLES:
            generation = self._ledger.generation
            found = (p for p in self._ledger.posted.values() if (p.generation, p.sequence) == (generation, sequence))
            posted = next(found, None)
            name = f"{posted}" if posted is not None else f"seq {sequence}"
            self.examples.append(f"at {time.monotonic():.2f} {name} {what} without effect or letter")
