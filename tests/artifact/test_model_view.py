"""A model of the store under the names of its publisher."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardline.artifact.adoption import adopt
from shardline.artifact.model_view import make_view, model_path
from shardline.artifact.store import Store
from shardline.formats.gguf_files import read_model
from shardline.formats.safetensors import read_folder
from tests.support.artifacts import safetensors_folder, split_gguf
from tests.support.stores import described


def test_a_split_model_has_its_names_back(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    paths = split_gguf(tmp_path / "model")
    store = Store(tmp_path / "store", reserve_bytes=0)
    with store.add(described(paths[0], tmp_path / "bundle")) as artifact:
        for number, path in enumerate(paths):
            assert adopt(artifact, number, path, refer=False) is not None
        made = make_view(artifact)
        assert made == model_path(artifact) and made.name == paths[0].name
        assert read_model(made).tensors.keys() == read_model(paths[0]).tensors.keys()
    store.close()


@pytest.mark.parametrize("refer", [True, False])
def test_a_folder_with_its_small_files(tmp_path: Path, refer: bool) -> None:
    folder = safetensors_folder(tmp_path / "model")
    store = Store(tmp_path / "store", reserve_bytes=0)
    with store.add(described(folder, tmp_path / "bundle")) as artifact:
        for number, entry in enumerate(artifact.bundle.manifest.files):
            assert adopt(artifact, number, folder / entry.path, refer=refer) is not None
        made = make_view(artifact)
        assert read_folder(made).tensors == read_folder(folder).tensors
        assert (made / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    store.close()


def test_links_follow_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    paths = split_gguf(tmp_path / "model", 2)
    store = Store(tmp_path / "store", reserve_bytes=0)
    with store.add(described(paths[0], tmp_path / "bundle")) as artifact:
        for number, path in enumerate(paths):
            assert adopt(artifact, number, path) is not None
        assert make_view(artifact).resolve() == paths[0].resolve()
        kept = paths[0].rename(tmp_path / "moved.gguf")
        assert adopt(artifact, 0, kept, refer=False) is not None
        assert make_view(artifact).read_bytes() == kept.read_bytes()
    store.close()
