"""Which flag an error speaks of: a role or a library says what is wrong, a person has to hear which flag to correct.

Owns that translation, for every command at once; errors that have advice of their own keep it. Shown by
tests/cli/test_flags.py.
"""

from __future__ import annotations

import functools
from typing import Any

import click

from shardline.errors import CATALOGUE, ShardlineError

_CODES = frozenset({"setting_invalid", "invalid_value"})
_ALSO = {"host": ("host", "listen"), "api_keys": ("api_keys_file",), "tracker": ("tracker_url",)}
"""What options call a value -> the parameters of a command that may have given it."""
_HINTS = {"host": ": an address or name of this machine, such as 127.0.0.1, or 0.0.0.0 for all its addresses."}


def naming_flags(command: click.Command) -> click.Command:
    """`command`, and all below it, with errors that name the flag that a person must correct."""
    if isinstance(command, click.Group):
        for below in command.commands.values():
            naming_flags(below)
    elif command.callback is not None:
        run = command.callback

        @functools.wraps(run)
        def named(*args: Any, **kwargs: Any) -> Any:
            try:
                return run(*args, **kwargs)
            except ShardlineError as error:
                found = flagged(error)
                if found is error:
                    raise
                raise found from error

        command.callback = named
    return command


def flagged(error: ShardlineError) -> ShardlineError:
    """The same error; where its advice is only that of the catalogue, with the flag of the running command instead."""
    context = click.get_current_context(silent=True)
    if context is None or error.advice != CATALOGUE[error.code].advice:
        return error
    if error.code == "artifact_untrusted":
        return _untrusted(error, context)
    if error.code not in _CODES:
        return error
    flag = _flag(error, context)
    advice = (
        "Correct what the message names." if flag is None else f"Correct {flag}{_HINTS.get(error.param or '', '.')}"
    )
    return ShardlineError(error.code, error.message, param=error.param, advice=advice, **error.details)


def _untrusted(error: ShardlineError, context: click.Context) -> ShardlineError:
    """With the flag by which this command is told of publishers; whoever names keys is not told to go without."""
    names: dict[str, str] = {str(p.name): max(p.opts, key=len) for p in context.command.params if p.opts}
    keys = next((name for name in ("trust", "public_keys") if name in names), None)
    if keys is None:
        return error
    advice = f"Name the key of its publisher: {names[keys]}."
    if not context.params.get(keys) and "allow_unsigned" in names:
        advice += f" Else: {names['allow_unsigned']}."
    return ShardlineError(error.code, error.message, param=error.param, advice=advice, **error.details)


def _flag(error: ShardlineError, context: click.Context) -> str | None:
    names = _ALSO.get(error.param or "", (error.param,))
    found = [parameter for parameter in context.command.params if _names_of(parameter) & set(names)]
    if not found:
        return None
    # Of several, the one whose value is what the message complains of.
    said = (p for p in found if context.params.get(str(p.name)) and str(context.params[str(p.name)]) in error.message)
    taken = next(said, found[0])
    return max(taken.opts, key=len) if isinstance(taken, click.Option) else taken.make_metavar(context)


def _names_of(parameter: click.Parameter) -> set[str | None]:
    """All names that an error may call a flag by."""
    return {parameter.name, *(option.lstrip("-").replace("-", "_") for option in parameter.opts)}
