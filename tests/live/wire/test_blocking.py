"""The blocking connection: every way to authenticate, errors that say what is wrong, and calls that always end."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import nkeys
import pytest

from parti.errors import (
    AuthFailed,
    ConnectionFailed,
    NoResponders,
    PartiError,
    ProtocolError,
    RequestTimeout,
    TlsFailed,
)
from parti.testing import FaultProxy, NatsServer
from parti.wire.blocking import BlockingConnection
from parti.wire.options import ConnectOptions
from parti.wire.ranges import RangeReader
from support.certificates import Certificates
from support.jwt_auth import Key, Operator
from support.stored_input import Message, create, numbered, publish, rows, varied

SECRET = "s3cret-w0rd"
WRONG = "wr0ng-w0rd"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    made = Certificates(tmp_path_factory.mktemp("authority"))
    made.make()
    return made


def works(options: ConnectOptions) -> None:
    """Connecting, the JetStream API and a range read work with these options."""
    reader = RangeReader(options)
    with BlockingConnection.open(options) as connection:
        stream = f"S{connection.inbox[-8:]}"
        create(connection, stream)
        sent = publish(connection, stream, varied(stream, 2000, size=100))
    for path in ("consumer", "direct"):
        assert rows(reader.read(stream, 0, 2000, path=path)) == numbered(sent)
    reader.close()


def refused(options: ConnectOptions, kind: type[PartiError], *secrets: str) -> str:
    """Connecting fails with exactly this error, and neither it nor its causes hold a secret; returns its text."""
    with pytest.raises(kind) as raised:
        BlockingConnection.open(options)
    error: BaseException | None = raised.value
    while error is not None:
        for secret in secrets:
            assert secret not in f"{error} {error!r}"
        error = error.__cause__ or error.__context__
    return str(raised.value)


def test_a_password_gets_in_and_a_wrong_one_does_not() -> None:
    with NatsServer(config=f'authorization {{ user: bob, password: "{SECRET}" }}') as server:
        works(ConnectOptions(servers=(server.url,), user="bob", password=SECRET))
        works(ConnectOptions(servers=(server.client_url(user="bob", password=SECRET),)))
        refused(ConnectOptions(servers=(server.url,), user="bob", password=WRONG), AuthFailed, WRONG)
        refused(ConnectOptions(servers=(server.url,)), AuthFailed)


def test_a_token_gets_in_and_a_wrong_one_does_not() -> None:
    with NatsServer(config=f'authorization {{ token: "{SECRET}" }}') as server:
        works(ConnectOptions(servers=(server.url,), token=SECRET))
        refused(ConnectOptions(servers=(server.url,), token=WRONG), AuthFailed, WRONG)


def test_an_nkey_gets_in_and_another_does_not(tmp_path: Path) -> None:
    key, other = Key.new(nkeys.PREFIX_BYTE_USER), Key.new(nkeys.PREFIX_BYTE_USER)
    file = tmp_path / "user.nk"
    file.write_text(key.seed)
    with NatsServer(config=f"authorization {{ users: [ {{ nkey: {key.public} }} ] }}") as server:
        works(ConnectOptions(servers=(server.url,), nkey_file=str(file)))
        refused(ConnectOptions(servers=(server.url,), nkey_seed=other.seed), AuthFailed, other.seed)


def test_credentials_get_in_and_forged_or_expired_ones_do_not(tmp_path: Path) -> None:
    operator = Operator()
    file = tmp_path / "user.creds"
    file.write_text(operator.credentials())
    with NatsServer(config=operator.server_config()) as server:
        works(ConnectOptions(servers=(server.url,), creds_file=str(file)))
        works(ConnectOptions(servers=(server.url,), creds_file=str(file)).self_contained())
        for creds in (
            operator.credentials(signer=Key.new(nkeys.PREFIX_BYTE_ACCOUNT)),
            operator.credentials(expires=1_700_000_001),
        ):
            seed = creds.split("SEED-----\n")[1].split("\n")[0]
            refused(ConnectOptions(servers=(server.url,), creds=creds), AuthFailed, seed)


def test_tls_works_with_the_right_authority_only(authority: Certificates) -> None:
    with NatsServer(tls=authority.server()) as server:
        options = ConnectOptions(servers=(server.url,), tls_ca=authority.path("ca.crt"))
        works(options)
        works(replace(options, servers=(server.url.replace("tls://", "nats://"),)))
        works(replace(options, tls_hostname="nats.test"))
        refused(replace(options, tls_ca=None), TlsFailed)
        refused(replace(options, tls_ca=authority.path("stranger.crt")), TlsFailed)
        assert "other.test" in refused(replace(options, tls_hostname="other.test"), TlsFailed)


def test_mutual_tls_works_with_a_trusted_client_certificate_only(authority: Certificates) -> None:
    with NatsServer(tls=authority.server(mutual=True)) as server:
        nobody = ConnectOptions(servers=(server.url,), tls_ca=authority.path("ca.crt"))
        works(replace(nobody, tls_cert=authority.path("client.crt"), tls_key=authority.path("client.key")))
        refused(nobody, TlsFailed)
        stranger = replace(nobody, tls_cert=authority.path("stranger.crt"), tls_key=authority.path("stranger.key"))
        refused(stranger, TlsFailed)


def test_the_tls_handshake_can_come_first(authority: Certificates) -> None:
    files = authority.server()
    config = f'tls {{ cert_file: "{files.cert}", key_file: "{files.key}", handshake_first: true }}'
    with NatsServer(tls=files, config=config) as server:
        works(ConnectOptions(servers=(server.url,), tls_ca=authority.path("ca.crt"), tls_first=True))


def test_no_password_is_sent_to_a_server_without_tls_where_tls_was_asked_for(server: NatsServer) -> None:
    address = server.url.replace("nats://", "tls://")
    text = refused(ConnectOptions(servers=(address,), user="bob", password=SECRET), TlsFailed, SECRET)
    assert "offers no TLS" in text


def test_a_refusal_of_one_server_is_told_although_others_are_down() -> None:
    with socket.socket() as dead, NatsServer(config=f'authorization {{ token: "{SECRET}" }}') as server:
        dead.bind(("127.0.0.1", 0))
        addresses = (f"127.0.0.1:{dead.getsockname()[1]}", server.url)
        for _ in range(8):  # they are tried in random order
            refused(ConnectOptions(servers=addresses, token=WRONG), AuthFailed, WRONG)
        works(ConnectOptions(servers=addresses, token=SECRET))


def test_a_missing_permission_is_told_with_the_subject() -> None:
    config = 'authorization { users: [{ user: bob, password: pw, permissions: { publish: "allowed" } }] }'
    with NatsServer(config=config) as server:
        connection = BlockingConnection.open(ConnectOptions(servers=(server.url,), user="bob", password="pw"))
        with pytest.raises(AuthFailed, match=r"\$JS\.API\.STREAM\.INFO\.S"):
            connection.api("STREAM.INFO.S")
        assert connection.closed


def test_requests_end_in_an_answer_no_responders_or_a_timeout(server: NatsServer, name: str) -> None:
    with BlockingConnection.open(ConnectOptions(servers=(server.url,))) as connection:
        with pytest.raises(NoResponders, match=f"no responder for {name}"):
            connection.request(name)
        with BlockingConnection.open(connection.options) as silent:
            silent.subscribe(name)
            silent.ping()
            with pytest.raises(RequestTimeout, match=f"no answer on {name} .* within 0.1 s"):
                connection.request(name, timeout=0.1)
        connection.ping()  # and the connection is still good


def test_an_unsubscribed_inbox_leaves_nothing_behind(server: NatsServer, name: str) -> None:
    with BlockingConnection.open(ConnectOptions(servers=(server.url,))) as connection:
        sid = connection.subscribe(name)
        for _ in range(1000):
            connection.publish(name, b"leftover")
        connection.unsubscribe(sid)
        with pytest.raises(RequestTimeout):
            connection.frames(0.05)
        assert "api" not in repr(connection)
        assert "open" in repr(connection)
    assert "closed" in repr(connection)


@contextmanager
def scripted(*script: bytes) -> Iterator[ConnectOptions]:
    """A server that greets, answers the handshake, sends the script and then falls silent."""
    listener = socket.create_server(("127.0.0.1", 0))
    peers: list[socket.socket] = []

    def serve() -> None:
        peer, _ = listener.accept()
        peers.append(peer)
        peer.sendall(b"INFO " + json.dumps({"max_payload": 1 << 20}).encode() + b"\r\n")
        received = b""
        while b"PING\r\n" not in received:
            received += peer.recv(4096)
        with suppress(ConnectionError):  # the client may have had enough before the end
            peer.sendall(b"PONG\r\n" + b"".join(script))

    thread = threading.Thread(target=serve)
    thread.start()
    yield ConnectOptions(servers=(f"127.0.0.1:{listener.getsockname()[1]}",))
    thread.join()
    for peer in peers:
        peer.close()
    listener.close()


def test_half_a_frame_and_then_silence_is_a_timeout_and_no_endless_wait() -> None:
    for part in (b"MSG a 2 100\r\nhalf", b"MSG a 2", b"M", b"MSG a 2 300000\r\n" + bytes(200_000)):
        with scripted(part) as options, BlockingConnection.open(options) as connection:
            with pytest.raises(RequestTimeout):
                connection.frames(0.2)
            with pytest.raises(RequestTimeout):
                connection.frames(0.05)


def test_bytes_that_are_no_frame_close_the_connection() -> None:
    with scripted(b"HTTP/1.1 400 Bad Request\r\n") as options, BlockingConnection.open(options) as connection:
        with pytest.raises(ProtocolError, match="HTTP"):
            connection.frames(1.0)
        assert connection.closed


def test_a_frame_larger_than_the_server_may_send_is_refused_before_it_fills_the_memory() -> None:
    with (
        scripted(b"MSG a 2 999999999\r\n" + bytes(4 << 20)) as options,
        BlockingConnection.open(options) as connection,
        pytest.raises(ConnectionFailed, match="larger than its max_payload"),
    ):
        connection.frames(1.0)


def test_an_error_line_of_the_server_is_raised() -> None:
    with scripted(b"-ERR 'Stale Connection'\r\n") as options, BlockingConnection.open(options) as connection:
        with pytest.raises(ConnectionFailed, match="Stale Connection"):
            connection.frames(1.0)
        assert connection.closed


def test_a_pong_that_never_comes_closes_the_connection(server: NatsServer) -> None:
    with FaultProxy(server.url) as proxy:
        connection = BlockingConnection.open(ConnectOptions(servers=(proxy.url,)))
        proxy.half_open()
        with pytest.raises(ConnectionFailed, match=r"no PONG within 0.1 s"):
            connection.ping(0.1)
        assert connection.closed


def wait_for_ever(connection: BlockingConnection) -> None:
    while True:
        connection.frames(30.0)


@pytest.mark.parametrize("encrypted", [False, True])
def test_closing_from_another_thread_ends_a_waiting_call(authority: Certificates, encrypted: bool) -> None:
    with NatsServer(tls=authority.server() if encrypted else None) as server:
        options = ConnectOptions(servers=(server.url,), tls_ca=authority.path("ca.crt") if encrypted else None)
        connection = BlockingConnection.open(options)
        closer = threading.Timer(0.1, connection.close)
        closer.start()
        with pytest.raises(ConnectionFailed):
            wait_for_ever(connection)
        closer.join()
        with pytest.raises(ConnectionFailed):
            connection.ping()


def test_messages_that_arrive_with_the_handshake_are_not_lost() -> None:
    with scripted(b"MSG a 2 2\r\nhi\r\n") as options, BlockingConnection.open(options) as connection:
        frames = connection.frames(1.0)
        assert [frames.payload(index) for index in range(len(frames))] == [Message("a", b"hi").data]
