"""tests/clients/conformance.json, which `make clients` writes: it has every check that there is, and no other."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

from tests.clients.environments import version_of
from tests.clients.test_installed_clients import CHECKS

FOLDER = Path(__file__).parent
RECORD = json.loads((FOLDER / "conformance.json").read_text(encoding="utf-8"))


def checks_here() -> dict[str, set[str]]:
    """Of the clients whose modules are tests themselves."""
    found = {}
    for path in sorted(FOLDER.glob("test_*.py")):
        module = importlib.import_module(f"tests.clients.{path.stem}")
        if hasattr(module, "CLIENT"):
            found[module.CLIENT] = {name.removeprefix("test_") for name in vars(module) if name.startswith("test_")}
    return found


def test_every_client_and_check_is_in_it() -> None:
    wanted = checks_here() | {client: set(checks) for client, checks in CHECKS.items()}
    assert {client: set(entry["checks"]) for client, entry in RECORD.items()} == wanted, "run `make clients`"


def test_it_is_of_the_pinned_versions() -> None:
    assert {client: RECORD[client]["version"] for client in CHECKS} == {client: version_of(client) for client in CHECKS}


def test_everything_passed() -> None:
    assert {outcome for entry in RECORD.values() for outcome in entry["checks"].values()} == {"passed"}
