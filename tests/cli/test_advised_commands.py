"""Every command that an error or the page tells a person to give exists, with these flags and words."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

import shardline
from shardline.cli.main import cli

SOURCES = Path(shardline.__file__).parent
_COMMAND = re.compile(r"shardline ((?:[a-z-]+|--?[a-z-]+|[A-Z][A-Z.:_]*|\[[A-Z ]+\]| )+)")
_WORD = re.compile(r"--[a-z-]+|-[a-z]\b|[A-Z][A-Z._:]*[A-Za-z]*|[a-z-]+")


def advised() -> list[tuple[str, str]]:
    """(file, what stands behind `shardline`) of each command in a string of the code, or on the page."""
    found = []
    for path in sorted([*SOURCES.rglob("*.py"), *(SOURCES / "dashboard").glob("*.js")]):
        for match in _COMMAND.finditer(path.read_text()):
            found.append((path.relative_to(SOURCES).as_posix(), match[1].strip()))
    return found


def command_of(words: list[str]) -> tuple[click.Command | None, list[str]]:
    """The command that `words` name, and what is left of them; None where they name none."""
    group: click.Command = cli
    for at, word in enumerate(words):
        if not isinstance(group, click.Group):
            return group, words[at:]
        if word.startswith("-"):
            continue  # a global flag
        if word not in group.commands:
            return None, words[at:]
        group = group.commands[word]
    return group, []


def test_commands_are_looked_for_where_they_are() -> None:
    files = {file for file, _ in advised()}
    assert {"errors.py", "dashboard/join_view.js", "cli/listings.py", "tracker/enrolment.py"} <= files


@pytest.mark.parametrize(("file", "text"), sorted(set(advised())))
def test_it_exists(file: str, text: str) -> None:
    words = _WORD.findall(text)
    command, left = command_of(words)
    if command is None:
        assert not any(word.startswith("-") for word in left[1:]), f"{file}: shardline {text}: no such command"
        return  # prose: "shardline is …"
    known = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    known |= {flag for parameter in cli.params for flag in parameter.opts} | {"--help"}
    flags = [word for word in left if word.startswith("-")]
    assert set(flags) <= known, f"{file}: shardline {text}"
    taken = left and left[0][0].isupper()  # a word for an argument, right behind the command
    has_argument = any(isinstance(parameter, click.Argument) for parameter in command.params)
    assert not taken or has_argument, f"{file}: {command.name} takes no {left[0]}"
