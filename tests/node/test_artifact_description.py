"""A description that comes from elsewhere: file by file, believed by key or pin, or refused with nothing kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardline.artifact.bundle import MANIFEST_NAME, SIGNATURE_NAME, TORRENT_NAME, Bundle, TrustPolicy
from shardline.artifact.signing import new_key
from shardline.artifact.store import Store
from shardline.errors import ShardlineError
from shardline.node import artifact_description
from shardline.node.artifact_description import fetched, policy_for, stored, stored_names
from tests.support.artifacts import big_gguf, publisher, safetensors_folder, signed_bundle

KEYS = TrustPolicy(keys=(publisher().public_key(),))


class Folder:
    """Gives the files of a bundle, as a Tracker does, and remembers which. `changed`: bytes in place of a file's."""

    def __init__(self, bundle: Bundle, **changed: bytes | None) -> None:
        self.folder = bundle.folder
        self.changed = changed
        self.asked: list[str] = []

    async def __call__(self, path: str, most: int) -> bytes:
        self.asked.append(path)
        changed = self.changed.get(path.replace(".", "_"), b"")
        if changed is None or not (self.folder / path).is_file():
            raise ShardlineError("not_found", path)
        raw = changed or (self.folder / path).read_bytes()
        assert len(raw) <= most
        return raw


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "store", reserve_bytes=0)
    yield made
    made.close()


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return signed_bundle(big_gguf(tmp_path), tmp_path / "bundle")


async def refused(store: Store, content_id: str, policy: TrustPolicy, ask: Folder) -> str:
    with pytest.raises(ShardlineError) as caught:
        await fetched(store, content_id, policy, ask)
    assert store.content_ids() == [] and list(store.folder.glob(".description-*")) == []
    return caught.value.code


@pytest.mark.parametrize("signed", [True, False])
async def test_it_is_kept_and_not_asked_for_again(store: Store, bundle: Bundle, signed: bool) -> None:
    content_id = bundle.manifest.content_id
    policy = KEYS if signed else policy_for(TrustPolicy(), content_id)
    assert stored(store, content_id, policy) is None
    ask = Folder(bundle)
    with await fetched(store, content_id, policy, ask) as artifact:
        assert artifact.bundle.manifest == bundle.manifest
        assert artifact.bundle.folder.is_relative_to(store.folder)
    assert ask.asked == [MANIFEST_NAME, SIGNATURE_NAME, TORRENT_NAME]
    again = stored(store, content_id, policy)
    assert again is not None
    again.close()
    assert stored_names(store, TrustPolicy()) == [(content_id, bundle.manifest.name)]


async def test_small_files_come_with_it(store: Store, tmp_path: Path) -> None:
    bundle = signed_bundle(safetensors_folder(tmp_path / "model"), tmp_path / "bundle")
    with await fetched(store, bundle.manifest.content_id, KEYS, Folder(bundle)) as artifact:
        entry = artifact.bundle.manifest.small_files[0]
        assert artifact.bundle.small_path(entry).read_bytes() == bundle.small_path(entry).read_bytes()


async def test_another_publisher(store: Store, bundle: Bundle) -> None:
    other = TrustPolicy(keys=(new_key().public_key(),))
    ask = Folder(bundle)
    assert await refused(store, bundle.manifest.content_id, other, ask) == "artifact_untrusted"
    assert TORRENT_NAME not in ask.asked, "nothing more is asked for"
    unsigned = Folder(bundle, artifact_sig=None)
    assert await refused(store, bundle.manifest.content_id, KEYS, unsigned) == "artifact_untrusted"


async def test_another_content(store: Store, bundle: Bundle) -> None:
    content_id = "mac1-" + "0" * 64
    assert (
        await refused(store, content_id, policy_for(TrustPolicy(), content_id), Folder(bundle)) == "artifact_mismatch"
    )


async def test_what_was_tampered_with(store: Store, bundle: Bundle, tmp_path: Path) -> None:
    manifest = (bundle.folder / MANIFEST_NAME).read_bytes()
    torrent = (bundle.folder / TORRENT_NAME).read_bytes()
    content_id = bundle.manifest.content_id
    renamed = manifest.replace(b'"name":"', b'"name":"x', 1)
    assert await refused(store, content_id, KEYS, Folder(bundle, manifest_json=renamed)) == "artifact_invalid"
    broken = torrent[:-40] + bytes(40)
    for policy in (KEYS, policy_for(TrustPolicy(), content_id)):
        assert await refused(store, content_id, policy, Folder(bundle, model_torrent=broken)) == "artifact_invalid"
    junk = Folder(bundle, manifest_json=b"{}")
    assert await refused(store, content_id, policy_for(TrustPolicy(), content_id), junk) == "artifact_invalid"


async def test_a_tracker_that_is_busy_is_asked_again(
    store: Store, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifact_description, "_AGAIN_S", 0.01)
    ask, busy = Folder(bundle), [3]

    async def sometimes(path: str, most: int) -> bytes:
        if busy[0]:
            busy[0] -= 1
            raise ShardlineError("queue_full", "others are served")
        return await ask(path, most)

    (await fetched(store, bundle.manifest.content_id, KEYS, sometimes)).close()
    monkeypatch.setattr(artifact_description, "BUSY_S", 0.0)
    busy[0] = 99
    with pytest.raises(ShardlineError) as caught:
        await fetched(store, bundle.manifest.content_id, KEYS, sometimes)
    assert caught.value.code == "queue_full"


async def test_what_was_believed_by_a_pin_is_asked_for_again_where_a_key_is_wanted(
    store: Store, bundle: Bundle
) -> None:
    content_id = bundle.manifest.content_id
    (await fetched(store, content_id, policy_for(TrustPolicy(), content_id), Folder(bundle, artifact_sig=None))).close()
    assert stored(store, content_id, KEYS) is None
    with await fetched(store, content_id, KEYS, Folder(bundle)) as artifact:
        assert artifact.bundle.signed_by is not None
