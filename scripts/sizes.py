"""Fails when a module, a function or a name breaks the house rules that a linter cannot see.

Modules have at most 500 lines and begin with a docstring of at most 10; functions have at most 60 lines; no module
and no class is named after a pattern (manager, helper …) instead of a thing of this domain.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "shardline"
MODULE_LINES = 500
DOCSTRING_LINES = 10
FUNCTION_LINES = 60
BANNED = {
    "manager",
    "helper",
    "util",
    "utils",
    "common",
    "misc",
    "base",
    "handler",
    "processor",
    "wrapper",
    "impl",
    "service",
    "core",
}


def words(name: str) -> set[str]:
    """`StepHandler`, `step_handler` -> step, handler."""
    return {w.lower() for part in name.split("_") for w in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", part)}


def faults_of(path: Path, text: str) -> Iterator[str]:
    tree = ast.parse(text)
    lines = text.count("\n")
    if lines > MODULE_LINES:
        yield f"{path}: {lines} lines, at most {MODULE_LINES}: split it by noun"
    if words(path.stem) & BANNED:
        yield f"{path}: named after a pattern; name it after the thing it holds"
    docstring = ast.get_docstring(tree)
    written = [line for line in (docstring or "").splitlines() if line.strip()]
    if text.strip() and not 1 <= len(written) <= DOCSTRING_LINES:
        yield f"{path}:1: a module begins with a docstring of 1 to {DOCSTRING_LINES} lines"
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and words(node.name) & BANNED:
            yield f"{path}:{node.lineno}: class {node.name} is named after a pattern; name the thing"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            if length > FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines, at most {FUNCTION_LINES}"


def main() -> int:
    faults: list[str] = []
    total = 0
    paths = sorted(SOURCE.rglob("*.py"))
    for path in paths:
        text = path.read_text(encoding="utf-8")
        total += text.count("\n")
        faults += faults_of(path.relative_to(ROOT), text)
    for fault in faults:
        print(fault)
    print(f"{len(paths)} modules, {total} lines, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
