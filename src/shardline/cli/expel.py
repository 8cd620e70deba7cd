"""`shardline expel`: throw a Node or a Gateway out of a cluster with keys.

It asks the Tracker that runs, as the operator that whoever owns its state folder is. Shown by
tests/cli/test_invite.py.
"""

from __future__ import annotations

import json
import re
from urllib.parse import quote

import click

from shardline.cli.invite import operator_of
from shardline.cli.invocation import Invocation, pass_invocation
from shardline.cli.listings import as_json_option, full_id

_PARTY = re.compile("(n|gateway)-[0-9a-f]{16}")


@click.command()
@click.argument("party", metavar="ID")
@click.option("--undo", is_flag=True, help="Let it come back.")
@click.option("--tracker", "tracker_url", metavar="URL", help="The Tracker [default: the one of this machine].")
@as_json_option
@pass_invocation
def expel(invocation: Invocation, party: str, undo: bool, tracker_url: str | None, as_json: bool) -> None:
    """Throw a Node or Gateway out, by the id that `nodes` lists.

    The beginning of the id is enough. On the machine of the Tracker. No new session goes to it, it gets no
    new certificate, and with the next heartbeat all Nodes refuse the one that it has. Sessions that run over a Node go
    on to their end; those of a Gateway end.
    """
    tracker = operator_of(invocation.configuration(tracker=tracker_url))
    if not _PARTY.fullmatch(party):
        listed = tracker.get("/v1/nodes")
        party = full_id(party, [known["id"] for known in (*listed["nodes"], *(listed.get("gateways") or []))])
    path = f"/v1/parties/{quote(party, safe='')}/expulsion"
    answer = tracker.delete(path) if undo else tracker.post(path)
    if as_json:
        click.echo(json.dumps(answer, indent=2))
    elif undo:
        click.echo(f"{party} may come back.")
    else:
        hours = answer["certificate_s"] / 3600
        click.echo(f"{party} is out. Nodes hear of it by heartbeat, or within {hours:g} h by its certificate.")
