"""The source of llama.cpp that the patches are for: that inside the pinned llama-cpp-python, kept outside the checkout.

Owns the cache folder, one a version: the package as it was downloaded, the tree that was unpacked and patched, what was
built of it. A tree that was patched with other patches is made anew. Shown by tests/upstream/test_patches.py.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from upstream import patches

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "llama-cpp-python"
_INSIDE = "vendor/llama.cpp/"


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardline" / "upstream"


def pinned_version() -> str:
    """As pyproject.toml has it."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (found,) = (r for r in extras["llama"] if r.startswith(PACKAGE))
    return str(found.partition("==")[2])


@dataclass(frozen=True, slots=True)
class Source:
    """One version, and where its parts lie."""

    version: str

    @property
    def folder(self) -> Path:
        return cache_folder() / self.version

    @property
    def tree(self) -> Path:
        return self.folder / "llama.cpp"

    @property
    def build(self) -> Path:
        return self.folder / "build"

    @property
    def bin(self) -> Path:
        return self.build / "bin"

    def package(self) -> Path | None:
        """The downloaded package; None where it is not there."""
        return next(iter(sorted(self.folder.glob("llama_cpp_python-*.tar.gz"))), None)

    def download(self) -> Path:
        """Ask pip for the source package, unless it is there: 50 MB and more."""
        found = self.package()
        if found is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
            command += ["--no-binary", PACKAGE, "--dest", str(self.folder), f"{PACKAGE}=={self.version}"]
            subprocess.run(command, check=True)
            found = self.package()
        if found is None:
            raise FileNotFoundError(f"pip left no source package of {PACKAGE} {self.version} in {self.folder}")
        return found

    def texts(self) -> dict[str, str]:
        """The files that the patches change, as they are in the package."""
        package = self.package()
        if package is None:
            raise FileNotFoundError(f"{PACKAGE} {self.version} was not downloaded")
        wanted = set(patches.touched())
        found: dict[str, str] = {}
        with tarfile.open(package) as archive:
            for member in archive:
                path = _inside(member.name)
                if path in wanted and (file := archive.extractfile(member)) is not None:
                    found[path] = file.read().decode()
        return found

    def unpack(self, *, patched: bool = True) -> None:
        """The tree, with the patches (or as it is); nothing where it is there already."""
        mark = self.folder / "patched"
        state = patches_digest() if patched else "as it is"
        if mark.exists() and mark.read_text(encoding="utf-8") == state:
            return
        package = self.download()
        shutil.rmtree(self.tree, ignore_errors=True)
        with tarfile.open(package) as archive:
            members = []
            for member in archive:
                path = _inside(member.name)
                if path:
                    member.name = path
                    members.append(member)
            archive.extractall(self.tree, members, filter="data")
        if patched:
            for _ in patches.apply_all(self.tree):
                pass
        mark.write_text(state, encoding="utf-8")


def _inside(name: str) -> str:
    """The path in llama.cpp's tree of a member of the package; "" of one that is not in it."""
    return name.partition(_INSIDE)[2]


def patches_digest() -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in patches.patches())).hexdigest()
