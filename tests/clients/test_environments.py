"""An environment that cannot be made says why, and is tried again the next time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients import environments
from tests.clients.environments import NotInstalled, environment

pytestmark = pytest.mark.long


def test_without_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pins = tmp_path / "pins"
    pins.mkdir()
    (pins / "client.txt").write_text("no-such-client==1.0\n")
    monkeypatch.setattr(environments, "PINS", pins)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    for _ in range(2):
        with pytest.raises(NotInstalled, match="No matching distribution found for no-such-client"):
            environment("client")
    (pins / "client.txt").write_text("")
    made = environment("client")
    assert made.python.exists() and made == environment("client")
    assert len([path for path in made.folder.parent.iterdir() if path.is_dir()]) == 2, "by what is pinned"
