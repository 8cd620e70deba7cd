"""`shardline keys add|list|revoke`: who may ask the Gateways of this state folder, how much, and what was used.

Owns the flags and the table. What is kept and how is gateway/key_file.py's; the key itself is printed once and kept
nowhere. Shown by tests/cli/test_keys.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import click

from shardline.cli.invocation import Invocation, pass_invocation
from shardline.cli.listings import as_json_option, columns, wide_option

if TYPE_CHECKING:
    from shardline.gateway.keys import ApiKey, Scope
    from shardline.gateway.ledger import KeyUsage

_SCOPES = ("generate", "look")
_MOST_REQUESTS = 100_000


@click.group()
def keys() -> None:
    """Make, list and revoke API keys.

    Of the Gateways of this state folder. With the first one, a Gateway asks everybody for a key; running ones notice
    within a second. The commands of this machine have a key of their own, named operator.
    """


@keys.command()
@click.argument("name", metavar="NAME")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice(_SCOPES),
    multiple=True,
    help="generate: ask for answers; look: see the cluster. Repeatable [default: both].",
)
@click.option("--rate", type=click.IntRange(1, _MOST_REQUESTS), metavar="N", help="Requests a minute at most.")
@click.option("--concurrent", type=click.IntRange(1, 10_000), metavar="N", help="Requests at a time at most.")
@as_json_option
@pass_invocation
def add(
    invocation: Invocation,
    name: str,
    scopes: tuple[Scope, ...],
    rate: int | None,
    concurrent: int | None,
    as_json: bool,
) -> None:
    """Make a key for NAME and print it, this once."""
    from shardline.cli.state import check_room
    from shardline.gateway.key_file import add_key, operator_key
    from shardline.options import KEYS_FILE

    configuration = invocation.configuration()
    check_room(configuration.state_dir)
    path = configuration.state_dir / KEYS_FILE
    now = time.time()
    chosen = cast("tuple[Scope, ...]", tuple(scope for scope in _SCOPES if not scopes or scope in scopes))
    key, entry = add_key(path, name, now=now, scopes=chosen, requests_per_minute=rate, concurrent=concurrent)
    operator_key(path, now)
    if as_json:
        click.echo(json.dumps({"key": key, **_facts(entry, None)}, indent=2))
        return
    click.echo(key)
    click.echo(
        f"That is the key of {name}: it is shown this once, and only its digest is kept. Clients send it as\n"
        f"'Authorization: Bearer …', commands of ours as SHARDLINE_API_KEY.",
        err=True,
    )


@keys.command("list")
@as_json_option
@wide_option
@pass_invocation
def list_keys(invocation: Invocation, as_json: bool, wide: bool) -> None:
    """List the keys, their limits, and what each has used."""
    from shardline.gateway.key_file import kept_keys
    from shardline.gateway.ledger import USAGE_FILE, kept_usage
    from shardline.options import KEYS_FILE

    folder = invocation.configuration().state_dir
    kept = kept_keys(folder / KEYS_FILE)
    usage = kept_usage(folder / USAGE_FILE)
    listed = list(kept or ())
    known = {key.name for key in listed}
    others = [_facts(None, used, name=name) for name, used in sorted(usage.items()) if name not in known]
    facts = [*(_facts(key, usage.get(key.name)) for key in listed), *others]
    if as_json:
        click.echo(json.dumps({"asked_for": kept is not None, "keys": facts}, indent=2))
    elif not facts:
        click.echo(
            "No keys: a Gateway of this state folder asks for those of --api-keys, if any.\n"
            "Make one: shardline keys add NAME"
        )
    else:
        click.echo(_table(facts, wide=wide))


@keys.command()
@click.argument("name", metavar="NAME")
@as_json_option
@pass_invocation
def revoke(invocation: Invocation, name: str, as_json: bool) -> None:
    """Make the key of NAME worth nothing, for good.

    What it asked for and is under way goes on to its end. Its name stays taken, and keys are asked for also when the
    last one is revoked.
    """
    from shardline.gateway.key_file import revoke_key
    from shardline.options import KEYS_FILE

    entry = revoke_key(invocation.configuration().state_dir / KEYS_FILE, name, now=time.time())
    click.echo(json.dumps(_facts(entry, None), indent=2) if as_json else f"The key of {name} is valid no more.")


def _facts(key: ApiKey | None, usage: KeyUsage | None, *, name: str = "") -> dict[str, Any]:
    """One key as JSON; without `key`: one of --api-keys that has been used."""
    return {
        "name": key.name if key else name,
        "state": "of --api-keys" if key is None else "valid" if key.revoked is None else "revoked",
        "scopes": list(key.scopes) if key else list(_SCOPES),
        "requests_per_minute": key.requests_per_minute if key else None,
        "concurrent": key.concurrent if key else None,
        "created": key.created if key else None,
        "revoked": key.revoked if key else None,
        "usage": {
            "requests": usage.requests if usage else 0,
            "refused": usage.refused if usage else 0,
            "prompt_tokens": usage.prompt_tokens if usage else 0,
            "completion_tokens": usage.completion_tokens if usage else 0,
            "last_used": usage.last_used if usage else None,
        },
    }


def _table(facts: Sequence[dict[str, Any]], *, wide: bool) -> str:
    header = ["KEY", "STATE", "SCOPES", "A MINUTE", "AT A TIME", "REQUESTS", "PROMPT", "ANSWER"]
    header += ["REFUSED", "MADE", "LAST USED"] if wide else []
    rows = []
    for fact in facts:
        usage = fact["usage"]
        row = [fact["name"], fact["state"], ",".join(fact["scopes"])]
        row += [str(fact[limit] or "–") for limit in ("requests_per_minute", "concurrent")]
        row += [str(usage[name]) for name in ("requests", "prompt_tokens", "completion_tokens")]
        if wide:
            row += [str(usage["refused"]), _day(fact["created"]), _day(usage["last_used"])]
        rows.append(row)
    return columns(header, rows)


def _day(seconds: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)) if seconds else "–"
