import asyncio
import json
import socket
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import nkeys
import pytest

from parti.errors import AuthFailed, ConnectionFailed, PartiError, TlsFailed
from parti.testing import NatsServer
from parti.wire.api import JetStreamApi
from parti.wire.connect import connect
from parti.wire.options import ConnectOptions
from support.certificates import Certificates
from support.jwt_auth import Key, Operator

PASSWORD = "s3cret-p4ssword"
TOKEN = "s3cret-t0ken"


async def works(options: ConnectOptions) -> None:
    """The async client and a raw socket with our own CONNECT both get in, and JetStream answers."""
    async with await connect(options) as connection:
        await JetStreamApi(connection).stream_names()
    assert await asyncio.to_thread(raw_answer, options) == "PONG"


async def refused(options: ConnectOptions, kind: type[PartiError], *secrets: str) -> str:
    """Connecting fails with this error, and neither it nor its causes hold a secret; returns its text."""
    with pytest.raises(kind) as raised:
        await connect(options)
    error: BaseException | None = raised.value
    while error is not None:
        for secret in secrets:
            assert secret not in f"{error} {error!r}"
        error = error.__cause__ or error.__context__
    return str(raised.value)


def raw_answer(options: ConnectOptions) -> str:
    """What the server answers to our CONNECT frame and a PING over a plain or TLS socket."""
    address = options.server_list()[0]
    with socket.create_connection((address.host, address.port), 5) as plain:
        stream: socket.socket = plain
        context = options.ssl_context()
        if context is not None and options.tls_first:
            stream = context.wrap_socket(plain, server_hostname=options.tls_hostname or address.host)
        info: dict[str, Any] = json.loads(read_line(stream).removeprefix("INFO "))
        if info.get("tls_required") and not options.tls_first:
            context = options.ssl_context(required=True)
            assert context is not None
            stream = context.wrap_socket(plain, server_hostname=options.tls_hostname or address.host)
        stream.sendall(options.connect_frame(info) + b"PING\r\n")
        while True:
            line = read_line(stream).strip()
            if not line.startswith("INFO"):
                return line


def read_line(stream: socket.socket) -> str:
    line = b""
    while not line.endswith(b"\n"):
        byte = stream.recv(1)
        if not byte:
            break
        line += byte
    return line.decode()


async def test_a_user_with_a_password_gets_in() -> None:
    with NatsServer(config=f'authorization {{ user: bob, password: "{PASSWORD}" }}') as server:
        await works(ConnectOptions(servers=(server.url,), user="bob", password=PASSWORD))
        await works(ConnectOptions(servers=(server.client_url(user="bob", password=PASSWORD),)))
        wrong = ConnectOptions(servers=(server.url,), user="bob", password="wr0ng-passw0rd")
        assert "'bob'" in await refused(wrong, AuthFailed, "wr0ng-passw0rd")
        assert raw_answer(wrong) == "-ERR 'Authorization Violation'"
        assert "none were given" in await refused(ConnectOptions(servers=(server.url,)), AuthFailed)


async def test_a_token_gets_in() -> None:
    with NatsServer(config=f'authorization {{ token: "{TOKEN}" }}') as server:
        await works(ConnectOptions(servers=(server.url,), token=TOKEN))
        await works(ConnectOptions(servers=(server.client_url(token=TOKEN),)))
        wrong = ConnectOptions(servers=(server.url,), token="wr0ng-t0ken")
        assert "token" in await refused(wrong, AuthFailed, "wr0ng-t0ken")
        assert raw_answer(wrong) == "-ERR 'Authorization Violation'"


async def test_an_nkey_gets_in(tmp_path: Path) -> None:
    key, other = Key.new(nkeys.PREFIX_BYTE_USER), Key.new(nkeys.PREFIX_BYTE_USER)
    file = tmp_path / "user.nk"
    file.write_text(key.seed)
    with NatsServer(config=f"authorization {{ users: [ {{ nkey: {key.public} }} ] }}") as server:
        await works(ConnectOptions(servers=(server.url,), nkey_seed=key.seed))
        await works(ConnectOptions(servers=(server.url,), nkey_file=str(file)))
        wrong = ConnectOptions(servers=(server.url,), nkey_seed=other.seed)
        assert "nkey_seed" in await refused(wrong, AuthFailed, other.seed)
        assert raw_answer(wrong) == "-ERR 'Authorization Violation'"


async def test_a_credentials_file_gets_in(tmp_path: Path) -> None:
    operator = Operator()
    creds = operator.credentials()
    file = tmp_path / "user.creds"
    file.write_text(creds)
    windows = tmp_path / "windows.creds"
    windows.write_bytes(creds.replace("\n", "\r\n").encode())
    with NatsServer(config=operator.server_config()) as server:
        await works(ConnectOptions(servers=(server.url,), creds_file=str(file)))
        await works(ConnectOptions(servers=(server.url,), creds_file=str(windows)))
        await works(ConnectOptions(servers=(server.url,), creds_file=str(file)).self_contained())
        stranger = Key.new(nkeys.PREFIX_BYTE_ACCOUNT)
        forged = ConnectOptions(servers=(server.url,), creds=operator.credentials(signer=stranger))
        seed = forged.creds.split("SEED-----\n")[1].split("\n")[0] if forged.creds else ""
        assert seed.startswith("SU")
        assert "creds" in await refused(forged, AuthFailed, seed)
        expired = ConnectOptions(servers=(server.url,), creds=operator.credentials(expires=1_700_000_001))
        await refused(expired, AuthFailed)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    made = Certificates(tmp_path_factory.mktemp("certificates"))
    made.make()
    return made


@pytest.fixture(scope="module")
def tls_server(certificates: Certificates) -> Iterator[NatsServer]:
    with NatsServer(tls=certificates.server()) as running:
        yield running


@pytest.fixture(scope="module")
def mtls_server(certificates: Certificates) -> Iterator[NatsServer]:
    with NatsServer(tls=certificates.server(mutual=True)) as running:
        yield running


async def test_tls_works_with_the_right_authority(tls_server: NatsServer, certificates: Certificates) -> None:
    await works(ConnectOptions(servers=(tls_server.url,), tls_ca=certificates.path("ca.crt")))
    plain_scheme = tls_server.url.replace("tls://", "nats://")
    await works(ConnectOptions(servers=(plain_scheme,), tls_ca=certificates.path("ca.crt")))
    await works(ConnectOptions(servers=(tls_server.url,), tls_ca=certificates.path("ca.crt"), tls_hostname="nats.test"))


async def test_tls_with_an_unknown_authority_or_name_is_refused(
    tls_server: NatsServer, certificates: Certificates
) -> None:
    options = ConnectOptions(servers=(tls_server.url,))
    assert "tls_ca" in await refused(options, TlsFailed)
    assert "tls_ca" in await refused(replace(options, tls_ca=certificates.path("stranger.crt")), TlsFailed)
    named = replace(options, tls_ca=certificates.path("ca.crt"), tls_hostname="other.test")
    assert "tls_hostname" in await refused(named, TlsFailed)


async def test_no_password_is_sent_to_a_server_without_tls_where_tls_was_asked_for(server: NatsServer) -> None:
    address = server.url.replace("nats://", "tls://")
    options = ConnectOptions(servers=(address,), user="bob", password=PASSWORD)
    assert "offers no TLS" in await refused(options, TlsFailed, PASSWORD)


async def test_mutual_tls_works_with_a_client_certificate(mtls_server: NatsServer, certificates: Certificates) -> None:
    await works(
        ConnectOptions(
            servers=(mtls_server.url,),
            tls_ca=certificates.path("ca.crt"),
            tls_cert=certificates.path("client.crt"),
            tls_key=certificates.path("client.key"),
        )
    )


@pytest.mark.parametrize("who", ["nobody", "stranger"])
async def test_mutual_tls_refuses_a_client_without_a_trusted_certificate(
    mtls_server: NatsServer, certificates: Certificates, who: str
) -> None:
    options = ConnectOptions(servers=(mtls_server.url,), tls_ca=certificates.path("ca.crt"))
    if who == "stranger":
        options = replace(
            options, tls_cert=certificates.path("stranger.crt"), tls_key=certificates.path("stranger.key")
        )
    assert "client certificate" in await refused(options, TlsFailed)


async def test_the_handshake_can_come_first(certificates: Certificates) -> None:
    files = certificates.server()
    config = f'tls {{ cert_file: "{files.cert}", key_file: "{files.key}", handshake_first: true }}'
    with NatsServer(tls=files, config=config) as server:
        first = ConnectOptions(servers=(server.url,), tls_ca=certificates.path("ca.crt"), tls_first=True)
        await works(first)
        late = replace(first, tls_first=False, connect_timeout=0.3)
        assert "tls_first" in await refused(late, ConnectionFailed)


async def test_nothing_listening_is_a_clear_retriable_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        options = ConnectOptions(servers=(f"nats://bob:{PASSWORD}@127.0.0.1:{port}",))
        assert f"nothing listens on 127.0.0.1:{port}" in await refused(options, ConnectionFailed, PASSWORD)


async def test_a_server_that_never_answers_is_given_up_after_the_timeout() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        options = ConnectOptions(servers=(f"127.0.0.1:{silent.getsockname()[1]}",), connect_timeout=0.1)
        assert "did not answer within 0.1 s" in await refused(options, ConnectionFailed)


async def test_of_several_servers_the_first_that_answers_is_used(server: NatsServer) -> None:
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{dead.getsockname()[1]}"
        async with await connect(ConnectOptions(servers=(address, server.url))) as connection:
            assert connection.server_address == f"127.0.0.1:{server.port}"
            assert "connected" in repr(connection)


async def test_a_failed_connect_leaves_no_task_behind() -> None:
    before = asyncio.all_tasks()
    with NatsServer(config=f'authorization {{ token: "{TOKEN}" }}') as server:
        await refused(ConnectOptions(servers=(server.url,), token="wrong"), AuthFailed)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before


def test_an_encrypted_client_key_is_refused_instead_of_asking_for_its_phrase(
    certificates: Certificates, tmp_path: Path
) -> None:
    locked = tmp_path / "locked.key"
    command = [
        "openssl",
        "ec",
        "-in",
        certificates.path("client.key"),
        "-aes128",
        "-passout",
        "pass:x",
        "-out",
        str(locked),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    options = ConnectOptions(tls_cert=certificates.path("client.crt"), tls_key=str(locked))
    with pytest.raises((PartiError, ssl.SSLError), match="pass phrase"):
        options.ssl_context()
