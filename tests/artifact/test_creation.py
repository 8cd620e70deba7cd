"""Making bundles: of all forms of models, with every field true, and with nothing left behind when it fails."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from shardline.artifact.bundle import Bundle, TrustPolicy, load_bundle
from shardline.artifact.creation import create_bundle, default_bundle
from shardline.artifact.identity import content_id
from shardline.artifact.signing import key_id
from shardline.errors import ShardlineError
from shardline.formats.gguf_files import read_model
from shardline.formats.merkle import hash_file
from shardline.wire.manifest import Origin
from tests.support.artifacts import (
    CREATED,
    big_gguf,
    publisher,
    safetensors_bytes,
    safetensors_folder,
    signed_bundle,
    split_gguf,
)
from tests.support.gguf_models import metadata, small_model, tensors
from tests.support.gguf_writer import gguf_bytes


def states(folder: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """All that could change of the files in a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            stat = path.stat()
            found[str(path)] = (stat.st_mtime_ns, stat.st_ino, stat.st_mode, path.read_bytes())
    return found


def check_files(bundle: Bundle, folder: Path) -> None:
    for entry, tree in zip(bundle.manifest.files, bundle.trees, strict=True):
        raw = (folder / entry.path).read_bytes()
        assert entry.size == len(raw)
        assert entry.sha256 == hashlib.sha256(raw).hexdigest()
        assert tree == hash_file([raw], bundle.manifest.piece_length)
        assert entry.root == tree.root


def test_a_gguf_file(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    path = big_gguf(models)
    before = states(models)
    steps: list[tuple[int, int]] = []
    bundle = create_bundle(path, tmp_path / "art", CREATED, progress=lambda *step: steps.append(step))
    assert states(models) == before
    assert steps[-1] == (path.stat().st_size,) * 2
    check_files(bundle, models)
    manifest, read = bundle.manifest, read_model(path)
    assert manifest.name == path.name
    assert manifest.content_id == content_id(path)
    assert manifest.created == CREATED.created
    assert (manifest.format.container, manifest.format.gguf_version, manifest.format.alignment) == ("gguf", 3, 32)
    assert manifest.files[0].data_offset == read.header.data_offset
    model = manifest.model
    assert (model.architecture, model.n_layers, model.hidden_size, model.vocab_size) == ("llama", 8, 32, 64)
    assert model.tied_embeddings
    assert model.quantization.tensor_types == {"F32": len(read.tensors)}
    assert model.chat_template is not None
    assert model.chat_template.sha256 == hashlib.sha256(b"{{ messages }}").hexdigest()
    assert {row.name: (row.offset, row.nbytes, row.shape) for row in manifest.tensors} == {
        name: (info.offset, info.nbytes, info.shape) for name, info in read.tensors.items()
    }
    assert {row.layer for row in manifest.tensors} == {*range(8), "embedding", "output"}
    assert sorted(p.name for p in bundle.folder.iterdir()) == ["files", "manifest.json", "model.torrent"]


def test_a_signed_one_with_all_that_a_publisher_can_say(tmp_path: Path) -> None:
    notes = tmp_path / "NOTES.md"
    notes.write_text("notes")
    description = replace(
        CREATED,
        name="Small",
        version="1.0",
        license="MIT",
        source=(Origin(url="hf://somebody/small", revision="abc"),),
        webseeds=("https://example.org/",),
        include=(notes,),
    )
    bundle = signed_bundle(big_gguf(tmp_path), tmp_path / "art", description)
    manifest = bundle.manifest
    assert (manifest.name, manifest.version, manifest.license) == ("Small", "1.0", "MIT")
    assert manifest.source == description.source
    assert manifest.transport.webseeds == ("https://example.org/",)
    assert manifest.torrent_path(manifest.files[0]) == "Small/llama-8.gguf"
    assert (bundle.folder / "files" / "NOTES.md").read_text() == "notes"
    assert bundle.signed_by == key_id(publisher().public_key())


@pytest.mark.parametrize("named", [0, 2])
def test_a_split_gguf(tmp_path: Path, named: int) -> None:
    paths = split_gguf(tmp_path)
    bundle = create_bundle(paths[named], tmp_path / "art", CREATED)
    check_files(bundle, tmp_path)
    assert bundle.manifest.name == "tiny"
    assert [entry.path for entry in bundle.manifest.files] == [path.name for path in paths]
    assert bundle.manifest.content_id == content_id(paths[0])
    assert {row.file for row in bundle.manifest.tensors} == {0, 1, 2}
    assert default_bundle(paths[named]) == tmp_path / "tiny.artifact"


def test_a_safetensors_folder(tmp_path: Path) -> None:
    folder = safetensors_folder(tmp_path / "model")
    before = states(folder)
    bundle = create_bundle(folder, default_bundle(folder), CREATED)
    assert bundle.folder == tmp_path / "model.artifact"
    assert states(folder) == before
    check_files(bundle, folder)
    manifest = bundle.manifest
    assert manifest.name == "model"
    assert manifest.content_id == content_id(folder)
    assert (manifest.model.n_layers, manifest.model.hidden_size) == (4, 8)
    assert manifest.model.tokenizer is not None
    assert manifest.model.tokenizer.sha256 == hashlib.sha256(b"{}").hexdigest()
    assert manifest.model.chat_template is not None
    assert manifest.model.chat_template.source == "tokenizer_config.json"
    assert [entry.path for entry in manifest.small_files] == [
        "LICENSE", "config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip


def test_files_behind_links(tmp_path: Path) -> None:
    """As in caches of model hubs: names in one folder, contents in another."""
    folder = safetensors_folder(tmp_path / "model")
    blobs, names = tmp_path / "blobs", tmp_path / "names"
    names.mkdir()
    folder.rename(blobs)
    for path in blobs.iterdir():
        (names / path.name).symlink_to(path)
    assert create_bundle(names, tmp_path / "art", CREATED).manifest.content_id == content_id(names)


def test_tokenizer_digest_depends_on_the_tokenizer_alone(tmp_path: Path) -> None:
    digests = []
    for number, keys in enumerate(({}, {"general.name": "Other"}, {"tokenizer.ggml.bos_token_id": 1})):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(gguf_bytes({**metadata("llama", 8), **keys}, tensors(8)))
        tokenizer = create_bundle(path, tmp_path / f"{number}.artifact", CREATED).manifest.model.tokenizer
        assert tokenizer is not None
        assert tokenizer.model == "gpt2"
        digests.append(tokenizer.sha256)
    assert digests[0] == digests[1] != digests[2]


def test_twin_files_are_refused(tmp_path: Path) -> None:
    """A client that fetches parts of the second of two equal files can wait for ever."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type":"llama","num_hidden_layers":1,"hidden_size":8}')
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    tensors = [f"model.layers.0.{name}.weight" for name in ("a", "b")]
    for name in names:
        (folder / name).write_bytes(safetensors_bytes({tensor: ([8], bytes(32)) for tensor in tensors}))
    index = {"weight_map": dict(zip(tensors, names, strict=True))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ShardlineError, match=f"stands in {names[0]} and in {names[1]}"):
        create_bundle(folder, tmp_path / "art", CREATED)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_an_output_that_is_there_is_left_alone(tmp_path: Path) -> None:
    path = big_gguf(tmp_path)
    for output in (path, tmp_path, tmp_path / "link"):
        if output.name == "link":
            output.symlink_to(tmp_path / "nowhere")
        with pytest.raises(ShardlineError, match="is there already") as caught:
            create_bundle(path, output, CREATED)
        assert caught.value.code == "setting_invalid"


def test_nothing_is_written_into_a_model_folder(tmp_path: Path) -> None:
    folder = safetensors_folder(tmp_path / "model")
    with pytest.raises(ShardlineError, match="inside the model's own folder"):
        create_bundle(folder, folder / "art", CREATED)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"<!DOCTYPE html><html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "LFS"),
        (b"", "empty"),
        (b"GGUF\x03\x00\x00\x00", "cut short"),
    ],
)
def test_what_is_no_model_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ShardlineError) as caught:
        create_bundle(path, tmp_path / "art", CREATED)
    assert caught.value.code == "model_file_invalid"
    assert words.lower() in caught.value.message.lower()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.gguf"]


def test_a_model_that_changes_leaves_nothing_behind(tmp_path: Path) -> None:
    path = big_gguf(tmp_path)

    def change(_done: int, _total: int) -> None:
        os.utime(path, ns=(1, 1))

    with pytest.raises(ShardlineError, match="changed while it was read"):
        create_bundle(path, tmp_path / "art", CREATED, progress=change)
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name]


def test_an_interrupted_one_leaves_nothing_behind(tmp_path: Path) -> None:
    path = big_gguf(tmp_path)

    def interrupt(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        create_bundle(path, tmp_path / "art", CREATED, progress=interrupt)
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    path = big_gguf(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ShardlineError) as caught:
        create_bundle(path, tmp_path / "file" / "art", CREATED)
    assert caught.value.code == "state_unwritable"


def test_a_full_disk_and_a_small_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = big_gguf(tmp_path)
    with pytest.raises(ShardlineError, match=r"absent\.md cannot be read"):
        create_bundle(path, tmp_path / "art", replace(CREATED, include=(tmp_path / "absent.md",)))

    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ShardlineError, match="No space left") as caught:
        create_bundle(path, tmp_path / "art", CREATED)
    assert caught.value.code == "disk_full"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("name", ["../x", "a/b", "con", "x" * 300])
def test_names_that_no_system_stores(tmp_path: Path, name: str) -> None:
    path = small_model(tmp_path).paths[0]
    with pytest.raises(ShardlineError, match="invalid manifest: name") as caught:
        create_bundle(path, tmp_path / "art", replace(CREATED, name=name))
    assert caught.value.code == "artifact_invalid"
    assert not (tmp_path / "art").exists()


def test_a_part_of_the_model_is_not_replaced_by_another_file(tmp_path: Path) -> None:
    folder = safetensors_folder(tmp_path / "model")
    other = tmp_path / "tokenizer.json"
    other.write_text("[]")
    with pytest.raises(ShardlineError, match=r"tokenizer\.json is part of the model"):
        create_bundle(folder, tmp_path / "art", replace(CREATED, include=(other,)))


def test_it_is_read_as_any_other(tmp_path: Path) -> None:
    bundle = create_bundle(big_gguf(tmp_path), tmp_path / "art", CREATED)
    assert load_bundle(tmp_path / "art", TrustPolicy(allow_unsigned=True)) == bundle
