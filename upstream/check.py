"""`make upstream-check VERSION=…`: what another version of llama-cpp-python changes, in a venv of its own.

Prints structs, functions and architectures that came, went or changed, whether the patches still apply, and what the
exactness sweep of the llama.cpp engine says with it. Changes nothing of the checkout: the version that the engine
accepts is set in the test run alone. The new version comes as pip has it: a wheel, or compiled for some minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

from upstream import patches
from upstream.source import PACKAGE, ROOT, Source, cache_folder, pinned_version

SWEEP = (
    "tests/model/test_llama_library.py",
    "tests/model/test_llama_exact.py",
    "tests/model/test_llama_architectures.py",
)
HANDED_OVER = {
    "llama_model_params", "llama_context_params", "llama_batch",
    "llama_sampler_chain_params", "llama_sampler_i", "llama_sampler_seq_config",
}  # fmt: skip
"""Structs that the engine fills, or hands over by value."""
_OF_THE_PIN = (
    "tests/model/test_llama_library.py::test_another_version_is_refused_and_the_advice_names_the_right_one",
    "tests/model/test_llama_library.py::test_a_library_of_another_commit_is_refused",
)
"""They are about the refusal that the sweep sets aside."""
_ARCHITECTURE = re.compile(r'\{ LLM_ARCH_\w+,\s*"([^"]+)"')
_DESCRIBE = """
import ctypes, json, pathlib
from llama_cpp import llama_cpp as lib
import llama_cpp
structs = {n: [f"{f[0]}: {f[1].__name__}" for f in v._fields_] for n, v in vars(lib).items()
           if isinstance(v, type) and issubclass(v, ctypes.Structure) and hasattr(v, "_fields_")}
functions = sorted(n for n in vars(lib) if n.startswith(("llama_", "ggml_")) and callable(getattr(lib, n)))
from shardline.model.llama_library import _FUNCTIONS, _MANGLED
handles = [ctypes.CDLL(str(p)) for p in pathlib.Path(lib._lib._name).parent.glob("lib*.so")]
missing = [n for n in _FUNCTIONS if not any(hasattr(h, s) for h in handles for s in (n, _MANGLED.get(n, n)))]
print(json.dumps({"version": llama_cpp.__version__, "structs": structs, "functions": functions, "missing": missing}))
"""
_ACCEPT = """
import shardline.model.llama_library as library
library.VERSIONS = {**library.VERSIONS, %r: "of another version"}
library.check_commit = lambda built, verified: None
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m upstream.check", description=__doc__)
    parser.add_argument("version")
    parser.add_argument("--no-sweep", action="store_true", help="Only what changed.")
    given = parser.parse_args()
    pinned, other = Source(pinned_version()), Source(given.version)
    python = venv(given.version)
    before, after = described(Path(sys.executable)), described(python)
    check_version(after["version"], given.version, python)
    print(f"== {PACKAGE} {before['version']} against {after['version']}")
    failed = show_structs(before["structs"], after["structs"])
    show_names("functions of the package", before["functions"], after["functions"])
    if after["missing"]:
        print(f"functions that the engine uses and that are gone: {', '.join(after['missing'])}")
        failed = True
    for source in (pinned, other):
        source.download()
    show_names("architectures", architectures(pinned), architectures(other))
    failed |= show_patches(other)
    if not given.no_sweep:
        failed |= sweep(python, given.version)
    print("== not a drop-in: see above" if failed else "== all as before")
    return int(failed)


def venv(version: str) -> Path:
    """An interpreter with that version, and with everything else that this one has."""
    folder = cache_folder() / f"venv-{version}"
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        (site,) = folder.glob("lib/python*/site-packages")
        own = Path(sys.executable).parent.parent / site.relative_to(folder)
        # Behind the venv's own folder: what is installed there comes first.
        (site / "behind.pth").write_text(f"{own}\n{ROOT / 'src'}\n{ROOT}\n", encoding="utf-8")
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--ignore-installed", "--find-links", str(cache_folder().parent / "wheels")]
        # As scripts/prepare.py compiles it: without the part for pictures.
        environment = {"CMAKE_ARGS": "-DLLAVA_BUILD=OFF", **os.environ}
        subprocess.run([*command, f"{PACKAGE}=={version}"], check=True, env=environment)
    return python


def check_version(found: object, version: str, python: Path) -> None:
    """SystemExit where an interpreter has another version: of an installation that was ended, the pinned one shows."""
    if found != version:
        folder = python.parent.parent
        raise SystemExit(f"make upstream-check: {python} has {found}, not {version}. What to do: rm -r {folder}")


def described(python: Path) -> dict[str, object]:
    done = subprocess.run([str(python), "-c", _DESCRIBE], cwd="/", capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def show_structs(before: object, after: object) -> bool:
    """Each struct whose fields differ; True where one that the engine hands over by value does."""
    assert isinstance(before, dict) and isinstance(after, dict)
    changed = [name for name in sorted(before.keys() & after.keys()) if before[name] != after[name]]
    for name in changed:
        gone = [f for f in before[name] if f not in after[name]]
        new = [f for f in after[name] if f not in before[name]]
        print(
            f"struct {name}: gone {gone or 'nothing'}, new {new or 'nothing'}{'' if gone or new else ', other order'}"
        )
    show_names("structs", list(before), list(after))
    return any(name in HANDED_OVER for name in changed) or bool(HANDED_OVER & before.keys() - after.keys())


def show_names(what: str, before: object, after: object) -> None:
    assert isinstance(before, list) and isinstance(after, list)
    gone, new = sorted(set(before) - set(after)), sorted(set(after) - set(before))
    print(f"{what}: {len(gone)} gone {', '.join(gone)}; {len(new)} new {', '.join(new)}")


def architectures(source: Source) -> list[str]:
    with tarfile.open(source.download()) as archive:
        for member in archive:
            if member.name.endswith("vendor/llama.cpp/src/llama-arch.cpp"):
                file = archive.extractfile(member)
                return _ARCHITECTURE.findall(file.read().decode()) if file else []
    return []


def show_patches(source: Source) -> bool:
    """Which files the patches still fit; True where one does not."""
    texts = source.texts()
    failed = False
    for path in patches.patches():
        for change in patches.read_patch(path):
            try:
                texts[change.path] = change.applied(texts[change.path])
            except (KeyError, patches.PatchError) as error:
                print(f"{path.name}: {error}")
                failed = True
    print(f"patches: {'apply' if not failed else 'do not apply to the files above'}")
    return failed


def sweep(python: Path, version: str) -> bool:
    """The exactness tests of the engine, with that version; True where one fails."""
    hook = cache_folder() / f"venv-{version}" / "accept.py"
    hook.write_text(_ACCEPT % version, encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(hook.parent)}
    command = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "-p",
        "accept",
        *SWEEP,
        *(f"--deselect={name}" for name in _OF_THE_PIN),
    ]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode != 0


if __name__ == "__main__":
    sys.exit(main())
