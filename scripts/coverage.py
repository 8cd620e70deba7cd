"""Writes docs/coverage-llama.md: runs every comparison of tests/llama, a minute or two on two cores."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from shardline.model.llama_library import library
from tests.support.coverage_page import page
from tests.support.tiny_controls import CONTROLS
from tests.support.tiny_models import BY_NAME
from tests.support.tiny_runs import TinyRuns

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "coverage-llama.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="comparisons at once")
    workers = parser.parse_args().workers
    names = [*BY_NAME, *CONTROLS]
    with TinyRuns(names, workers) as runs:
        records = {name: runs.record(name) for name in names}
    failed = [f"{name}: {records[name].error}" for name in BY_NAME if records[name].error]
    if failed:
        print("No page written. These models did not run:\n" + "\n".join(failed))
        return 1
    PAGE.write_text(page(records, library().build), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
