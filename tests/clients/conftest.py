"""The route that all tests here share, and the record of what each client could do.

A test module names its `CLIENT`; a check is named like its function. `--conformance FILE` writes the record as JSON,
`{client: {"version": …, "checks": {check: "passed" | "failed" | "skipped"}}}` (`make clients` does).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.route import Route, client_route

Record = dict[str, dict[str, Any]]
RECORD = pytest.StashKey[Record]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--conformance", type=Path, metavar="FILE", help="write what each client could do to FILE")


@pytest.fixture(scope="session")
def route(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Route]:
    with client_route(tmp_path_factory.mktemp("route")) as running:
        yield running


def check_of(item: pytest.Item) -> tuple[str, str] | None:
    """Client and check of a test, if it is one of a client."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if "check" in parameters:
        return parameters["client"], parameters["check"]
    module = getattr(item, "module", None)
    if hasattr(module, "CLIENT"):
        return module.CLIENT, getattr(item, "originalname", item.name).removeprefix("test_")
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    check = check_of(item)
    if check is not None and (report.when == "call" or report.outcome != "passed"):
        client, name = check
        record = item.config.stash.setdefault(RECORD, {})
        entry = record.setdefault(client, {"version": item.module.version(client), "checks": {}})
        if entry["checks"].get(name) != "failed":  # one of several parameters is enough
            entry["checks"][name] = report.outcome
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--conformance", None)
    if path is not None:
        record = session.config.stash.get(RECORD, {})
        text = json.dumps(dict(sorted(record.items())), indent=2, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")
