"""The torrent of an artifact: its bytes, and refusals of any other. Public clients: test_public_tools.py."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from shardline.artifact.bundle import TORRENT_NAME, Bundle, TrustPolicy, load_bundle
from shardline.artifact.torrent import MAX_PIECE, MIN_PIECE, piece_length_for, read_torrent, write_torrent
from shardline.errors import ShardlineError
from shardline.formats import bencode
from shardline.formats.merkle import hash_file
from tests.support.artifacts import big_gguf, publisher, replace_torrent, signed_bundle, split_gguf

PIECE = 256 << 10


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return signed_bundle(big_gguf(tmp_path), tmp_path / "art")


def decoded(bundle: Bundle) -> dict[bytes, Any]:
    value = bencode.decode((bundle.folder / TORRENT_NAME).read_bytes())
    assert isinstance(value, dict)
    return value


def refused(folder: Path) -> str:
    with pytest.raises(ShardlineError) as caught:
        load_bundle(folder, TrustPolicy((publisher().public_key(),)))
    assert caught.value.code == "artifact_invalid"
    return caught.value.message


def test_bytes_of_a_small_torrent() -> None:
    """One file of at most a piece has no layer."""
    root = hashlib.sha256(b"hello").digest()
    made = write_torrent("hi.txt", [("hi.txt", hash_file([b"hello"], PIECE))])
    info = (
        b"d9:file treed6:hi.txtd0:d6:lengthi5e11:pieces root32:" + root + b"eee12:meta versioni2e4:name6:hi.txt"
        b"12:piece lengthi262144ee"
    )
    assert made.raw == b"d4:info" + info + b"12:piece layersdee"
    assert made.info_hash == hashlib.sha256(info).hexdigest()


def test_torrent_of_several_files(tmp_path: Path) -> None:
    bundle = signed_bundle(split_gguf(tmp_path)[0], tmp_path / "art")
    value = decoded(bundle)
    assert value.keys() == {b"info", b"piece layers"}
    info = value[b"info"]
    assert info[b"name"] == b"tiny"
    assert info[b"meta version"] == 2
    assert list(info[b"file tree"]) == [entry.path.encode() for entry in bundle.manifest.files]
    large = [entry for entry in bundle.manifest.files if entry.size > PIECE]
    assert value[b"piece layers"].keys() == {entry.root for entry in large} != set()
    assert hashlib.sha256(bencode.encode(info)).hexdigest() == bundle.manifest.transport.bittorrent.info_hash_v2


def test_folders_in_paths() -> None:
    tree = hash_file([b"x"], PIECE)
    made = write_torrent("n", [("a/b/c", tree), ("a/d", hash_file([b"y"], PIECE))], webseeds=["https://example.org/"])
    value = bencode.decode(made.raw)
    assert isinstance(value, dict)
    assert value[b"url-list"] == [b"https://example.org/"]
    info: Any = value[b"info"]
    assert info[b"file tree"][b"a"][b"b"][b"c"][b""][b"length"] == 1


def test_everybody_makes_the_same_torrent(tmp_path: Path, bundle: Bundle) -> None:
    (tmp_path / "other").mkdir()
    again = signed_bundle(big_gguf(tmp_path / "other"), tmp_path / "other" / "another name")
    assert (again.folder / TORRENT_NAME).read_bytes() == (bundle.folder / TORRENT_NAME).read_bytes()
    assert again.manifest.content_id == bundle.manifest.content_id


@pytest.mark.parametrize(
    ("total", "length"),
    [
        (1, MIN_PIECE),
        (4 << 30, MIN_PIECE),
        ((4 << 30) + 1, 2 * MIN_PIECE),
        (8 << 30, 2 * MIN_PIECE),
        (10 << 30, 1 << 20),
        (1 << 40, MAX_PIECE),
    ],
)
def test_piece_lengths(total: int, length: int) -> None:
    assert piece_length_for(total) == length


def test_files_of_different_piece_lengths_or_none_are_no_torrent() -> None:
    with pytest.raises(ValueError, match="one piece length"):
        write_torrent("n", [("a", hash_file([b"x"], PIECE)), ("b", hash_file([b"y"], 2 * PIECE))])
    with pytest.raises(ValueError, match="at least a byte"):
        write_torrent("n", [("a", hash_file([], PIECE))])


def test_another_torrent_is_not_the_one_of_the_manifest(bundle: Bundle) -> None:
    raw = (bundle.folder / TORRENT_NAME).read_bytes()
    with pytest.raises(ShardlineError, match="SHA-256"):
        read_torrent(raw + b" ", bundle.manifest)


def test_tampered_piece_hashes_do_not_lead_to_the_root(bundle: Bundle) -> None:
    value = decoded(bundle)
    root, layer = next(iter(value[b"piece layers"].items()))
    value[b"piece layers"][root] = bytes([layer[0] ^ 1]) + layer[1:]
    replace_torrent(bundle.folder, bencode.encode(value))
    assert "do not lead to the pieces root" in refused(bundle.folder)


@pytest.mark.parametrize("layer", [b"", bytes(31), bytes(32), b"missing"])
def test_piece_hashes_of_a_wrong_length(bundle: Bundle, layer: bytes) -> None:
    value = decoded(bundle)
    root = next(iter(value[b"piece layers"]))
    if layer == b"missing":
        del value[b"piece layers"][root]
    else:
        value[b"piece layers"][root] = layer
    replace_torrent(bundle.folder, bencode.encode(value))
    refused(bundle.folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value.update({b"announce": b"http://tracker.example.org/"}),
        lambda value: value.update({b"url-list": [b"http://example.org/"]}),
        lambda value: value.update({b"creation date": 1}),
        lambda value: value[b"info"].update({b"name": b"../x"}),
        lambda value: value[b"info"].update({b"private": 1}),
        lambda value: value[b"info"].update({b"piece length": 512 << 10}),
        lambda value: value[b"info"][b"file tree"].update({b"more": {b"": {b"length": 0}}}),
        lambda value: next(iter(value[b"info"][b"file tree"].values()))[b""].update({b"length": 5}),
        lambda value: value[b"piece layers"].update({bytes(32): bytes(64)}),
        lambda value: value.pop(b"piece layers"),
    ],
    ids=range(10),
)
def test_anything_else_in_a_torrent_is_refused(bundle: Bundle, change: Any) -> None:
    value = decoded(bundle)
    change(value)
    replace_torrent(bundle.folder, bencode.encode(value))
    refused(bundle.folder)


@pytest.mark.parametrize("raw", [b"", b"le", b"i1e", b"d" * 1000, b"d12:piece layersle"], ids=repr)
def test_what_is_no_torrent_is_refused(bundle: Bundle, raw: bytes) -> None:
    replace_torrent(bundle.folder, raw)
    refused(bundle.folder)


def test_nothing_longer_than_the_manifest_asks_for_is_taken_apart(bundle: Bundle) -> None:
    replace_torrent(bundle.folder, b"l" + b"0:" * 10_000 + b"e")
    assert "are asked for" in refused(bundle.folder)
