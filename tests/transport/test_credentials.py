from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from shardline.errors import ShardlineError
from shardline.transport.credentials import (
    SECRET_FILE_BYTES,
    checked_credential,
    existing_credential,
    identity_key,
    keep_secret,
    kept_secret,
    made_credential,
)
from shardline.wire.tickets import public_bytes


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def refusal(work: object, *args: object) -> str:
    with pytest.raises(ShardlineError) as caught:
        work(*args)  # type: ignore[operator]
    assert caught.value.code == "setting_invalid"
    return caught.value.message


def test_the_first_to_come_makes_the_credential_and_the_others_read_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "state" / "credential"
    old = os.umask(0)
    try:
        made = made_credential(path)
    finally:
        os.umask(old)
    assert len(made) == 43 and mode(path) == 0o600 and mode(path.parent) == 0o700
    assert made_credential(path) == existing_credential(path) == made
    assert os.listdir(path.parent) == ["credential"]
    assert made_credential(tmp_path / "other") != made


def test_many_at_once_agree(tmp_path: Path) -> None:
    path = tmp_path / "credential"
    start = threading.Barrier(8)
    made: list[str] = []

    def make() -> None:
        start.wait()
        made.append(made_credential(path))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8 and len(set(made)) == 1
    assert os.listdir(tmp_path) == ["credential"]


@pytest.mark.parametrize("bits", [0o644, 0o640, 0o602])
def test_a_secret_that_others_may_read_is_refused(tmp_path: Path, bits: int) -> None:
    path = tmp_path / "credential"
    secret = made_credential(path)
    path.chmod(bits)
    for work in (made_credential, existing_credential, identity_key):
        message = refusal(work, path)
        assert "chmod 600" in message and secret not in message


@pytest.mark.parametrize(
    "content", [b"", b"short\n", b"a" * 513, b"with a space in it", "größer-als-ascii-erlaubt".encode(), b"\0" * 20]
)
def test_what_is_no_credential(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "credential"
    path.write_bytes(content)
    path.chmod(0o600)
    refusal(existing_credential, path)


def test_places_where_there_can_be_none(tmp_path: Path) -> None:
    assert "no such file" in refusal(existing_credential, tmp_path / "credential")
    refusal(made_credential, tmp_path)
    (tmp_path / "file").write_text("x")
    refusal(made_credential, tmp_path / "file" / "credential")


def test_a_credential_from_elsewhere_is_checked() -> None:
    assert checked_credential("x" * 16, "SHARDLINE_CREDENTIAL") == "x" * 16
    assert "SHARDLINE_CREDENTIAL" in refusal(checked_credential, "x" * 15, "SHARDLINE_CREDENTIAL")


def test_an_identity_is_kept_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "node.pem"
    key = identity_key(path)
    assert mode(path) == 0o600
    assert public_bytes(identity_key(path)) == public_bytes(key)
    assert public_bytes(identity_key(None)) != public_bytes(identity_key(None))


def test_files_that_hold_no_identity(tmp_path: Path) -> None:
    path = tmp_path / "node.pem"
    other = ec.generate_private_key(ec.SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for content in (b"", b"nonsense", other, other[:60], os.urandom(20_000)):
        path.write_bytes(content)
        path.chmod(0o600)
        refusal(identity_key, path)


def test_a_secret_that_is_too_large_is_not_read_in_part(tmp_path: Path) -> None:
    path = tmp_path / "large"
    keep_secret(path, b"x" * SECRET_FILE_BYTES)
    assert len(kept_secret(path) or b"") == SECRET_FILE_BYTES
    keep_secret(path, b"x" * (SECRET_FILE_BYTES + 1))
    with pytest.raises(ShardlineError, match="larger than"):
        kept_secret(path)
    assert [found.name for found in tmp_path.iterdir()] == ["large"]
