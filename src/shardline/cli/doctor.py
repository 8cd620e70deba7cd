"""`shardline doctor`: can this machine run a part of a cluster, and what to do where it cannot.

Owns how findings are shown and the exit code; what is looked at is machine_checks.py's. Shown by
tests/cli/test_doctor.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from shardline.cli.invocation import Invocation, environment, joined_trackers, pass_invocation
from shardline.cli.listings import as_json_option

if TYPE_CHECKING:
    from shardline.cli.machine_checks import Finding

_MARKS = {"ok": "ok    ", "note": "note  ", "failed": "FAILED"}


@click.command()
@click.option("--tracker", "tracker_url", metavar="URL", help="The Tracker whose clock counts [default: as elsewhere].")
@as_json_option
@pass_invocation
def doctor(invocation: Invocation, tracker_url: str | None, as_json: bool) -> None:
    """Check this machine, and name the fix of what fails.

    Python, engines, BitTorrent, memory, disk, write rights, ports, the address that others would see, the clock against
    a Tracker that runs here or was joined from here, open files. Ends with 1 where something failed; a note is no
    failure.
    """
    from shardline.cli.machine_checks import all_findings

    configuration = invocation.configuration(tracker=tracker_url)
    findings = all_findings(
        configuration.state_dir,
        reserve=configuration.settings.store_reserve_bytes,
        clusters=configuration.clusters,
        tracker=configuration.places.tracker,
        joined=joined_trackers(configuration),
        environ=environment(),
    )
    failed = sum(finding.state == "failed" for finding in findings)
    if as_json:
        click.echo(json.dumps({"ok": not failed, "checks": [_as_json(finding) for finding in findings]}, indent=2))
    else:
        click.echo(findings_text(findings))
    if failed:
        raise click.exceptions.Exit(1)


def _as_json(finding: Finding) -> dict[str, Any]:
    return {"name": finding.name, "state": finding.state, "what": finding.what, "fix": finding.fix or None}


def findings_text(findings: Sequence[Finding]) -> str:
    """A line each, below it what to do; the sum last."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{_MARKS[finding.state]}  {finding.name.ljust(width)}  {finding.what}")
        if finding.fix:
            lines.append(f"{' ' * (width + 10)}What to do: {finding.fix}")
    failed = sum(finding.state == "failed" for finding in findings)
    lines.append("")
    lines.append("This machine is fit." if not failed else f"{failed} of {len(findings)} checks failed.")
    return "\n".join(lines)
