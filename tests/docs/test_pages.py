"""What the pages say is so: the map, the references, the failure table, the dependencies."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from shardline.errors import CATALOGUE

ROOT = Path(__file__).resolve().parents[2]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_every_path_on_the_map_exists_and_every_file_is_on_it() -> None:
    named = set(re.findall(r"`((?:src|docs|tests|scripts)/[\w./-]+)`", page("architecture.md")))
    absent = sorted(name for name in named if not (ROOT / name).exists())
    assert not absent
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "src").rglob("*.py")}
    assert not sorted(files - named), "run `make docs`"


def test_the_way_of_a_request_is_in_it() -> None:
    steps = page("architecture.md").partition("## One request")[2].partition("\n## ")[0]
    assert len(re.findall(r"^\d+\. ", steps, re.MULTILINE)) == 13
    assert {name.split("/")[2] for name in re.findall(r"src/[\w./]+", steps)} == {
        *("gateway", "model", "node", "telemetry", "tracker", "transport", "wire")
    }


def test_generated_pages_are_what_the_code_says() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/reference.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["operations.md", "protocol.md"])
def test_codes_in_pages_are_in_the_catalogue(name: str) -> None:
    codes = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", page(name)))
    fields = {"client_stall", "kv_released", "kv_reserved", "max_tokens", "prefill_chunk", "prompt_tokens"}
    fields |= {"route_given", "session_ended", "session_opened", "trace_id"}  # events and keys of log lines
    from shardline.settings import Settings

    known = set(CATALOGUE) | set(Settings.__struct_fields__) | fields
    assert not sorted(codes - known)
    assert "node_lost" in codes


def test_every_end_of_a_running_session_is_in_the_failure_table() -> None:
    table = page("operations.md").partition("## What can fail")[2].partition("\n## ")[0]
    for code, fault in CATALOGUE.items():
        if fault.status in (502, 504) and code not in ("gateway_lost", "engine_error"):
            assert f"`{code}`" in table, code


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = list(project["project"]["dependencies"])
    for extra in (*project["project"]["optional-dependencies"].values(), *project["dependency-groups"].values()):
        listed += extra
    names = {re.split(r"[<>=;\[ ]", entry)[0] for entry in listed}
    decided = set(
        re.findall(
            r"`([a-z0-9-]+)`", "\n".join(re.findall(r"^\|([^|]+)\|", page("decisions/0002-dependencies.md"), re.M))
        )
    )
    assert names == decided


def test_the_makefile_lists_its_verbs() -> None:
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, timeout=10)
    for verb in ("demo", "test", "check", "bench", "docs", "site"):
        assert f"  make {verb}\t" in done.stdout


def test_the_test_that_a_module_names_is_there() -> None:
    """Each module says which test shows it."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        for named in re.findall(r"tests/[\w/.*]+", docstring):
            assert list(ROOT.glob(named.rstrip("."))), f"{path.relative_to(ROOT)}: {named}"
