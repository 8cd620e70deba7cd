"""docs/known-faults.md: every fault of the list is on it, and every test that it names is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "known-faults.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
NUMBERS = [
    *(1, 3, 4, 6, 7, 8, 9),  # text streaming
    *(10, 11, 12, 13, 14, 17, 18, 19, 20, 21, 22, 23),  # limits and sampling
    *(24, 25, 26, 27, 28, 31, 32, 33, 37, 38, 39, 40, 41, 42, 43),  # messages, templates, tools, forms
    *(44, 45, 46, 47, 48),  # context and memory
    *(49, 51, 52, 53, 54, 55, 57, 58, 60, 61, 62, 63, 65, 66, 67, 68),  # HTTP and the Gateway
    *(69, 70, 73, 74, 75),  # isolation
]


@cache
def names_in(path: Path) -> frozenset[str]:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return frozenset(node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_fault_is_on_the_page_once() -> None:
    assert [int(number) for number, *_ in ROW.findall(PAGE)] == NUMBERS


@pytest.mark.parametrize(("fault", "shown"), [(fault, shown) for _, fault, _, shown in ROW.findall(PAGE)])
def test_what_shows_it_is_there(fault: str, shown: str) -> None:
    named = re.findall(r"`([\w/.]+)::(test_\w+)`", shown)
    assert named and len(named) == shown.count("::"), f"nothing shows it: {fault}"
    absent = [f"{file}::{name}" for file, name in named if name not in names_in(ROOT / "tests" / file)]
    assert not absent
