"""Bundles: what a policy lets in, and that nothing of a tampered one is believed."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardline.artifact.bundle import (
    MANIFEST_NAME,
    SIGNATURE_NAME,
    TORRENT_NAME,
    Bundle,
    TrustPolicy,
    load_bundle,
    load_manifest,
)
from shardline.artifact.creation import create_bundle
from shardline.artifact.identity import content_id
from shardline.artifact.signing import key_id, new_key
from shardline.errors import ShardlineError
from tests.support.artifacts import (
    CREATED,
    big_gguf,
    change_manifest,
    publisher,
    safetensors_folder,
    sign_again,
    signed_bundle,
)

TRUST = TrustPolicy((publisher().public_key(),))
ANY = TrustPolicy(allow_unsigned=True)


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return signed_bundle(safetensors_folder(tmp_path / "model"), tmp_path / "art")


def refusal(folder: Path, policy: TrustPolicy = TRUST) -> ShardlineError:
    with pytest.raises(ShardlineError) as caught:
        load_bundle(folder, policy)
    return caught.value


def test_a_signed_bundle_is_read(tmp_path: Path, bundle: Bundle) -> None:
    found = load_bundle(bundle.folder, TRUST)
    assert found == bundle
    assert found.signed_by == key_id(publisher().public_key())
    assert found.manifest.content_id == content_id(tmp_path / "model")
    assert load_manifest(bundle.folder, TRUST) == found.manifest
    assert [
        found.small_path(entry).read_bytes() for entry in found.manifest.small_files if entry.path == "LICENSE"
    ] == [b"free"]


def test_it_may_be_moved(tmp_path: Path, bundle: Bundle) -> None:
    bundle.folder.rename(tmp_path / "elsewhere")
    assert load_bundle(tmp_path / "elsewhere", TRUST).manifest == bundle.manifest


def test_nothing_is_trusted_without_a_policy(bundle: Bundle) -> None:
    assert refusal(bundle.folder, TrustPolicy()).code == "artifact_untrusted"


def test_another_publisher_is_not_trusted(bundle: Bundle) -> None:
    policy = TrustPolicy((new_key().public_key(),))
    assert refusal(bundle.folder, policy).code == "artifact_untrusted"
    assert load_bundle(bundle.folder, TrustPolicy((new_key().public_key(), publisher().public_key())))


def test_a_pinned_content_needs_no_key(bundle: Bundle) -> None:
    pin = frozenset({bundle.manifest.content_id})
    (bundle.folder / SIGNATURE_NAME).unlink()
    assert load_bundle(bundle.folder, TrustPolicy(content_ids=pin)).signed_by is None
    assert load_bundle(bundle.folder, TrustPolicy((new_key().public_key(),), pin)).signed_by is None
    assert refusal(bundle.folder, TrustPolicy(content_ids=frozenset({"mac1-" + "0" * 64}))).code == "artifact_untrusted"


def test_unsigned_is_taken_only_where_nothing_else_is_asked_for(bundle: Bundle) -> None:
    (bundle.folder / SIGNATURE_NAME).unlink()
    assert load_bundle(bundle.folder, ANY).signed_by is None
    policy = TrustPolicy((publisher().public_key(),), allow_unsigned=True)
    assert SIGNATURE_NAME in refusal(bundle.folder, policy).message
    other = TrustPolicy(content_ids=frozenset({"mac1-" + "0" * 64}), allow_unsigned=True)
    assert refusal(bundle.folder, other).code == "artifact_untrusted"


@pytest.mark.parametrize("name", [MANIFEST_NAME, TORRENT_NAME, "files/config.json", "files/LICENSE"])
@pytest.mark.parametrize("policy", [TRUST, ANY], ids=["signed", "unsigned"])
def test_a_tampered_file_is_refused(bundle: Bundle, name: str, policy: TrustPolicy) -> None:
    path = bundle.folder / name
    raw = path.read_bytes()
    path.write_bytes(raw[:-2] + bytes([raw[-2] ^ 1]) + raw[-1:])
    assert refusal(bundle.folder, policy).code == "artifact_invalid"


@pytest.mark.parametrize("name", [MANIFEST_NAME, TORRENT_NAME, SIGNATURE_NAME, "files/config.json"])
def test_a_missing_file_is_named(bundle: Bundle, name: str) -> None:
    (bundle.folder / name).unlink()
    error = refusal(bundle.folder)
    assert error.code == "artifact_invalid"
    assert name in error.message


def test_a_manifest_is_not_looked_into_before_its_digest_holds(bundle: Bundle) -> None:
    (bundle.folder / MANIFEST_NAME).write_bytes(b"[" * 100_000)
    assert "not the file that was signed" in refusal(bundle.folder).message


def test_a_file_that_was_not_signed_is_refused(bundle: Bundle) -> None:
    (bundle.folder / "more.txt").write_text("more")
    assert "'more.txt' is in the folder, but was not signed" in refusal(bundle.folder).message
    assert load_bundle(bundle.folder, ANY)


def test_a_signed_file_that_the_manifest_does_not_have_is_refused(bundle: Bundle) -> None:
    (bundle.folder / "files" / "more.txt").write_text("more")
    sign_again(bundle.folder)
    assert "not in the manifest" in refusal(bundle.folder).message


@pytest.mark.parametrize("name", [MANIFEST_NAME, TORRENT_NAME, SIGNATURE_NAME, "files/config.json"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_links_and_devices_are_not_opened(tmp_path: Path, bundle: Bundle, name: str, kind: str) -> None:
    path = bundle.folder / name
    outside = tmp_path / "outside"
    path.rename(outside)
    if kind == "link":
        path.symlink_to(outside)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    assert refusal(bundle.folder).code == "artifact_invalid"


def test_what_is_no_bundle_at_all(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        assert refusal(folder).code == "artifact_invalid"
        assert refusal(folder, ANY).code == "artifact_invalid"


def test_a_folder_that_cannot_be_listed(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", refuse)
    assert refusal(bundle.folder).message == "invalid artifact: 'art' cannot be read: Permission denied"


def test_a_publisher_cannot_claim_another_content(bundle: Bundle) -> None:
    def claim(manifest: dict[str, Any]) -> None:
        manifest["content_id"] = "mac1-" + "0" * 64

    change_manifest(bundle.folder, claim)
    assert "its files make" in refusal(bundle.folder).message


def test_a_publisher_cannot_hide_a_changed_tokenizer(bundle: Bundle) -> None:
    """It is part of the identity: with another one the files make another content_id."""
    (bundle.folder / "files" / "tokenizer.json").write_text("[]")

    def fit(manifest: dict[str, Any]) -> None:
        entry = next(e for e in manifest["small_files"] if e["path"] == "tokenizer.json")
        entry["sha256"] = hashlib.sha256(b"[]").hexdigest()

    change_manifest(bundle.folder, fit)
    assert "its files make" in refusal(bundle.folder).message


def test_identity_of_a_gguf_file_is_that_of_its_bytes_alone(tmp_path: Path) -> None:
    model = big_gguf(tmp_path)
    licence = tmp_path / "LICENSE"
    licence.write_text("free")
    plain = create_bundle(model, tmp_path / "a", CREATED)
    more = create_bundle(model, tmp_path / "b", replace(CREATED, include=(licence,), name="Other", version="2"))
    assert plain.manifest.content_id == more.manifest.content_id == content_id(model)
    assert plain.manifest_digest != more.manifest_digest
