"""The command as a process: start-up, exit codes, and what a failure looks like."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import shardline
from shardline.cli.main import cli

HEAVY = (
    "torch",
    "transformers",
    "numpy",
    "starlette",
    "uvicorn",
    "cryptography",
    "structlog",
    "rich",
    "psutil",
    "uvloop",
)


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shardline", *arguments],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=30,
    )


def test_help_and_version() -> None:
    assert run("--version").stdout == f"shardline, version {shardline.__version__}\n"
    shown = run("--help")
    assert shown.returncode == 0
    for command in (
        "up",
        "demo",
        "chat",
        "nodes",
        "sessions",
        "routes",
        "tracker",
        "gateway",
        "serve",
        "node",
        "config",
    ):
        assert f"\n  {command} " in shown.stdout
    commands = shown.stdout.partition("Commands:\n")[2].partition("\n\n")[0]
    assert "..." not in commands, "a summary is cut off"


def test_help_of_every_command_says_what_its_flags_do() -> None:
    for name, command in cli.commands.items():
        shown = CliRunner().invoke(cli, [name, "--help"])
        assert shown.exit_code == 0, name
        for parameter in command.params:
            text = getattr(parameter, "help", None)
            explained = text or getattr(parameter, "hidden", False) or parameter.param_type_name == "argument"
            assert explained, f"{name} {parameter.name}"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom shardline.cli.main import main\n"
        "try:\n    main(['node', '--help'])\nexcept SystemExit:\n    pass\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stderr == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("nodes", "--tracker", "http://127.0.0.1:9"), 1, "no Tracker answers at http://127.0.0.1:9"),
        (("chat", "-m", "x", "--gateway", "http://127.0.0.1:9"), 1, "no Gateway answers"),
        (("nope",), 2, "No such command"),
        (("--set", "push_s=fast", "config", "show"), 2, "push_s: 'fast' (flag --set) does not fit"),
        (("up", "/nowhere/model.gguf"), 2, "does not exist"),
        (("up", __file__, "--layers", "0:x"), 2, "is not a range such as 0:15"),
        (("up", __file__, "--listen", "0.0.0.0"), 2, "shardline serve --listen ADDRESS"),
        (("up", __file__, "--nodes", "3", "--layers", "0:1"), 2, "give one of them"),
        (("gateway", "--host", "0.0.0.0", "--port", "0"), 2, "--insecure-plain-http"),
        (("gateway", "--host", "0.0.0.0", "--insecure-plain-http"), 2, "What to do: Give --api-keys FILE"),
        (("serve", "--host", "0.0.0.0", "--port", "0"), 2, "--insecure-plain-http"),
        (("serve", "--host", "0.0.0.0", "--insecure-plain-http"), 2, "What to do: Give --api-keys FILE"),
        (("node", "--host", "0.0.0.0", "--model", __file__), 2, "--insecure-plain-http"),
    ],
)
def test_a_failure_is_a_sentence_with_an_exit_code(arguments: tuple[str, ...], code: int, words: str) -> None:
    done = run(*arguments)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_debug_shows_the_traceback() -> None:
    assert "Traceback" in run("--debug", "nodes", "--tracker", "http://127.0.0.1:9").stderr


def test_a_reader_that_leaves_is_no_failure() -> None:
    done = subprocess.run(
        f"{sys.executable} -m shardline config show | head -n 1", shell=True, capture_output=True, text=True, timeout=30
    )
    assert done.stdout.startswith("SETTING") and done.stderr == ""


def test_only_the_command_line_reads_the_environment() -> None:
    source = Path(shardline.__file__).parent
    reading = [
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if any(word in path.read_text(encoding="utf-8") for word in ("os.environ", "getenv"))
    ]
    assert all(name.startswith("cli/") for name in reading), reading


@pytest.mark.parametrize(
    ("shell", "words"), [("bash", "complete -o nosort"), ("zsh", "#compdef"), ("fish", "complete")]
)
def test_completion_scripts_are_printed_and_what_they_ask_is_answered(shell: str, words: str) -> None:
    script = run(_SHARDLINE_COMPLETE=f"{shell}_source")
    assert script.returncode == 0 and words in script.stdout and "_SHARDLINE_COMPLETE" in script.stdout
    typed = {"COMP_WORDS": "shardline doc", "COMP_CWORD": "doc" if shell == "fish" else "1"}
    answered = run(_SHARDLINE_COMPLETE=f"{shell}_complete", **typed)
    assert answered.returncode == 0 and "doctor" in answered.stdout
