"""Generated cases of `parti prove spark`: drawn, played, judged against the plain reader.

Half of the possible errors are in the readers, so most cases call the readers directly, hundreds of times; some
cases run on a real Spark with real kills.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from parti.errors import PartiError
from parti.observe.logs import get_logger
from parti.testing import NatsCluster, NatsServer, insist_blocking
from parti.wire.blocking import BlockingConnection
from parti.wire.options import ConnectOptions
from parti_lab.bench.report import RunContext
from parti_lab.prove.spark_case import WRONG, Case, draw
from parti_lab.prove.spark_play import Play, PlayOutcome
from parti_lab.prove.spark_stage import CaseDriver, SparkServers, SparkStage
from parti_lab.prove.spark_verdict import CaseVerdict, judge
from parti_lab.prove.spark_world import SparkWorld

log = get_logger("prove.spark")


class OneServer:
    """A single server, without another leader to step down for."""

    def __init__(self, server: NatsServer) -> None:
        self._server = server

    def restart(self, stream: str) -> None:  # noqa: ARG002 - the protocol's signature
        self._server.kill()
        self._server.start()

    def step_down(self, stream: str) -> None:
        self.restart(stream)


class ThreeServers:
    """A cluster: any one node is killed and restarted, or a leader steps down."""

    def __init__(self, cluster: NatsCluster, seed: int) -> None:
        self._cluster = cluster
        self._rng = random.Random(seed)

    def restart(self, stream: str) -> None:
        self._cluster.wait_for_leader(stream)
        node = self._rng.randrange(len(self._cluster.urls))
        self._cluster.kill(node)
        # A mirror of a stream with gaps may stay without a leader (see `spark_case`): only this stream needs one.
        self._cluster.restart(node, wait=False)
        self._cluster.wait_for_leader(stream)

    def step_down(self, stream: str) -> None:
        with BlockingConnection.open(ConnectOptions(servers=tuple(self._cluster.urls))) as connection:
            insist_blocking(lambda: connection.api(f"STREAM.LEADER.STEPDOWN.{stream}"))


def run_cases(
    ctx: RunContext, *, cases: int, first: int = 0, replicas: int = 1, driver: CaseDriver | None = None
) -> Counter[str]:
    """Play the cases; the figures count cases by their findings. With a `driver`, on a real Spark."""
    figures: Counter[str] = Counter(dict.fromkeys((f"cases_{kind}" for kind in WRONG), 0))
    where = "on Spark" if driver is not None else "played"
    with _servers(replicas, ctx.seed) as (urls, servers), ctx.progress(f"cases {where}", total=cases) as advance:
        for number in range(first, first + cases):
            case = draw(ctx.seed, number, replicas=replicas)
            verdict, outcome, faults = _one(case, urls, ctx.seed, servers, driver)
            figures += Counter(
                cases=1,
                spark_cases=driver is not None,
                rows=len(outcome.rows),
                losses_told=bool(outcome.failures or outcome.said),
            )
            figures["faults"] += faults
            for kind in verdict.wrong:
                figures[f"cases_{kind}"] += 1
            if verdict.wrong:
                log.error("prove.spark_case", seed=ctx.seed, case=str(case), **verdict.examples)
            advance(1)
    return figures


def _one(
    case: Case, urls: tuple[str, ...], seed: int, servers: SparkServers, driver: CaseDriver | None
) -> tuple[CaseVerdict, PlayOutcome, int]:
    world = SparkWorld(urls, case, seed)
    verdict, outcome = CaseVerdict(), PlayOutcome()
    play: Play | SparkStage | None = None
    try:
        world.build()
        url = ",".join(urls)
        play = Play(case, world, url, seed) if driver is None else SparkStage(case, world, url, seed, driver, servers)
        outcome = play.run()
        filters = world.filters if case.reader.filtered else ()
        verdict = judge(outcome, world, filters)
    except PartiError as error:
        verdict.note("raised", "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]))
    finally:
        world.close()
    return verdict, outcome, play.faults if isinstance(play, SparkStage) else 0


@contextlib.contextmanager
def _servers(replicas: int, seed: int) -> Iterator[tuple[tuple[str, ...], SparkServers]]:
    if replicas == 1:
        with NatsServer() as server:
            yield (server.url,), OneServer(server)
    else:
        with NatsServer.cluster(replicas) as cluster:
            yield tuple(cluster.urls), ThreeServers(cluster, seed)


@contextlib.contextmanager
def case_driver(folder: Path) -> Iterator[CaseDriver]:
    """The Spark driver of the cases; it ends with the context."""
    driver = CaseDriver(folder)
    try:
        yield driver
    finally:
        driver.close()
