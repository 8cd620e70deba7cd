"""Unified diffs, read and applied exactly: every line of context where it is said to be, or an error.

Owns reading the patches of upstream/llama.cpp and counting their lines. Needs no git and no patch program, so that a
check of them runs anywhere. Shown by tests/upstream/test_patches.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "llama.cpp"
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class PatchError(Exception):
    """A patch that does not fit, and where."""


@dataclass(slots=True)
class Hunk:
    start: int
    """First line of the old file that it shows, from 1."""
    lines: list[str] = field(default_factory=list)
    """With the sign in front, without line ends."""

    @property
    def old(self) -> list[str]:
        return [line[1:] for line in self.lines if line[0] in " -"]

    @property
    def new(self) -> list[str]:
        return [line[1:] for line in self.lines if line[0] in " +"]

    def count(self, sign: str) -> int:
        return sum(line[0] == sign for line in self.lines)


@dataclass(slots=True)
class FilePatch:
    path: str
    hunks: list[Hunk] = field(default_factory=list)

    def applied(self, text: str) -> str:
        """`text` with all hunks; `PatchError` where a line is not the one expected."""
        lines = text.split("\n")
        result: list[str] = []
        at = 0
        for hunk in self.hunks:
            start = hunk.start - 1
            if lines[start : start + len(hunk.old)] != hunk.old:
                raise PatchError(f"{self.path}:{hunk.start}: the source has other lines than the patch expects")
            result += lines[at:start] + hunk.new
            at = start + len(hunk.old)
        return "\n".join(result + lines[at:])


def read_patch(path: Path) -> list[FilePatch]:
    """The files of one patch. `PatchError` where it is no unified diff, or its counts are wrong."""
    files: list[FilePatch] = []
    left_old = left_new = 0
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if left_old or left_new:
            sign = line[:1] or " "
            if sign not in " +-":
                raise PatchError(f"{path.name}:{number}: a line of a hunk begins with {sign!r}")
            files[-1].hunks[-1].lines.append(line or " ")
            left_old -= sign in " -"
            left_new -= sign in " +"
        elif line.startswith("+++ b/"):
            files.append(FilePatch(line.removeprefix("+++ b/")))
        elif found := _HUNK.match(line):
            start, old, _, new = found.groups(default="1")
            left_old, left_new = int(old), int(new)
            files[-1].hunks.append(Hunk(int(start)))
    if left_old or left_new or not files:
        raise PatchError(f"{path.name}: it ends inside a hunk, or has none")
    return files


def patches() -> list[Path]:
    return sorted(FOLDER.glob("*.patch"))


def apply_all(source: Path) -> Iterator[str]:
    """Change the files below `source`; yields each patched path, once a patch."""
    for patch in patches():
        for change in read_patch(patch):
            target = source / change.path
            target.write_bytes(change.applied(target.read_bytes().decode()).encode())
            yield change.path


def applied_texts(sources: Mapping[str, str]) -> dict[str, str]:
    """The texts that all patches make of `sources` (path: text), in memory."""
    texts = dict(sources)
    for patch in patches():
        for change in read_patch(patch):
            texts[change.path] = change.applied(texts[change.path])
    return texts


def touched() -> list[str]:
    return sorted({change.path for patch in patches() for change in read_patch(patch)})


def counts(patch: Path) -> tuple[int, int, int, int]:
    """Files, hunks, lines added, lines removed."""
    files = read_patch(patch)
    hunks = [hunk for change in files for hunk in change.hunks]
    return len(files), len(hunks), sum(h.count("+") for h in hunks), sum(h.count("-") for h in hunks)
