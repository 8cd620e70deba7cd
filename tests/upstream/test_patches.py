"""The patches are what they say: they apply to the pinned source exactly, and each hunk has its sentence."""

from __future__ import annotations

import io
import json
import tarfile
import tomllib
from pathlib import Path

import pytest

from upstream import patches
from upstream.page import SENTENCES
from upstream.source import APPLIED, Source, patches_digest, pinned_version


def test_each_hunk_has_a_sentence() -> None:
    sentences = tomllib.loads(SENTENCES.read_text(encoding="utf-8"))
    assert sorted(sentences) == [path.name for path in patches.patches()]
    for path in patches.patches():
        expected = {change.path: len(change.hunks) for change in patches.read_patch(path)}
        assert {name: len(said) for name, said in sentences[path.name].items()} == expected


def test_what_was_applied_are_these_patches_and_to_the_pinned_version() -> None:
    """Everywhere, without the source: a patch or a pin that was changed and not tried is noticed."""
    kept = json.loads(APPLIED.read_text(encoding="utf-8"))
    assert (kept["version"], kept["patches_sha256"]) == (pinned_version(), patches_digest()), "make upstream"


def test_the_patches_apply_to_the_pinned_source() -> None:
    """Line for line. The source is 50 MB, so it is not fetched for this."""
    source = Source(pinned_version())
    if source.package() is None:
        pytest.skip(f"the source of llama-cpp-python {source.version} is not there: make upstream fetches it")
    assert source.applied() == json.loads(APPLIED.read_text(encoding="utf-8"))
    before = source.texts()
    after = patches.applied_texts(before)
    assert sorted(after) == patches.touched()
    assert all(after[path] != text for path, text in before.items())


def test_no_file_of_llama_cpp_is_kept_here() -> None:
    """Our lines with one line of context on either side, and nothing else."""
    for path in patches.patches():
        files, hunks, added, removed = patches.counts(path)
        context = sum(hunk.count(" ") for change in patches.read_patch(path) for hunk in change.hunks)
        assert files and context <= 5 * hunks
        assert added < 250 and removed < 60


def write(folder: Path, text: str) -> Path:
    path = folder / "some.patch"
    path.write_text(text)
    return path


HEAD = "words\n\n--- a/x\n+++ b/x\n"


def test_a_patch_applies_where_it_says_or_not_at_all(tmp_path: Path) -> None:
    (change,) = patches.read_patch(write(tmp_path, HEAD + "@@ -2,2 +2,3 @@\n b\n-c\n+C\n+d\n"))
    assert change.applied("a\nb\nc\ne\n") == "a\nb\nC\nd\ne\n"
    for other in ("a\nb\nx\ne\n", "b\nc\n", "a\na\nb\nc\n"):
        with pytest.raises(patches.PatchError, match="other lines"):
            change.applied(other)


@pytest.mark.parametrize("text", ["", HEAD, HEAD + "@@ -1,2 +1,1 @@\n a\n", HEAD + "@@ -1 +1 @@\n*a\n"])
def test_what_is_no_patch_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(patches.PatchError):
        if not any(change.hunks for change in patches.read_patch(write(tmp_path, text))):
            raise patches.PatchError("no hunks")


def test_a_tree_that_was_patched_otherwise_is_made_anew_and_what_was_changed_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what no patch changes any more: its file has the time of the package, older than its object."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(patches, "FOLDER", tmp_path / "patches")
    (tmp_path / "patches").mkdir()
    source = Source("1.0")
    source.folder.mkdir(parents=True)
    with tarfile.open(source.folder / "llama_cpp_python-1.0.tar.gz", "w:gz") as archive:
        for name in "xy":
            member = tarfile.TarInfo(f"llama_cpp_python-1.0/vendor/llama.cpp/{name}")
            member.size, member.mtime = 2, 1000
            archive.addfile(member, io.BytesIO(b"a\n"))

    def unpacked(name: str, start: int = 1) -> dict[str, tuple[str, bool]]:
        text = f"--- a/{name}\n+++ b/{name}\n@@ -{start} +{start} @@\n-a\n+b\n"
        (tmp_path / "patches" / "0001.patch").write_text(text)
        source.unpack()
        found = {name: source.tree / name for name in "xy"}
        return {name: (path.read_text(), path.stat().st_mtime > 1000) for name, path in found.items()}

    assert unpacked("x") == {"x": ("b\n", True), "y": ("a\n", False)}
    assert unpacked("y") == {"x": ("a\n", True), "y": ("b\n", True)}
    with pytest.raises(patches.PatchError):
        unpacked("x", start=2)
    assert unpacked("y")["y"] == ("b\n", True), "a tree that is half patched is not taken for the one before"
