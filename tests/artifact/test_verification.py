"""Files against an artifact: each kind of damage is found, named, and told from the others."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardline.artifact.bundle import Bundle, TrustPolicy, load_bundle
from shardline.artifact.verification import Report, check_files, check_header, held_pieces, verify_model
from shardline.errors import ShardlineError
from tests.support.artifacts import (
    big_gguf,
    change_manifest,
    publisher,
    safetensors_folder,
    signed_bundle,
    split_gguf,
)

TRUST = TrustPolicy((publisher().public_key(),))


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def described(model: Path, tmp_path: Path) -> Bundle:
    return signed_bundle(model, tmp_path / "art")


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def lied_about(bundle: Bundle, change: Callable[[dict[str, Any]], None]) -> Bundle:
    """The bundle of a publisher who signs what is not so."""
    change_manifest(bundle.folder, change)
    return load_bundle(bundle.folder, TRUST)


@pytest.mark.parametrize("form", ["gguf", "split", "safetensors"])
def test_whole_models_hold(tmp_path: Path, models: Path, form: str) -> None:
    if form == "gguf":
        model, folder = big_gguf(models), models
    elif form == "split":
        model, folder = split_gguf(models)[1], models
    else:
        model = folder = safetensors_folder(models / "model")
    steps: list[tuple[int, int]] = []
    bundle = described(model, tmp_path)
    report = verify_model(bundle, folder, progress=lambda *step: steps.append(step))
    assert report.holds
    assert [found.state for found in report.files] == ["ok"] * len(bundle.manifest.files)
    assert (report.fault, report.warnings) == (None, ())
    assert steps[-1] == (bundle.manifest.total_bytes,) * 2


def test_one_wrong_byte_is_found_in_its_piece(tmp_path: Path, models: Path) -> None:
    path = big_gguf(models)
    bundle = described(path, tmp_path)
    flip(path, 3 * bundle.manifest.piece_length + 7)
    report = verify_model(bundle, models)
    assert not report.holds
    assert (report.files[0].state, report.files[0].bad_pieces) == ("damaged", (3,))
    assert report.files[0].reason == "1 of 5 pieces are wrong"
    assert held_pieces(bundle, models) == {0: frozenset({0, 1, 2, 4})}


def test_each_file_is_judged_by_itself(tmp_path: Path, models: Path) -> None:
    paths = split_gguf(models, 4)
    bundle = described(paths[0], tmp_path)
    paths[0].unlink()
    os.truncate(paths[1], paths[1].stat().st_size - 1)
    flip(paths[2], 100)
    report = verify_model(bundle, models)
    assert [found.state for found in report.files] == ["missing", "wrong size", "damaged", "ok"]
    assert report.fault is None
    assert not report.holds


def test_a_folder_in_place_of_a_file(tmp_path: Path, models: Path) -> None:
    path = big_gguf(models)
    bundle = described(path, tmp_path)
    path.unlink()
    path.mkdir()
    assert verify_model(bundle, models).files[0].state == "unreadable"


def test_pieces_of_sparse_and_short_files(tmp_path: Path, models: Path) -> None:
    path = big_gguf(models)
    bundle = described(path, tmp_path)
    raw, length = path.read_bytes(), bundle.manifest.piece_length
    path.unlink()
    assert held_pieces(bundle, models) == {0: frozenset()}
    with path.open("wb") as file:
        file.truncate(len(raw))
        file.seek(length)
        file.write(raw[length : 2 * length])
    assert held_pieces(bundle, models) == {0: frozenset({1})}
    path.write_bytes(raw[: 3 * length + 5])
    assert held_pieces(bundle, models) == {0: frozenset({0, 1, 2})}


def row(manifest: dict[str, Any], name: str) -> list[Any]:
    found: list[Any] = next(r for r in manifest["tensors"] if r[0] == name)
    return found


LIES: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (lambda m: row(m, "blk.1.attn_q.weight").__setitem__(0, "blk.1.attn_v.weight"), r"blk\.1\.attn_"),
    (lambda m: row(m, "blk.1.attn_q.weight").__setitem__(3, 4), r"blk\.1\.attn_q"),
    (lambda m: row(m, "blk.1.attn_q.weight").__setitem__(4, "F16"), r"blk\.1\.attn_q"),
    (lambda m: row(m, "blk.1.attn_q.weight").__setitem__(5, [8, 32]), r"blk\.1\.attn_q"),
    (lambda m: m["tensors"].remove(row(m, "blk.1.attn_q.weight")), r"blk\.1\.attn_q"),
    (lambda m: m["tensors"].append(["more", 0, m["files"][0]["size"], 0, "F32", [0], "shared"]), "more"),
    (
        lambda m: m["files"][0].update(data_offset=m["files"][0]["data_offset"] - 32),
        "data_offset|header|ends|lies|behind",
    ),
    (lambda m: m["model"].update(n_layers=7), "n_layers is 7 in the manifest, but 8"),
    (lambda m: m["model"].update(hidden_size=64), "hidden_size"),
    (lambda m: m["model"].update(architecture="gemma"), "architecture"),
    (lambda m: m["model"].update(vocab_size=65), "vocab_size"),
    (lambda m: m["model"].update(context_length=4096), "context_length"),
    (lambda m: m["model"].update(tied_embeddings=False), "tied_embeddings"),
    (lambda m: m["model"]["quantization"].update(file_type=7), "quantization"),
    (lambda m: m["model"]["tokenizer"].update(sha256="0" * 64), "tokenizer"),
    (lambda m: m["model"].pop("chat_template"), "chat_template"),
    (lambda m: m["format"].update(gguf_version=2), "version"),
    (lambda m: m["format"].update(alignment=64), "alignment"),
]


@pytest.mark.parametrize(("change", "words"), LIES, ids=range(len(LIES)))
def test_a_signed_lie_about_the_header_is_found(
    tmp_path: Path, models: Path, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    bundle = lied_about(described(big_gguf(models), tmp_path), change)
    report = verify_model(bundle, models)
    assert [found.state for found in report.files] == ["ok"]
    assert not report.holds
    with pytest.raises(ShardlineError, match=words):
        check_files(bundle, models)


def test_a_lie_about_a_later_part(tmp_path: Path, models: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["tensors"][-1][4] = "F16"

    paths = split_gguf(models)
    bundle = lied_about(described(paths[0], tmp_path), change)
    with pytest.raises(ShardlineError, match="tensor") as caught:
        check_files(bundle, models)
    assert caught.value.code == "artifact_mismatch"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m["tensors"][0].__setitem__(5, [8, 16]), "embed_tokens"),
        (lambda m: m["model"].update(n_layers=3), "n_layers"),
        (lambda m: m["model"]["tokenizer"].update(sha256="0" * 64), "tokenizer"),
        (lambda m: m["model"]["chat_template"].update(sha256="0" * 64), "chat_template"),
    ],
    ids=range(4),
)
def test_a_lie_about_a_folder(
    tmp_path: Path, models: Path, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    folder = safetensors_folder(models / "model")
    bundle = lied_about(described(folder, tmp_path), change)
    with pytest.raises(ShardlineError, match=words):
        check_files(bundle, folder)


def test_a_wrong_sha256_of_a_right_file(tmp_path: Path, models: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][0]["sha256"] = "0" * 64

    report = verify_model(lied_about(described(big_gguf(models), tmp_path), change), models)
    assert (report.files[0].state, report.files[0].bad_pieces) == ("damaged", ())
    assert "blame the publisher" in str(report.files[0].reason)


def test_another_layer_column_is_a_warning(tmp_path: Path, models: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        row(manifest, "blk.1.attn_q.weight")[6] = "shared"

    report = verify_model(lied_about(described(big_gguf(models), tmp_path), change), models)
    assert report.holds
    assert "blk.1.attn_q.weight" in report.warnings[0]


def test_the_first_bytes_are_enough_to_check_a_header(tmp_path: Path, models: Path) -> None:
    path = big_gguf(models)
    manifest = described(path, tmp_path).manifest
    raw = path.read_bytes()[: manifest.files[0].data_offset]
    check_header(manifest, 0, raw)
    for bad in (raw[:-64], bytes(len(raw)), b"", raw.replace(b"blk.1.attn_q.", b"blk.1.attn_v.")):
        with pytest.raises(ShardlineError) as caught:
            check_header(manifest, 0, bad)
        assert caught.value.code in ("artifact_mismatch", "model_file_invalid")


def test_files_with_holes_behind_the_header_pass_that_check(tmp_path: Path, models: Path) -> None:
    path = big_gguf(models)
    bundle = described(path, tmp_path)
    raw, end = path.read_bytes(), bundle.manifest.files[0].data_offset
    path.write_bytes(raw[:end])
    with pytest.raises(ShardlineError, match="another size"):
        check_files(bundle, models)
    os.truncate(path, len(raw))
    check_files(bundle, models)
    path.unlink()
    with pytest.raises(ShardlineError, match="cannot be read"):
        check_files(bundle, models)


def test_a_report_without_files_does_not_hold() -> None:
    assert Report((), None, ()).holds
    assert not Report((), "differs", ()).holds
