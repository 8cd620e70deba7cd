"""`shardline invite`: another line by which a machine joins the cluster.

It asks the Tracker that runs, as the operator that whoever owns its state folder is. Shown by tests/cli/test_invite.py.
"""

from __future__ import annotations

import json

import click

from shardline.cli.invocation import Invocation, pass_invocation, tracker_of
from shardline.cli.listings import as_json_option


@click.command()
@click.option("--tracker", "tracker_url", metavar="URL", help="The Tracker [default: the one of this machine].")
@as_json_option
@pass_invocation
def invite(invocation: Invocation, tracker_url: str | None, as_json: bool) -> None:
    """Print a line by which another machine joins this cluster.

    On the machine of the Tracker. The line works once, for a day.
    """
    from shardline.cli.process import join_command
    from shardline.errors import ShardlineError

    configuration = invocation.configuration(tracker=tracker_url)
    if not configuration.url("tracker").startswith("https:"):
        raise ShardlineError(
            "setting_invalid",
            f"{configuration.url('tracker')} is of a cluster that other machines cannot join",
            advice="Start it for them: shardline serve --listen 0.0.0.0",
            param="tracker",
        )
    answer = tracker_of(configuration).post("/v1/invitations")
    click.echo(json.dumps(answer, indent=2) if as_json else join_command(answer["line"]))
