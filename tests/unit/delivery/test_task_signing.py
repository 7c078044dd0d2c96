"""Signatures, checked by an independent implementation of the Standard Webhooks scheme; and the sources of keys."""

from __future__ import annotations

import base64
import hashlib
import hmac
from pathlib import Path

import pytest

from parti.clock import SimulatedClock
from parti.delivery.errors import SecretMissing, SecretStoreDown
from parti.delivery.secrets import SecretStore
from parti.delivery.signing import SigningKey, legacy_signature, sign
from parti.errors import ConfigError

SECRET = "whsec_" + base64.b64encode(b"k" * 24).decode()
OTHER = "whsec_" + base64.b64encode(b"o" * 32).decode()


def verifies(secret: str, webhook_id: str, timestamp: int, body: bytes, header: str) -> bool:
    """The scheme in its own words: any `v1` signature of the header that matches is enough."""
    key = base64.b64decode(secret.split("_", 1)[1])
    mac = hmac.new(key, digestmod=hashlib.sha256)
    mac.update(webhook_id.encode())
    mac.update(b"." + str(timestamp).encode() + b".")
    mac.update(body)
    expected = base64.b64encode(mac.digest())
    offered = [part.split(",", 1) for part in header.split(" ")]
    return any(v == "v1" and hmac.compare_digest(expected, given.encode()) for v, given in offered)


def test_the_published_example_of_the_scheme_is_reproduced() -> None:
    key = SigningKey.parse("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    body = b'{"test": 2432232314}'
    made = sign([key], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body)
    assert made == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_every_active_key_signs_so_that_keys_can_be_rotated() -> None:
    header = sign([SigningKey.parse(SECRET), SigningKey.parse(OTHER)], "msg_1", 100, b"body")
    assert verifies(SECRET, "msg_1", 100, b"body", header)
    assert verifies(OTHER, "msg_1", 100, b"body", header)
    for forged in (("msg_2", 100, b"body"), ("msg_1", 101, b"body"), ("msg_1", 100, b"Body")):
        assert not verifies(SECRET, *forged, header)


def test_the_legacy_header_is_what_syntrix_makes() -> None:
    key = SigningKey.parse("plain-text-secret-of-before")
    expected = hmac.new(b"plain-text-secret-of-before", b"100.body", hashlib.sha256).hexdigest()
    assert legacy_signature(key, 100, b"body") == f"t=100,v1={expected}"


@pytest.mark.parametrize("text", ["whsec_%%%", "short", "whsec_" + base64.b64encode(b"short").decode(), ""])
def test_a_key_that_is_none_is_refused_without_showing_it(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SigningKey.parse(text)
    assert not text or text not in str(caught.value)


def test_a_key_may_be_written_without_its_padding() -> None:
    for size in range(16, 34):
        padded = "whsec_" + base64.b64encode(b"k" * size).decode()
        assert SigningKey.parse(padded.rstrip("=")) == SigningKey.parse(padded) == SigningKey(b"k" * size)


def test_a_key_of_any_bytes_in_the_environment_signs() -> None:
    found = SecretStore(SimulatedClock(), "", {"PARTI_WEBHOOK_SECRET_X": "\udcff" * 20}).keys("d", "x")
    assert found == (SigningKey(b"\xff" * 20),)
    assert sign(found, "m", 1, b"")


def test_a_secret_pasted_in_place_of_its_name_is_not_shown() -> None:
    with pytest.raises(SecretMissing) as caught:
        SecretStore(SimulatedClock(), "", {}).keys("d", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    assert "mfkq" not in str(caught.value).lower()


def test_a_key_does_not_show_its_bytes() -> None:
    assert repr(SigningKey.parse(SECRET)) == "SigningKey()"


def test_secrets_come_from_the_folder_of_the_database_then_the_folder_then_the_environment(tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "billing").write_text(f"{SECRET}\n{OTHER}\n")
    (tmp_path / "billing").write_text(OTHER)
    store = SecretStore(SimulatedClock(), str(tmp_path), {"PARTI_WEBHOOK_SECRET_MAIL_KEY": f"{SECRET} {OTHER}"})
    assert store.keys("shop", "billing") == (SigningKey.parse(SECRET), SigningKey.parse(OTHER))
    assert store.keys("other", "billing") == (SigningKey.parse(OTHER),)
    assert len(store.keys("shop", "mail-key")) == 2
    assert SECRET not in repr(store)


def test_a_rotated_key_is_in_use_after_a_minute(tmp_path: Path) -> None:
    clock, file = SimulatedClock(), tmp_path / "k"
    file.write_text(SECRET)
    store = SecretStore(clock, str(tmp_path), {})
    assert len(store.keys("d", "k")) == 1
    file.write_text(f"{OTHER} {SECRET}")
    assert len(store.keys("d", "k")) == 1
    clock.advance(61)
    assert len(store.keys("d", "k")) == 2


@pytest.mark.parametrize("name", ["unknown", "../billing", "a/b", "", ".hidden", "x" * 200, "a\0b"])
def test_a_secret_that_is_not_there_is_missing_and_never_a_path(name: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "billing").write_text(SECRET)
    with pytest.raises(SecretMissing):
        SecretStore(SimulatedClock(), str(tmp_path / "in"), {}).keys("shop", name)


def test_a_secret_that_cannot_be_read_is_no_missing_one(tmp_path: Path) -> None:
    (tmp_path / "k").write_bytes(b"\xff\xff\xff")
    with pytest.raises(SecretStoreDown):
        SecretStore(SimulatedClock(), str(tmp_path), {}).keys("d", "k")


def test_an_unusable_key_counts_as_missing_and_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "k").write_text("whsec_!!!not-base64!!!")
    with pytest.raises(SecretMissing) as caught:
        SecretStore(SimulatedClock(), str(tmp_path), {}).keys("d", "k")
    assert "not-base64" not in str(caught.value)
