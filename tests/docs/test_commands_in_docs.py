"""Every command of the documentation runs: real processes, the scripted engine in place of a model.

A fenced `console` block holds commands behind `$ `, a `python` block a program. `<!-- scene: NAME -->` begins a fresh
cluster; commands that serve stay in the background until the scene ends, and must then end cleanly. A block that cannot
run stands behind `<!-- not run: REASON -->`. Ports and the example addresses are replaced by free ones on loopback, and
`TOKEN.PIN` by what was printed last.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SERVING = {"up", "serve", "tracker", "gateway", "node"}
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
SCRIPT = {"model": "SmolLM2-135M-Instruct.Q4_1", "n_layers": 30, "answer": [" a", " shard", " is", " a", " range"]}
BLOCK = re.compile(r"<!-- (scene|not run): (.*?) -->|^```(console|python)\n(.*?)^```", re.DOTALL | re.MULTILINE)


@dataclass
class Scene:
    """Blocks that share one cluster: (language, content, line)."""

    page: Path
    name: str
    blocks: list[tuple[str, str, int]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.name}"


def scenes() -> Iterator[Scene]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        scene = Scene(page, "start")
        skipped = False
        for found in BLOCK.finditer(text):
            kind, words, language, content = found.groups()
            if kind == "scene":
                yield scene
                scene = Scene(page, words)
            elif kind == "not run":
                assert len(words) > 5, f"{page}: say why a block is not run"
                skipped = True
            elif skipped:
                skipped = False
            else:
                scene.blocks.append((language, content, text[: found.start()].count("\n") + 1))
        yield scene


SCENES = [scene for scene in scenes() if scene.blocks]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


class Stage:
    """A folder with the model, a `shardline` command that runs the scripted engine, and what runs on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.background: list[subprocess.Popen[str]] = []
        self._used: set[str] = set()
        self._replaced = {
            "8080": free_port(),
            "7070": free_port(),
            "192.0.2.10": "127.0.0.1",
            "192.0.2.11": "127.0.0.1",
        }
        (folder / MODEL).write_text(json.dumps(SCRIPT), encoding="utf-8")
        command = folder / "bin" / "shardline"
        command.parent.mkdir()
        command.write_text(
            '#!/bin/sh\ncase "$1" in up|node) set -- "$@" --engine scripted ;; esac\n'
            f'exec {sys.executable} -m shardline "$@"\n'
        )
        command.chmod(0o755)
        self.environ = {
            "PATH": f"{command.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(folder),
            "LANG": "C.UTF-8",
        }

    def local(self, text: str) -> str:
        for known, own in self._replaced.items():
            text = text.replace(known, own)
        return text.replace("TOKEN.PIN", self.token_and_pin()) if "TOKEN.PIN" in text else text

    def token_and_pin(self) -> str:
        """Of the line for joining that nobody has used yet."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            printed = "".join((self.folder / f"{i}.out").read_text() for i in range(len(self.background)))
            for found in reversed(re.findall(r"--join '[^'#]+#([^']+)'", printed)):
                if found not in self._used:
                    self._used.add(found)
                    return str(found)
            time.sleep(0.05)
        raise AssertionError("no fresh line for joining was printed")

    def command(self, line: str) -> None:
        words = line.split()
        if words[0] == "shardline" and words[1] in SERVING:
            self._serve(line)
            return
        done = self._run(["bash", "-c", self.local(line)])
        assert done.returncode == 0, f"$ {line}\n{done.stdout}\n{done.stderr}"

    def program(self, text: str) -> None:
        done = self._run([sys.executable, "-W", "ignore", "-c", self.local(text)])
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        assert done.stdout

    def _run(self, argv: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv,
            cwd=self.folder,
            env=self.environ,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=30,
        )

    def _serve(self, line: str) -> None:
        number = len(self.background)
        out = self.folder / f"{number}.out"
        with out.open("w") as stdout, (self.folder / f"{number}.err").open("w") as stderr:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {self.local(line)}"],
                cwd=self.folder,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                text=True,
            )
        self.background.append(process)
        deadline = time.monotonic() + 30
        while not re.search(r"^\w+: ready$|Ctrl-C ends", out.read_text(), re.MULTILINE):
            errors = (self.folder / f"{number}.err").read_text()
            assert process.poll() is None, f"$ {line}\n{out.read_text()}\n{errors}"
            assert time.monotonic() < deadline, f"$ {line} was not ready in time\n{out.read_text()}\n{errors}"
            time.sleep(0.05)

    def end(self) -> list[int]:
        """Ctrl-C for each, the last one first; their exit codes."""
        codes = []
        for process in reversed(self.background):
            process.send_signal(signal.SIGINT)
            codes.append(process.wait(15))
        return codes

    def kill(self) -> None:
        for process in self.background:
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("scene", SCENES, ids=str)
def test_commands_run(scene: Scene, tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    try:
        for language, content, _ in scene.blocks:
            if language == "python":
                stage.program(content)
                continue
            for line in content.splitlines():
                assert line.startswith("$ "), f"{scene}: a line of a console block is a command"
                stage.command(line[2:].partition("  # ")[0])
        assert set(stage.end()) <= {0}
    finally:
        stage.kill()


def test_the_documentation_has_scenes() -> None:
    """Guards against a pattern that silently finds nothing."""
    assert {str(scene) for scene in SCENES} >= {"README.md:up", "README.md:two", "docs/operations.md:parts"}
    assert sum(len(scene.blocks) for scene in SCENES) >= 9


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if not target.startswith(("http:", "https:")):
                assert (page.parent / target).exists(), f"{page}: {target}"
