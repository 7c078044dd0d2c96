"""The faults, chosen by the seed: crashes, freezes, leaves, restarts, joins, bad networks, removed records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from parti.model import Retention
from parti.testing.sim.cluster import Cluster
from parti.testing.sim.process import TERMS, Process
from parti.testing.sim.world import SimLinks

CALM = SimLinks()
WEATHER = (
    SimLinks(lose=0.03),
    SimLinks(lose=0.01, straggle=0.05),
    SimLinks(duplicate=0.1, reorder=0.1),
    SimLinks(lose=0.02, duplicate=0.05, reorder=0.05, straggle=0.03),
    SimLinks(straggle=0.2),
)


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """The number of faults and their duration."""

    publish_from: float = 0.5
    faults_until: float = 5.0
    messages: int = 160
    events: int = 5
    crashes: bool = True
    """False plans only joins, leaves and restarts, which must not repeat anything."""
    weather: bool = True
    """False keeps the network reliable."""
    tampering: bool = True
    """Records of the bucket are deleted, purged and damaged."""


class SimFaults:
    """Schedules the faults of one run."""

    def __init__(self, cluster: Cluster, plan: FaultPlan) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._plan = plan
        rng = cluster.world.rng
        self.quiet_from = plan.faults_until
        gap = (plan.faults_until - plan.publish_from) / plan.messages
        for i in range(plan.messages):
            self._world.at(plan.publish_from + i * gap, None, cluster.publish)
        harsh: tuple[Callable[[], None], ...] = (
            self._crash,
            self._crash_leader,
            self._freeze,
            self._freeze,
            self._isolate,
            self._cut_off,
        )
        mild: tuple[Callable[[], None], ...] = (self._leave, self._rest, self._join)
        stormy: tuple[Callable[[], None], ...] = (self._weather, self._weather, self._reelect)
        tampering: tuple[Callable[[], None], ...] = (self._tamper, self._tamper, self._tamper_leader, self._meddle)
        if plan.crashes:
            tampering += (self._tamper_behind,)
        choices = (
            mild
            + (harsh if plan.crashes else ())
            + (stormy if plan.weather else ())
            + (tampering if plan.tampering else ())
        )
        for _ in range(plan.events):
            self._world.at(rng.uniform(0.8, plan.faults_until), None, choices[rng.randrange(0, len(choices))])
        self._world.at(plan.faults_until, None, self._end)

    def _victim(self) -> Process | None:
        living = [p for p in self._cluster.living() if p.member is not None and p.thaw_at <= self._world.now]
        if len(living) < 2:
            return None
        return living[self._world.rng.randrange(0, len(living))]

    def _restart_later(self) -> None:
        self._world.after(self._world.rng.uniform(0.05, 2.0), None, self._start)

    def _start(self) -> None:
        self._cluster.start()

    def _ambush(self, strike: Callable[[Process], None]) -> None:
        """Inject the fault now, or when the victim is in the middle of an operation."""
        victim = self._victim()
        if victim is None:
            return
        point = self._world.rng.choice(("", "handler", "handler", "waking", "claim", "reset"))
        if point:
            victim.ambush = (point, strike)
        else:
            strike(victim)

    def _crash(self) -> None:
        self._ambush(self._kill)

    def _crash_leader(self) -> None:
        for process in self._cluster.living():
            if process.leader is not None:
                self._kill(process)
                return

    def _kill(self, victim: Process) -> None:
        if not victim.dead and victim.member is not None and len(self._cluster.living()) > 1:
            self._cluster.crash(victim)
            self._restart_later()

    def _freeze(self) -> None:
        self._ambush(self._sigstop)

    def _sigstop(self, victim: Process) -> None:
        """SIGSTOP: nothing runs, but the clock continues."""
        if not victim.dead:
            seconds = self._world.rng.choice((0.3, 1.1, 1.6, 2.4, 3 * TERMS.ttl))
            victim.thaw_at = self._world.now + seconds
            self._world.log(victim.name, f"FROZEN for {seconds:.1f} s")

    def _isolate(self) -> None:
        """One process is cut off from everything: it may continue only until its lease ends by its own clock."""
        victim = self._victim()
        if victim is not None:
            seconds = self._world.rng.uniform(0.2, 2.5)
            victim.cut_until = self._world.now + seconds
            self._world.log(victim.name, f"CUT OFF for {seconds:.1f} s")

    def _cut_off(self) -> None:
        """The network loses almost every message for a while."""
        self._world.log("network", "is cut")
        self._world.network = SimLinks(lose=0.9)
        longest = self._world.rng.choice((1.0, 2 * TERMS.ttl))  # shorter than a lease, or long enough to end them all
        self._world.after(self._world.rng.uniform(0.1, longest), None, self._calm)

    def _leave(self) -> None:
        victim = self._victim()
        if victim is not None:
            victim.leave()
            self._restart_later()

    def _rest(self) -> None:
        victim = self._victim()
        if victim is not None:
            victim.stop(returning=True)
            self._world.after(self._world.rng.uniform(0.05, 0.6), None, self._start)

    def _join(self) -> None:
        if len(self._cluster.living()) < self._cluster.pool.last:
            self._start()

    def _tamper(self) -> None:
        """An operator changes the bucket: one record, or all of a kind."""
        rng = self._world.rng
        kind = rng.choice(("claim", "claim", "lease", "assignment", "checkpoint", "leader"))
        keys = [key for key in self._cluster.kv.present() if key[0] == kind]
        if not keys:
            return
        how = rng.choice(("delete", "purge", "damage"))
        for key in keys if rng.random() < 0.3 else [keys[rng.randrange(0, len(keys))]]:
            self._cluster.tamper(key, how)

    def _tamper_leader(self) -> None:
        """The next leader finds claims missing."""
        self._tamper()
        self._world.after(self._world.rng.uniform(0.0, 0.3), None, self._tamper)
        if self._plan.crashes:
            self._crash_leader()

    def _tamper_behind(self) -> None:
        """The claims of an owner that is cut off but still works are removed."""
        victim = self._victim()
        if victim is not None and victim.member is not None:
            victim.cut_until = self._world.now + self._world.rng.uniform(0.3, 0.9)
            self._world.log(victim.name, "CUT OFF")
            owned = {key: entry[0] for key, entry in self._cluster.kv.list("claim").items() if entry[0] is not None}
            for name, claim in owned.items():
                if claim.owner == victim.member:
                    self._cluster.tamper(("claim", name), self._world.rng.choice(("delete", "purge", "damage")))

    def _meddle(self) -> None:
        """A durable is deleted, or its filters are edited. On an interest stream that alone would lose messages."""
        stream, rng = self._cluster.stream, self._world.rng
        found = [consumer for _, consumer in sorted(stream.consumers.items()) if consumer.filters]
        if not found or stream.retention is Retention.INTEREST:
            return
        consumer = found[rng.randrange(0, len(found))]
        if rng.random() < 0.5:
            self._world.log("meddling", f"deletes {consumer.name}")
            stream.delete_consumer(consumer)
        else:
            self._world.log("meddling", f"edits {consumer.name}")
            filters = sorted(consumer.config["filter_subjects"])
            filters[rng.randrange(0, len(filters))] = "s.meddled._none_"
            stream.update(consumer, {**consumer.config, "filter_subjects": filters})

    def _reelect(self) -> None:
        """A consumer gets another leader: clients waiting for its messages are notified, and must pull again."""
        stream = self._cluster.stream
        found = [consumer for _, consumer in sorted(stream.consumers.items()) if consumer.pulls]
        if found:
            consumer = found[self._world.rng.randrange(0, len(found))]
            self._world.log("network", f"has another leader for {consumer.name}")
            stream.end_pulls(consumer, b"409 Leadership Change")

    def _weather(self) -> None:
        weather = WEATHER[self._world.rng.randrange(0, len(WEATHER))]
        self._world.log("network", f"turns bad: lose {weather.lose} dup {weather.duplicate} slow {weather.straggle}")
        self._world.network = weather
        self._world.after(self._world.rng.uniform(0.3, 1.5), None, self._calm)

    def _end(self) -> None:
        self._calm()
        for process in self._cluster.living():
            process.ambush = None

    def _calm(self) -> None:
        self._world.network = CALM
