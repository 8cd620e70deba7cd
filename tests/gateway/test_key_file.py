"""The key file: hashed, for its owner alone, whole at every moment; names are used once."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import msgspec
import pytest

from shardline.errors import ShardlineError
from shardline.gateway.key_file import (
    KEYS_LIMIT,
    add_key,
    kept_keys,
    operator_key,
    revoke_key,
)
from shardline.gateway.keys import ApiKeys, digest_of
from shardline.options import KEYS_FILE, OPERATOR_FILE


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / KEYS_FILE


def test_only_the_digest_is_kept_and_only_its_owner_reads_it(path: Path) -> None:
    assert kept_keys(path) is None
    key, entry = add_key(path, "alice", now=1.0, scopes=("look",), requests_per_minute=60, concurrent=2)
    assert key.startswith("sk-") and len(key) > 40
    raw = path.read_bytes()
    assert key.encode() not in raw and digest_of(key).encode() in raw
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert kept_keys(path) == (entry,)
    assert (entry.scopes, entry.requests_per_minute, entry.concurrent, entry.created) == (("look",), 60, 2, 1.0)


def test_a_revoked_key_opens_nothing_and_keeps_its_name(path: Path) -> None:
    key, _ = add_key(path, "alice", now=1.0)
    add_key(path, "bob", now=1.0)
    assert revoke_key(path, "alice", now=2.0).revoked == 2.0
    keys = ApiKeys(kept_keys(path) or ())
    assert len(keys) == 1 and keys.find(f"Bearer {key}") is None
    for again in (lambda: revoke_key(path, "alice", now=3.0), lambda: add_key(path, "alice", now=3.0)):
        with pytest.raises(ShardlineError) as caught:
            again()
        assert caught.value.code == "invalid_value"


@pytest.mark.parametrize("name", ["", "anybody", "a b", "-x", "a" * 65, "a\n", "ä"])
def test_what_is_no_name_is_refused(path: Path, name: str) -> None:
    with pytest.raises(ShardlineError) as caught:
        add_key(path, name, now=1.0)
    assert caught.value.param == "name" and kept_keys(path) is None


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b'{"keys":[{"name":"a","digest":"00"}]}', b'{"keys":[{"name":"a b","digest":"' + b"0" * 64 + b'"}]}'],
)
def test_a_damaged_file_is_named(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ShardlineError) as caught:
        kept_keys(path)
    assert caught.value.code == "setting_invalid" and KEYS_FILE in caught.value.message
    path.chmod(0o644)
    with pytest.raises(ShardlineError, match="others may read it"):
        kept_keys(path)


def test_of_writers_at_the_same_moment_none_is_lost(path: Path) -> None:
    writers = [threading.Thread(target=add_key, args=(path, f"k{n}"), kwargs={"now": 1.0}) for n in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert {key.name for key in kept_keys(path) or ()} == {f"k{n}" for n in range(8)}


def test_the_file_is_bounded_and_revoked_entries_make_way(path: Path) -> None:
    _, entry = add_key(path, "first", now=1.0, requests_per_minute=100_000, concurrent=10_000)
    many = [msgspec.structs.replace(entry, name=f"{n:064}", digest=f"{n:064x}") for n in range(KEYS_LIMIT)]
    many[5] = msgspec.structs.replace(many[5], revoked=1764460000.123)
    path.write_bytes(msgspec.json.encode({"keys": many}))
    add_key(path, "next", now=2.0)
    names = [key.name for key in kept_keys(path) or ()]
    assert len(names) == KEYS_LIMIT and names[-1] == "next" and many[5].name not in names
    with pytest.raises(ShardlineError, match="limit"):
        add_key(path, "one-more", now=2.0)


def test_the_commands_of_this_machine_have_a_key_once(path: Path) -> None:
    operator_key(path, 1.0)
    operator_key(path, 2.0)
    kept = path.parent / OPERATOR_FILE
    found = ApiKeys(kept_keys(path) or ()).find(f"Bearer {kept.read_text().strip()}")
    assert found is not None and found.name == "operator" and found.created == 1.0
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    revoke_key(path, "operator", now=3.0)
    operator_key(path, 4.0)
    assert len(ApiKeys(kept_keys(path) or ())) == 0
