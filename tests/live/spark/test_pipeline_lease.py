"""The lease of a pipeline and the fence of its publishes, on a real server and without Spark."""

from __future__ import annotations

import contextlib
import json
import threading

import pytest

from parti.errors import ConfigError, PartiError
from parti.spark.pipeline.driver.lease import DriverLease, DriverLeaseLost, Standby
from parti.spark.pipeline.executor.publishing import ResultSink, TaskSinks, _Line
from parti.testing import NatsServer, eventually_blocking
from parti.wire.blocking import BlockingConnection
from parti.wire.epoch_marker import StaleEpoch, marker_subject, raise_marker_blocking
from parti.wire.errors import WrongLastSequence
from parti.wire.options import ConnectOptions
from parti_lab.bench.load import create_stream

PATIENT = Standby(ttl=60.0, renew_every=2.0, margin=0.5)  # longer than a loaded machine starves a process
QUICK = Standby(ttl=1.0, renew_every=0.3, margin=0.1)


def lease(
    options: ConnectOptions, name: str, owner: str, standby: Standby = PATIENT
) -> tuple[DriverLease, threading.Event]:
    lost = threading.Event()
    return DriverLease(options, name, standby, owner=owner, on_lost=lost.set), lost


def test_one_driver_holds_the_lease_and_the_other_gets_it_when_it_is_given_back(
    options: ConnectOptions, name: str
) -> None:
    first, _ = lease(options, name, "a")
    second, _ = lease(options, name, "b")
    with first:
        assert first.acquire(60) == 1
        first.check()
        with second:
            assert second.acquire(1.5) is None
            with pytest.raises(DriverLeaseLost, match="b no longer holds"):
                second.check()
            first.__exit__(None, None, None)
            assert second.acquire(60) == 2
            second.check()
            assert not first.held


def test_of_drivers_that_start_at_once_one_runs_and_the_others_wait(options: ConnectOptions, name: str) -> None:
    """Whoever lost the race for the record ended with an error: it was refused, and a refusal is for a person."""
    drivers = [lease(options, name, f"driver-{number}")[0] for number in range(4)]
    with contextlib.ExitStack() as stack:
        for driver in drivers:
            stack.enter_context(driver)
        eventually_blocking(lambda: any(driver.held for driver in drivers), 60, "a driver that runs")
        for epoch in (1, 2, 3, 4):
            (running,) = (driver for driver in drivers if driver.held)
            assert running.acquire(60) == epoch
            drivers.remove(running)
            running.__exit__(None, None, None)
            for driver in drivers:  # a failure would be raised here
                with contextlib.suppress(DriverLeaseLost):
                    driver.check()
            if drivers:
                eventually_blocking(lambda: any(driver.held for driver in drivers), 60, "the next driver")


def test_a_driver_that_is_stopped_before_its_lease_has_begun_leaves_nobody_who_holds_it(
    options: ConnectOptions, name: str
) -> None:
    """Its thread went on alone: it won the lease and renewed it for as long as the process lived."""
    for number in range(10):
        stopped, _ = lease(options, name, f"a{number}")
        with stopped:
            pass
        assert stopped._thread is not None
        assert not stopped._thread.is_alive()
    last, _ = lease(options, name, "b")
    with last:
        assert last.acquire(30) is not None


def test_a_driver_whose_server_is_gone_stops_by_its_own_clock(own_server: NatsServer, name: str) -> None:
    options = ConnectOptions(servers=(own_server.url,))
    held, lost = lease(options, name, "a", QUICK)
    with held:
        assert held.acquire(60) is not None
        own_server.kill()
        assert lost.wait(60)
        assert not held.held


def test_the_epoch_grows_with_every_owner_also_after_all_were_gone(options: ConnectOptions, name: str) -> None:
    for epoch in (1, 2, 3):
        held, _ = lease(options, name, f"driver-{epoch}")
        with held:
            assert held.acquire(60) == epoch


def test_a_stale_owner_cannot_publish_once_the_next_has_set_its_marker(
    options: ConnectOptions, connection: BlockingConnection, name: str
) -> None:
    create_stream(options, name, "file", allow_atomic=True)
    subject = marker_subject(name, (f"{name}.>",), "orders")
    first = raise_marker_blocking(options, name, subject, epoch=1, owner="a")

    def publish(marker: tuple[str, int], count: int, tag: str) -> None:
        line = _Line(options, name, marker, "test")
        for number in range(count):
            line.put(f"{name}.k", b"x", f"{tag}-{number}", None)
        try:
            line.flush()
        finally:
            line.close()

    publish(first, 5, "one")
    second = raise_marker_blocking(options, name, subject, epoch=2, owner="b")
    for count in (1, 5):
        with pytest.raises(WrongLastSequence):
            publish(first, count, f"stale-{count}")
    publish(second, 5, "two")
    publish(second, 5, "one")  # what the first has stored is known by its ids
    state = connection.api(f"STREAM.INFO.{name}")["state"]
    assert state["messages"] == 12


def test_a_marker_of_a_later_epoch_stands(options: ConnectOptions, connection: BlockingConnection, name: str) -> None:
    create_stream(options, name, "file")
    subject = marker_subject(name, (f"{name}.>",), "orders")
    later = raise_marker_blocking(options, name, subject, epoch=7, owner="b")
    assert raise_marker_blocking(options, name, subject, epoch=7, owner="b") == later
    for owner, epoch in (("a", 6), ("c", 7)):
        with pytest.raises(StaleEpoch, match="b has set epoch 7"):
            raise_marker_blocking(options, name, subject, epoch=epoch, owner=owner)
    answer = connection.api(f"STREAM.MSG.GET.{name}", {"last_by_subj": subject})
    assert (subject, answer["message"]["seq"]) == later


def test_a_stream_without_room_for_a_marker_is_refused_with_advice() -> None:
    assert marker_subject("S", ("a", "b.c.>"), "p") == "b.c.parti-fence.p"
    with pytest.raises(ConfigError, match="no subject that ends in '>'"):
        marker_subject("S", ("a", "b.*"), "p")


def test_a_sink_that_refuses_ends_the_task_and_nothing_waits_for_it(options: ConnectOptions, name: str) -> None:
    create_stream(options, name, "file")
    sink = ResultSink(options, name, f"{name}.x", fence=(f"{name}.fence", 99))
    with TaskSinks(sink, None, pipeline="p", stream="S") as sinks:
        line = sinks._lines["results"]

        def put_many() -> None:
            for number in range(50_000):
                line.put(f"{name}.x", b"x", str(number), None)

        with pytest.raises(WrongLastSequence):
            put_many()
        eventually_blocking(lambda: line._error is not None, 60, "the thread has told its error")


def test_a_record_that_is_not_ours_is_told(options: ConnectOptions, name: str, connection: BlockingConnection) -> None:
    held, _ = lease(options, name, "a", Standby(bucket=f"{name}-bucket"))
    with held:
        assert held.acquire(60) == 1
    connection.request(f"$KV.{name}-bucket.{name}.leader", json.dumps({"who": "me"}).encode())
    other, lost = lease(options, name, "b", Standby(bucket=f"{name}-bucket"))
    with other:
        assert lost.wait(60)
        with pytest.raises(Exception, match="is not ours"):
            other.acquire(5)


def test_a_permission_that_lacks_ends_the_lease_with_its_name_instead_of_a_wait_without_end(name: str) -> None:
    users = """
    authorization { users = [
      { user: all, password: all }
      { user: some, password: some, permissions: { publish: { deny: "$KV.>" } } }
    ] }
    """
    with NatsServer(config=users) as server:
        everything = ConnectOptions(servers=(server.url,), user="all", password="all")
        first, _ = lease(everything, name, "a", QUICK)
        with first:
            assert first.acquire(60) is not None
        second, _ = lease(ConnectOptions(servers=(server.url,), user="some", password="some"), name, "b", QUICK)
        with second, pytest.raises(PartiError, match=r"\$KV"):
            second.acquire(60)
