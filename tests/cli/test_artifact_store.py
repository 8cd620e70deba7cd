"""The store's commands: one machine seeds, another fetches some layers; listing, scrubbing, removing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shardline.artifact.signing import new_key, public_pem
from shardline.cli.main import cli
from shardline.errors import ShardlineError
from tests.support.artifacts import signed_bundle
from tests.support.stores import described, layered_model

WAIT_S = 30


def run(state: Path, *arguments: object) -> Result:
    given = ["--state-dir", str(state), "--set", "store_reserve_bytes=0", "artifact", *map(str, arguments)]
    return CliRunner().invoke(cli, given, catch_exceptions=False)


def answer(state: Path, *arguments: object) -> Any:
    return json.loads(run(state, *arguments, "--json").stdout)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return described(layered_model(tmp_path / "model"), tmp_path / "bundle").folder


@pytest.fixture
def seeded(tmp_path: Path, bundle: Path) -> Iterator[str]:
    """The URL of a process that gives the whole model away; it has the credential of the state folder `two`."""
    first, second = tmp_path / "one", tmp_path / "two"
    taken = answer(first, "fetch", bundle, "--allow-unsigned", "--files", tmp_path / "model")
    assert taken["fetched_bytes"] == 0
    assert taken["adopted"] == [str(tmp_path / "model" / "llama-8.gguf")]
    command = [sys.executable, "-m", "shardline", "--state-dir", str(first), "artifact", "seed"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    url = child.stdout.readline().partition(": ")[0]
    second.mkdir()
    (second / "credential").write_bytes((first / "credential").read_bytes())
    (second / "credential").chmod(0o600)
    try:
        yield url
    finally:
        child.send_signal(signal.SIGTERM)
        _, err = child.communicate(timeout=WAIT_S)
        assert child.returncode == 0, err


def test_some_layers_and_then_the_rest(tmp_path: Path, bundle: Path, seeded: str) -> None:
    state = tmp_path / "two"
    part = answer(state, "fetch", bundle, "--allow-unsigned", "--layers", "2:4", "--from", seeded)
    assert part["fetched_bytes"] == part["total_bytes"] < 4 << 20
    assert [source["state"] for source in part["sources"]] == ["active"]
    listed = answer(state, "list")[0]
    assert listed["held_bytes"] == part["total_bytes"]
    assert any(first <= 2 and last >= 4 for first, last in listed["servable"])
    assert "2:4" in run(state, "list").stdout
    rest = run(state, "fetch", bundle, "--allow-unsigned", "--from", seeded).stdout
    assert "layers 0:8" in rest
    assert answer(state, "list")[0]["held_bytes"] == (tmp_path / "model" / "llama-8.gguf").stat().st_size


def test_without_any_source_it_says_what_is_missing(tmp_path: Path, bundle: Path) -> None:
    with pytest.raises(ShardlineError, match="no source is known") as caught:
        run(tmp_path / "two", "fetch", bundle, "--allow-unsigned")
    assert caught.value.code == "artifact_unavailable"


def test_nothing_is_fetched_on_anybodys_word(tmp_path: Path, bundle: Path) -> None:
    with pytest.raises(ShardlineError, match="no key and no content_id is trusted") as caught:
        run(tmp_path / "two", "fetch", bundle)
    assert caught.value.code == "artifact_untrusted"
    assert answer(tmp_path / "two", "list") == []


def test_scrub_and_rm(tmp_path: Path, bundle: Path) -> None:
    state = tmp_path / "one"
    assert run(state, "list").stdout == "nothing is in the store\n"
    content_id = answer(state, "fetch", bundle, "--allow-unsigned", "--files", tmp_path / "model")["content_id"]
    assert answer(state, "scrub", content_id)["bad"] == {}
    for given in (content_id[:12], content_id[5:12], "llama-8.gguf"):
        assert answer(state, "scrub", given)["content_id"] == content_id
        assert answer(state, "show", given)["content_id"] == content_id
    assert run(state, "rm", content_id[5:12]).stdout.startswith(content_id)
    assert answer(state, "list") == []
    with pytest.raises(ShardlineError, match="not in the store"):
        run(state, "rm", content_id)
    assert (tmp_path / "model" / "llama-8.gguf").exists()


def test_what_another_signed_is_not_fetched(tmp_path: Path, bundle: Path) -> None:
    model, other = tmp_path / "model" / "llama-8.gguf", tmp_path / "other.pub"
    signed = signed_bundle(model, tmp_path / "signed").folder
    other.write_bytes(public_pem(new_key().public_key()))
    for folder, words in ((signed, "signed by somebody else"), (bundle, "is not signed")):
        with pytest.raises(ShardlineError, match=words) as caught:
            run(tmp_path / "two", "fetch", folder, "--public-key", other)
        assert caught.value.code == "artifact_untrusted" and "--allow-unsigned" not in caught.value.advice


def test_a_wrong_credential_is_told_from_missing_pieces(tmp_path: Path, bundle: Path, seeded: str) -> None:
    fetch = ("fetch", bundle, "--allow-unsigned", "--from", seeded.removeprefix("http://"))
    with pytest.raises(ShardlineError, match="there is no cluster credential"):
        run(tmp_path / "three", *fetch)
    credential = tmp_path / "three" / "credential"
    assert not credential.exists()
    credential.write_text("not-the-one-of-this-cluster")
    credential.chmod(0o600)
    with pytest.raises(ShardlineError, match="cluster credential") as caught:
        run(tmp_path / "three", *fetch)
    assert caught.value.code == "artifact_unavailable" and f"{credential} (mode 600)" in caught.value.advice
    assert run(tmp_path / "two", *fetch).exit_code == 0


def test_a_state_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    assert f"there is no folder {tmp_path / 'nowhere'}" in run(tmp_path / "nowhere", "list").stderr
