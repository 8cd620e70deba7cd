"""The patches are what they say: they apply to the pinned source exactly, and each hunk has its sentence."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from upstream import patches
from upstream.page import SENTENCES
from upstream.source import Source, pinned_version


def test_each_hunk_has_a_sentence() -> None:
    sentences = tomllib.loads(SENTENCES.read_text(encoding="utf-8"))
    assert sorted(sentences) == [path.name for path in patches.patches()]
    for path in patches.patches():
        expected = {change.path: len(change.hunks) for change in patches.read_patch(path)}
        assert {name: len(said) for name, said in sentences[path.name].items()} == expected


def test_the_patches_apply_to_the_pinned_source() -> None:
    """Line for line. The source is 50 MB, so it is not fetched for this."""
    source = Source(pinned_version())
    if source.package() is None:
        pytest.skip(f"the source of llama-cpp-python {source.version} is not there: make upstream fetches it")
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
