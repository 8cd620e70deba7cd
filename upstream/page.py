"""The generated parts of docs/upstream/layer-boundary.md: the patch, hunk by hunk, and the figures of one run.

Owns turning upstream/figures.json and upstream/llama.cpp into tables. `python -m upstream.page` writes them;
with `--check` it says whether they are what they should be. Shown by tests/upstream/test_page.py.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from upstream import patches
from upstream.source import ROOT

PAGE = ROOT / "docs" / "upstream" / "layer-boundary.md"
FIGURES = Path(__file__).resolve().parent / "figures.json"
SENTENCES = patches.FOLDER / "hunks.toml"
_BLOCK = re.compile(r"(<!-- generated: ([a-z]+) -->\n).*?(<!-- end -->)", re.S)


def known() -> dict[str, Any]:
    """The figures that are kept; none before the first run."""
    return dict(json.loads(FIGURES.read_text(encoding="utf-8"))) if FIGURES.exists() else {}


def write(figures: dict[str, Any] | None = None) -> None:
    """Keep `figures`, if there are any, and bring the page up to date."""
    if figures is not None:
        FIGURES.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if {"rates", "death"} <= known().keys():
        PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def updated(text: str) -> str:
    """The page with its blocks made anew."""
    blocks = {"patch": patch_tables(), **numbers(known())}
    return _BLOCK.sub(lambda m: f"{m[1]}{blocks[m[2]]}\n{m[3]}", text)


def render(figures: dict[str, Any]) -> str:
    return "\n\n".join(numbers(figures).values())


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def patch_tables() -> str:
    """How large each patch is, then every hunk with its sentence."""
    sentences = tomllib.loads(SENTENCES.read_text(encoding="utf-8"))
    sizes = [(path.name, *patches.counts(path)) for path in patches.patches()]
    parts = [table(("patch", "files", "hunks", "lines added", "removed"), sizes)]
    for path in patches.patches():
        parts.append(f"`{path.name}`:")
        parts.append(table(("file", "lines", "what for"), list(_hunks(path, sentences[path.name]))))
    return "\n\n".join(parts)


def _hunks(path: Path, sentences: dict[str, list[str]]) -> Iterator[tuple[str, str, str]]:
    for change in patches.read_patch(path):
        for hunk, sentence in zip(change.hunks, sentences[change.path], strict=True):
            yield f"`{change.path}`", f"+{hunk.count('+')} −{hunk.count('-')}", sentence


def numbers(figures: dict[str, Any]) -> dict[str, str]:
    systems = list(figures["rates"][0]["rates"])
    rates = [
        (f"{row['delay_ms']} ms", row["streams"], *(f"{row['rates'][name]:.1f}" for name in systems))
        for row in figures["rates"]
    ]
    return {
        "rates": table(("delay", "streams", *(f"{name}, tokens/s" for name in systems)), rates),
        "hops": _hops(figures, systems),
        "process": table(("way", "µs a step"), list(figures["in_process"].items())),
    }


def _hops(figures: dict[str, Any], systems: list[str]) -> str:
    """What one stream loses a token against the unsplit model, what crosses, and what happens when a peer dies."""
    one = {row["delay_ms"]: row["rates"] for row in figures["rates"] if row["streams"] == 1}
    rows = []
    for name in systems[1:]:
        added = [f"{1e3 / rates[name] - 1e3 / rates[systems[0]]:.1f}" for rates in one.values()]
        rows.append((name, *added, _bytes(figures, name), _death(figures, name)))
    head = ["system", *(f"added ms a token, {delay} ms" for delay in one), "bytes a token", "a peer is killed"]
    return table(head, rows)


def _bytes(figures: dict[str, Any], name: str) -> str:
    if name in figures["seams"]:
        return ", ".join(f"{count:,.0f} ({seam})" for seam, count in figures["seams"][name].items())
    found = figures["rpc_bytes"]
    return f"{found['there']:,} there, {found['back']:,} back"


def _death(figures: dict[str, Any], name: str) -> str:
    death = figures["death"]
    if name in death:
        return (
            f"stream ends with `{death[name]['code']}` after {death[name]['after_s']} s; every other process lives on"
        )
    return f"the client's process ends with {death['rpc']['ends']} after {death['rpc']['after_s']} s"


def main() -> int:
    if "--check" not in sys.argv:
        write()
        return 0
    text = PAGE.read_text(encoding="utf-8")
    if updated(text) == text:
        return 0
    print(
        f"{PAGE.relative_to(ROOT)} is not what its figures and patches make of it. What to do: python -m upstream.page"
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
