"""`make upstream`: take the pinned source, patch it, build it, hold it against itself, measure it, print the table."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from functools import partial

from upstream import patches
from upstream.source import APPLIED, ROOT, Source, pinned_version


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m upstream", description=__doc__)
    parser.add_argument("--only", choices=["build", "test", "table", "patch"], help="One step of it.")
    parser.add_argument(
        "--part", choices=["rates", "ends"], help="Of the table: with --save, the other stays as it was."
    )
    parser.add_argument("--save", action="store_true", help="Keep the figures: upstream/figures.json and the page.")
    given = parser.parse_args()
    source = Source(pinned_version())
    steps = {
        "patch": show_patches,
        "build": build,
        "test": test,
        "table": partial(table, part=given.part, save=given.save),
    }
    for name, step in steps.items():
        if given.only in (None, name):
            started = time.monotonic()
            print(f"== {name}", flush=True)
            step(source)
            print(f"   {time.monotonic() - started:.0f} s", flush=True)


def show_patches(source: Source) -> None:
    """Lines and files of each patch."""
    for path in patches.patches():
        files, hunks, added, removed = patches.counts(path)
        print(f"{path.name}: {files} files, {hunks} hunks, {added} lines added, {removed} removed")


def build(source: Source) -> None:
    from upstream import building

    source.unpack()
    APPLIED.write_text(json.dumps(source.applied(), indent=1) + "\n", encoding="utf-8")
    building.build(source)
    print(f"built: --set llama_window_library={source.bin / 'libllama.so'}")


def test(source: Source) -> None:
    """The C++ test, and routes of two and three processes on DeepSeek-V4."""
    from upstream import building
    from upstream.models import write_models

    building.run_test(source, write_models(source.folder / "models"))
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", "tests/upstream"]
    # Named, since tests without the library are skipped: wherever the cache lies, it is this one that is tested.
    library = str(source.bin / "libllama.so")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LLAMA_WINDOW_LIBRARY": library}
    if subprocess.run(command, cwd=ROOT, env=environment).returncode:
        raise SystemExit("make upstream: the engine on the patched library differs: see above")


def table(source: Source, *, part: str | None, save: bool) -> None:
    from upstream.measure import PARTS, measured
    from upstream.page import known, render, write

    figures = known() if part is not None else {}
    figures |= measured(source, PARTS if part is None else (part,))
    if save:
        write(figures)
    print(render(figures) if part is None else figures)


if __name__ == "__main__":
    main()
