"""`shardline keys`: the key is printed once, the table shows what each has used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner, Result

from shardline.cli.main import cli
from shardline.errors import ShardlineError
from shardline.gateway.keys import ApiKeys
from shardline.gateway.ledger import USAGE_FILE, KeyUsage, Ledger
from shardline.options import KEYS_FILE, OPERATOR_FILE


def keys(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["--state-dir", str(folder), "keys", *arguments])


def test_a_key_is_added_listed_and_revoked(tmp_path: Path) -> None:
    assert "No keys" in keys(tmp_path, "list").stdout
    made = keys(tmp_path, "add", "alice", "--rate", "60", "--concurrent", "2", "--scope", "generate")
    (key,) = made.stdout.split()
    assert key.startswith("sk-") and "this once" in made.stderr
    ledger = Ledger(tmp_path / USAGE_FILE)
    ledger.add("alice", KeyUsage(requests=3, prompt_tokens=40, completion_tokens=50, last_used=1e9))
    ledger.add("key-0123", KeyUsage(requests=1, last_used=1e9))
    ledger.write(ledger.take())
    lines = keys(tmp_path, "list").stdout.splitlines()
    assert lines[1].split() == ["alice", "valid", "generate", "60", "2", "3", "40", "50"]
    assert lines[2].split()[:2] == ["operator", "valid"] and "of --api-keys" in lines[3]
    assert "valid no more" in keys(tmp_path, "revoke", "alice").stdout
    listed = json.loads(keys(tmp_path, "list", "--json").stdout)
    assert [entry["state"] for entry in listed["keys"]] == ["revoked", "valid", "of --api-keys"]
    assert listed["asked_for"] is True and listed["keys"][0]["usage"]["completion_tokens"] == 50
    assert key not in json.dumps(listed) and "digest" not in json.dumps(listed)
    assert "2001" in keys(tmp_path, "list", "--wide").stdout


def test_the_key_that_is_printed_is_valid(tmp_path: Path) -> None:
    from shardline.gateway.key_file import kept_keys

    key = json.loads(keys(tmp_path, "add", "bob", "--json").stdout)["key"]
    found = ApiKeys(kept_keys(tmp_path / KEYS_FILE) or ()).find(f"Bearer {key}")
    assert found is not None and found.scopes == ("generate", "look")
    assert (tmp_path / OPERATOR_FILE).exists()


def test_what_cannot_be_is_a_sentence(tmp_path: Path) -> None:
    keys(tmp_path, "add", "bob")
    for arguments in (("add", "bob"), ("revoke", "carol"), ("add", "no name")):
        failed = keys(tmp_path, *arguments)
        assert isinstance(failed.exception, ShardlineError) and failed.exception.code == "invalid_value"
    assert keys(tmp_path, "add", "x", "--rate", "0").exit_code == 2


def test_listing_makes_no_folder(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shardline", "--state-dir", str(tmp_path / "none"), "keys", "list"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0 and not (tmp_path / "none").exists()
