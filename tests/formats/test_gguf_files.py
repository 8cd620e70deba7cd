"""Models in one file and in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardline.errors import ShardlineError
from shardline.formats.gguf_files import SHARD_LAYERS, part_paths, read_model
from tests.support.gguf_writer import LLAMA, Tensor, Typed, gguf_bytes, llama_tensors


def write_parts(folder: Path, *, count: int = 3, changes: dict[int, dict[str, Any]] | None = None) -> list[Path]:
    tensors = llama_tensors()
    paths = []
    for i in range(count):
        keys = LLAMA if i == 0 else {}
        split = {
            "split.no": Typed("u16", i), "split.count": Typed("u16", count),
            "split.tensors.count": Typed("i32", len(tensors)),
        }  # fmt: skip
        path = folder / f"tiny-{i + 1:05d}-of-{count:05d}.gguf"
        path.write_bytes(gguf_bytes({**keys, **split, **(changes or {}).get(i, {})}, tensors[i::count]))
        paths.append(path)
    return paths


def test_one_file_is_one_part(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf_bytes(LLAMA, llama_tensors(), tail=b"x" * 33))
    model = read_model(path)
    assert model.paths == (path,)
    assert list(model.tensors) == [t.name for t in llama_tensors()]
    assert model.header.text("general.architecture") == "llama"
    assert model.warnings == ["tiny.gguf: 33 bytes behind the last tensor belong to none"]


@pytest.mark.parametrize(("layers", "words"), [([2, 5, 8], "layers 2:5 of 8"), ([], "a part of a model")])
def test_the_file_of_a_shard_is_no_model(tmp_path: Path, layers: list[int], words: str) -> None:
    path = tmp_path / "part.gguf"
    keys = {**LLAMA, SHARD_LAYERS: Typed("u32", layers)}
    path.write_bytes(gguf_bytes(keys, llama_tensors()))
    with pytest.raises(ShardlineError, match=words) as refused:
        read_model(path)
    assert refused.value.code == "model_file_invalid" and "Name the whole model" in refused.value.advice


@pytest.mark.parametrize("named", [0, 1, 2])
def test_any_part_names_the_whole_model(tmp_path: Path, named: int) -> None:
    paths = write_parts(tmp_path)
    model = read_model(paths[named])
    assert list(model.paths) == paths
    assert model.tensors.keys() == {t.name for t in llama_tensors()}
    assert model.header.text("general.architecture") == "llama"
    for name, info in model.tensors.items():
        assert model.headers[info.file].tensors[name].offset == info.offset


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    paths[1].unlink()
    with pytest.raises(ShardlineError, match=r"1 of 3 parts are missing: tiny-00002-of-00003\.gguf") as caught:
        part_paths(paths[0])
    assert caught.value.code == "model_file_invalid"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({1: {"split.no": Typed("u16", 2)}}, "part 3 of 3, its name says 2 of 3"),
        ({2: {"split.count": Typed("u16", 4)}}, "says that it is part 3 of 4"),
        ({0: {"split.tensors.count": Typed("i32", 99)}}, "key split.tensors.count is 99"),
        ({0: {"split.count": "3"}}, "key split.count is the string '3'"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit(tmp_path: Path, changes: dict[int, dict[str, Any]], words: str) -> None:
    with pytest.raises(ShardlineError, match=words):
        read_model(write_parts(tmp_path, changes=changes)[0])


def test_a_renamed_part_is_not_taken_for_a_model(tmp_path: Path) -> None:
    renamed = write_parts(tmp_path)[0].rename(tmp_path / "model.gguf")
    with pytest.raises(ShardlineError, match="is one of 3 parts"):
        read_model(renamed)


def test_a_tensor_in_two_parts(tmp_path: Path) -> None:
    for i in (1, 2):
        keys = {"split.no": i - 1, "split.count": 2}
        (tmp_path / f"m-{i:05d}-of-00002.gguf").write_bytes(gguf_bytes(keys, [Tensor("a")]))
    with pytest.raises(
        ShardlineError, match=r"tensor a stands in m-00001-of-00002\.gguf and in m-00002-of-00002\.gguf"
    ):
        read_model(tmp_path / "m-00001-of-00002.gguf")


@pytest.mark.parametrize("name", ["m-00003-of-00002.gguf", "m-00000-of-00002.gguf", "m-00001-of-99999.gguf"])
def test_names_that_count_wrongly(name: str) -> None:
    with pytest.raises(ShardlineError, match="counts its parts wrongly"):
        part_paths(Path("/nowhere") / name)
