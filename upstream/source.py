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
APPLIED = patches.FOLDER / "applied.json"
"""The last that was applied, and to which package: a patch or a pin that nobody has tried is noticed offline."""


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

    def applied(self) -> dict[str, str]:
        """What was applied to what, to be kept in the checkout: packages of a registry never change."""
        package = hashlib.sha256(self.download().read_bytes()).hexdigest()
        return {"version": self.version, "package_sha256": package, "patches_sha256": patches_digest()}

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
        """The tree, with the patches (or as it is); nothing where it is there already, whole."""
        mark = self.folder / "patched"
        state = patches_digest() if patched else "as it is"
        before, *changed = mark.read_text(encoding="utf-8").split("\n") if mark.exists() else [""]
        if before == state:
            return
        package = self.download()
        # A tree that is half unpacked, or half patched, is none; what of the one before was built is still known.
        mark.write_text("\n".join(["", *changed]), encoding="utf-8")
        shutil.rmtree(self.tree, ignore_errors=True)
        with tarfile.open(package) as archive:
            members = []
            for member in archive:
                path = _inside(member.name)
                if path:
                    member.name = path
                    members.append(member)
            archive.extractall(self.tree, members, filter="data")
        paths = list(patches.apply_all(self.tree)) if patched else []
        for path in changed:
            # Its objects are those of the patched file, and the unpacked one has its old time.
            os.utime(self.tree / path)
        mark.write_text("\n".join([state, *sorted(set(paths))]), encoding="utf-8")


def _inside(name: str) -> str:
    """The path in llama.cpp's tree of a member of the package; "" of one that is not in it."""
    return name.partition(_INSIDE)[2]


def patches_digest() -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in patches.patches())).hexdigest()
