"""The manifest: what a right one is, and that each wrong one is refused as a whole, with a sentence."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from shardline.errors import ShardlineError
from shardline.wire.manifest import (
    COLUMNS,
    MANIFEST_BYTES_LIMIT,
    SCHEMA,
    check_path,
    decode_manifest,
    encode_manifest,
    manifest_digest,
)

HEX = "0123456789abcdef" * 4
GOOD: dict[str, Any] = {
    "schema": SCHEMA,
    "content_id": f"mac1-{HEX}",
    "name": "Tiny",
    "version": "1",
    "license": "Apache-2.0",
    "created": "2026-01-31T12:00:00Z",
    "source": [{"url": "hf://somebody/tiny", "revision": "abc"}],
    "format": {"container": "gguf", "gguf_version": 3, "alignment": 32},
    "model": {
        "architecture": "llama",
        "n_layers": 2,
        "hidden_size": 32,
        "vocab_size": 8,
        "context_length": 128,
        "tied_embeddings": True,
        "quantization": {"tensor_types": {"F32": 3}, "file_type": 0},
        "tokenizer": {"sha256": HEX, "source": "gguf", "model": "gpt2"},
        "chat_template": {"sha256": HEX, "source": "gguf"},
    },
    "files": [
        {"path": "a-00001-of-00002.gguf", "size": 1000, "sha256": HEX, "bt2_pieces_root": HEX, "data_offset": 500},
        {"path": "a-00002-of-00002.gguf", "size": 600, "sha256": HEX, "bt2_pieces_root": "0" * 64, "data_offset": 32},
    ],
    "tensor_columns": list(COLUMNS),
    "tensors": [
        ["token_embd.weight", 0, 512, 128, "F32", [32, 1], "embedding"],
        ["blk.0.attn_q.weight", 0, 640, 360, "F32", [90], 0],
        ["blk.1.attn_q.weight", 1, 32, 64, "F32", [16], 1],
    ],
    "small_files": [{"path": "LICENSE", "size": 0, "sha256": HEX}],
    "transport": {
        "bittorrent": {"meta_version": 2, "piece_length": 262144, "info_hash_v2": HEX, "torrent_sha256": HEX},
        "webseeds": ["https://example.org/models/"],
    },
}


def raw_of(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def refused(raw: bytes) -> str:
    with pytest.raises(ShardlineError) as caught:
        decode_manifest(raw)
    assert caught.value.code == "artifact_invalid"
    assert len(caught.value.message) < 600
    assert caught.value.message.isprintable()
    return caught.value.message


def test_a_right_manifest() -> None:
    manifest = decode_manifest(raw_of(GOOD))
    assert manifest.piece_length == 262144
    assert manifest.total_bytes == 1600
    assert manifest.files[1].root == bytes(32)
    assert manifest.tensors[0].layer == "embedding"
    assert manifest.tensors[1].nbytes == 360
    assert manifest.torrent_path(manifest.files[0]) == "Tiny/a-00001-of-00002.gguf"
    raw = encode_manifest(manifest)
    assert raw == raw_of(GOOD)
    assert len(manifest_digest(raw)) == 64


def test_a_file_that_is_alone_and_called_so_lies_in_no_folder() -> None:
    value = deepcopy(GOOD) | {"name": "a-00001-of-00002.gguf"}
    assert decode_manifest(raw_of(value)).torrent_path(decode_manifest(raw_of(value)).files[0]) == (
        "a-00001-of-00002.gguf/a-00001-of-00002.gguf"
    )
    del value["files"][1], value["tensors"][2]
    manifest = decode_manifest(raw_of(value))
    assert manifest.torrent_path(manifest.files[0]) == "a-00001-of-00002.gguf"


def test_what_is_not_stated_is_absent() -> None:
    value = deepcopy(GOOD)
    for key in ("version", "license", "source", "small_files"):
        del value[key]
    for key in ("vocab_size", "tokenizer", "chat_template"):
        del value["model"][key]
    manifest = decode_manifest(raw_of(value))
    assert (manifest.version, manifest.model.tokenizer, manifest.small_files) == (None, None, ())
    assert encode_manifest(manifest) == raw_of(value)


def test_keys_of_others_are_covered_by_the_digest_and_mean_nothing() -> None:
    assert decode_manifest(raw_of(GOOD | {"x-notes": {"any": ["thing"]}})) == decode_manifest(raw_of(GOOD))


HOSTILE_PATHS = [
    "../x", "a/../../x", "/etc/x", "C:\\x", "C:x", "a\\..\\..\\x", "..%2fx", "\\\\host\\s", "a/./b", "", ".", "..",
    "a\x00b", "x" * 300, "a/" * 600 + "x", "a//b", "a/", " a", "a ", "a.", ".hidden", "a\nb", "\x1b[31m", "con",
    "NUL.txt", "com1", "a\u202eb", "a?b", "a*b", 'a"b', "a<b", "a|b", "a:b", "\u0085", "\ud800",
]  # fmt: skip


@pytest.mark.parametrize("path", HOSTILE_PATHS, ids=ascii)
def test_paths_that_lead_elsewhere(path: str) -> None:
    with pytest.raises(ShardlineError) as caught:
        check_path(path)
    assert caught.value.code == "artifact_invalid"


@pytest.mark.parametrize("path", ["a.gguf", "Modèle (v1.2)-00001-of-00002.gguf", "sub/model.safetensors", "模型.gguf"])
def test_paths_that_are_right(path: str) -> None:
    check_path(path)


@pytest.mark.parametrize("place", ["files", "small_files"])
def test_a_manifest_with_one_bad_path_is_refused_as_a_whole(place: str) -> None:
    value = deepcopy(GOOD)
    value[place][0]["path"] = "../x"
    assert "path" in refused(raw_of(value))


def put(*keys: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        target: Any = manifest
        for key in keys[:-1]:
            target = target[key]
        target[keys[-1]] = value

    return change


WRONG: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (put("unknown", value=1), "unknown"),
    (put("\x1b[31m", value=1), "unknown"),
    (put("schema", value="\x1b[31m"), "schema"),
    (put("model", "unknown", value=1), "unknown"),
    (put("files", 0, "unknown", value=1), "unknown"),
    (put("transport", "bittorrent", "unknown", value=1), "unknown"),
    (put("version", value=None), "empty value"),
    (put("small_files", value=[]), "empty value"),
    (put("transport", "webseeds", value=[]), "empty value"),
    (put("model", "vocab_size", value=None), "empty value"),
    (put("x-\u00e9", value=1), "unknown"),
    (put("x-half", value=0.5), "integers"),
    (put("x-long", value="x" * 65537), "65536"),
    (put("version", value="e\u0301"), "normal form C"),
    (put("files", 0, "path", value="e\u0301"), "normal form C"),
    (put("tensors", 0, 0, value="e\u0301"), "normal form C"),
    (put("model", "quantization", "tensor_types", value={"f32": 1}), "tensor type"),
    (put("schema", value="shardline/model-artifact/v2"), "schema"),
    (put("content_id", value="mac1-../x"), "content_id"),
    (put("content_id", value=f"sha256:{HEX}"), "content_id"),
    (put("name", value="../x"), "name"),
    (put("name", value="a/b"), "name"),
    (put("name", value=""), "name"),
    (put("created", value="yesterday"), "created"),
    (put("created", value="2026-01-31T12:00:00+01:00"), "created"),
    (put("version", value="\x1b[2J"), "shown"),
    (put("license", value="x" * 501), "license"),
    (put("source", 0, "url", value="hf://\u202ex"), "shown"),
    (put("format", "container", value="pickle"), "container"),
    (put("format", "alignment", value=0), "alignment"),
    (put("model", "n_layers", value=0), "n_layers"),
    (put("model", "n_layers", value=10**9), "n_layers"),
    (put("model", "hidden_size", value=-1), "hidden_size"),
    (put("model", "hidden_size", value=True), "hidden_size"),
    (put("model", "hidden_size", value="32"), "hidden_size"),
    (put("model", "architecture", value="\r"), "shown"),
    (put("model", "tokenizer", "sha256", value=HEX.upper()), "sha256"),
    (put("files", value=[]), "files"),
    (put("files", 0, "size", value=0), "size"),
    (put("files", 0, "size", value=2**53), "size"),
    (put("files", 0, "size", value=999), "ends behind"),
    (put("files", 0, "sha256", value="sha256:../../x"), "sha256"),
    (put("files", 0, "sha256", value=HEX + "0"), "sha256"),
    (put("files", 0, "bt2_pieces_root", value="0" * 64), "equal content"),
    (put("files", 0, "data_offset", value=1001), "header"),
    (put("files", 0, "path", value="LICENSE"), "twice"),
    (put("files", 1, "path", value="A-00001-OF-00002.GGUF"), "twice"),
    (put("files", 0, "path", value="license/x.gguf"), "file and a folder"),
    (put("tensor_columns", value=["name"]), "tensor_columns"),
    (put("tensors", value=[]), "tensors"),
    (put("tensors", 0, 0, value=""), "name"),
    (put("tensors", 0, 0, value="x" * 513), "name"),
    (put("tensors", 0, 0, value="../../etc\n\x1b[31m"), "shown"),
    (put("tensors", 0, 0, value="blk.0.attn_q.weight"), "twice"),
    (put("tensors", 0, 1, value=2), "lies in file 2 of 2"),
    (put("tensors", 0, 1, value=-1), "tensors"),
    (put("tensors", 0, 2, value=499), "header"),
    (put("tensors", 0, 2, value=2**53 - 1), "ends behind"),
    (put("tensors", 0, 3, value=129), "another tensor"),
    (put("tensors", 1, 3, value=361), "ends behind"),
    (put("tensors", 0, 4, value="f32"), "type"),
    (put("tensors", 0, 5, value=[1] * 9), "tensors"),
    (put("tensors", 0, 5, value=[-1]), "tensors"),
    (put("tensors", 0, 6, value="elsewhere"), "tensors"),
    (put("tensors", 0, 6, value=4096), "tensors"),
    (put("tensors", 0, value=["a", 0, 512, 1, "F32", [1], 0, "more"]), "at most length 7"),
    (put("tensors", 0, value=["a", 0, 512, 1, "F32", [1]]), "tensors"),
    (put("tensors", 0, value={"name": "a"}), "tensors"),
    (put("small_files", 0, "size", value=-1), "size"),
    (put("transport", "bittorrent", "meta_version", value=1), "meta_version"),
    (put("transport", "bittorrent", "piece_length", value=262145), "power of two"),
    (put("transport", "bittorrent", "piece_length", value=1 << 40), "piece_length"),
    (put("transport", "bittorrent", "piece_length", value=1), "piece_length"),
    (put("transport", "webseeds", value=["file:///etc/"]), "web seed"),
    (put("transport", "webseeds", value=["https://user:secret@example.org/"]), "web seed"),
    (put("transport", "webseeds", value=["https://example.org/x"]), "web seed"),
    (put("transport", "webseeds", value=["https://example.org/ /"]), "web seed"),
    (put("transport", "webseeds", value=["https://example.org/?q=/"]), "web seed"),
    (put("transport", "webseeds", value=["https://example.org/"] * 101), "101 web seeds"),
]


@pytest.mark.parametrize(("change", "words"), WRONG, ids=[f"{i}-{words}" for i, (_, words) in enumerate(WRONG)])
def test_each_wrong_field_is_refused_by_name(change: Callable[[dict[str, Any]], None], words: str) -> None:
    value = deepcopy(GOOD)
    change(value)
    assert words in refused(raw_of(value))


@pytest.mark.parametrize("key", sorted(GOOD.keys() - {"version", "license", "source", "small_files"}))
def test_each_needed_key_is_missed(key: str) -> None:
    value = deepcopy(GOOD)
    del value[key]
    assert key in refused(raw_of(value))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"null",
        b"<!DOCTYPE html>",
        raw_of(GOOD) + b"\n",
        json.dumps(GOOD).encode(),
        raw_of(GOOD).replace(b'"name":"Tiny"', b'"name":"Tiny","name":"Tiny"'),
        raw_of(GOOD).replace(b'"size":600', b'"size":6e2'),
        raw_of(GOOD).replace(b'"size":600', b'"size":600.0'),
        raw_of(GOOD).replace(b'"size":600', b'"size":' + b"9" * 5000),
        raw_of(GOOD).replace(b"Tiny", b"T\\u0069ny"),
        raw_of(GOOD).replace(b"Tiny", b"\xff"),
        raw_of(GOOD | {"x-deep": 0}).replace(b'"x-deep":0', b'"x-deep":' + b"[" * 30_000 + b"]" * 30_000),
        raw_of(GOOD).replace(b'"files":[', b'"files":' + b"[" * 100_000),
    ],
    ids=range(14),
)
def test_bytes_that_are_not_canonical_are_refused(raw: bytes) -> None:
    refused(raw)


def test_a_huge_manifest_is_refused_by_its_length_alone() -> None:
    raw = bytes(MANIFEST_BYTES_LIMIT + 1)
    tracemalloc.start()
    try:
        refused(raw)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("key", ["tensors", "files", "x-more"])
def test_bytes_of_another_shape_take_no_memory(key: str) -> None:
    """Three bytes of an empty list would become 64 of memory."""
    raw = raw_of(GOOD | {key: 0}).replace(f'"{key}":0'.encode(), f'"{key}":['.encode() + b"[]," * 5_000_000 + b"[]]")
    tracemalloc.start()
    try:
        refused(raw)
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()


def test_too_many_tensors() -> None:
    value = deepcopy(GOOD)
    value["tensors"] = [["t", 0, 0, 0, "F32", [], 0]] * 200_001
    assert "tensors" in refused(raw_of(value))
