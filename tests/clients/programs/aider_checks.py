"""aider, without a person: one message, one file changed, one commit."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from reporting import MODEL, run

EDITED = 'print("hello, shards")\n'
FLAGS = ("--yes-always", "--no-analytics", "--no-check-update", "--no-show-model-warnings", "--no-gitignore")


def sh(*argv: str, folder: Path) -> str:
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def repository(name: str) -> Path:
    folder = Path(os.environ["HOME"]) / name
    folder.mkdir()
    (folder / "greeting.py").write_text('print("hello")\n')
    sh("git", "init", "--quiet", folder=folder)
    for key, value in (("user.name", "A Test"), ("user.email", "test@example.org")):
        sh("git", "config", key, value, folder=folder)
    sh("git", "add", "greeting.py", folder=folder)
    sh("git", "commit", "--quiet", "--message", "first", folder=folder)
    return folder


def edit(name: str, *flags: str) -> None:
    folder = repository(name)
    model = ("--model", f"openai/{MODEL}", "--edit-format", "whole")
    said = sh("aider", *FLAGS, *model, *flags, "--message", "Greet shards.", "greeting.py", folder=folder)
    assert (folder / "greeting.py").read_text() == EDITED, said
    assert len(sh("git", "log", "--format=%h", folder=folder).split()) == 2, said


def one_shot() -> None:
    edit("streamed")


def one_shot_without_stream() -> None:
    edit("whole", "--no-stream")


if __name__ == "__main__":
    run(one_shot, one_shot_without_stream)
