"""Environments of clients whose dependencies fit beside nothing else: one folder for each, outside the clone.

Owns where they lie (`~/.cache/shardline/clients/NAME-DIGEST`, by the digest of what is pinned), and making them, once,
by pip or npm. Knows nothing of what the clients are asked. Used by test_installed_clients.py.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PINS = Path(__file__).parent / "pins"
INSTALL_S = 900.0
NODE = "openai-node"
PACKAGES = {"litellm": "litellm", "langchain-openai": "langchain-openai", "llm": "llm", "aider": "aider-chat"}
"""Client -> the package whose version is the client's."""
DEAD_PROXY = "http://127.0.0.1:9"
"""Nothing listens there: a client that asks anybody but this machine fails at once."""


class NotInstalled(Exception):
    """The environment could not be made; the message says why."""


@dataclass(frozen=True)
class Environment:
    folder: Path

    @property
    def bin(self) -> Path:
        return self.folder / "bin"

    @property
    def python(self) -> Path:
        return self.bin / "python"

    def variables(self, home: Path, url: str) -> dict[str, str]:
        """Of a process that uses the client: a home of its own, nothing beyond this machine, the Gateway's address
        in the names that clients read."""
        return {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "HOME": str(home),
            "LANG": "C.UTF-8",
            "NODE_PATH": str(self.folder / "node_modules"),
            **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), DEAD_PROXY),
            **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_BASE": f"{url}/v1",
            "OPENAI_API_KEY": "none",
        }


def version_of(client: str) -> str:
    """The pinned version."""
    if client == NODE:
        return str(json.loads((PINS / NODE / "package.json").read_text())["dependencies"]["openai"])
    pinned = dict(line.split("==") for line in (PINS / f"{client}.txt").read_text().splitlines())
    return pinned[PACKAGES[client]]


def environment(client: str) -> Environment:
    """The environment of `client`, made if it is not there; raises `NotInstalled`."""
    pins = PINS / NODE / "package-lock.json" if client == NODE else PINS / f"{client}.txt"
    python = "" if client == NODE else f"{sys.version_info.major}.{sys.version_info.minor}"
    digest = hashlib.sha256(pins.read_bytes() + python.encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardline" / "clients"
    folder = cache / f"{client}-{digest}"
    cache.mkdir(parents=True, exist_ok=True)
    with _alone(cache / f"{folder.name}.lock"):
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            (_make_node if client == NODE else _make_python)(folder, pins)
            (folder / "complete").touch()
    return Environment(folder)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make_python(folder: Path, pins: Path) -> None:
    _run([sys.executable, "-m", "venv", str(folder)])
    quiet = ["--quiet", "--disable-pip-version-check", "--no-input", "--retries", "1"]
    _run([str(folder / "bin" / "python"), "-m", "pip", "install", *quiet, "--requirement", str(pins)])


def _make_node(folder: Path, pins: Path) -> None:
    folder.mkdir()
    for name in ("package.json", "package-lock.json"):
        shutil.copy(pins.parent / name, folder / name)
    _run(["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries=1"], folder)


def _run(argv: list[str], folder: Path | None = None) -> None:
    try:
        done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S)
    except FileNotFoundError:
        raise NotInstalled(f"{argv[0]} is not on this machine") from None
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"{argv[0]} did not end within {INSTALL_S:.0f} s") from None
    if done.returncode != 0:
        words = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise NotInstalled(f"{Path(argv[0]).name} failed: {words[-1] if words else done.returncode}")
