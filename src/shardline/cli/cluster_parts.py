"""Of what a cluster on this machine consists: its plan, and what each of its processes is started with.

Owns the arguments of the parts; cluster.py says when they start. Shown by tests/cli/test_up.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardline.cli.supervisor import Part

GATEWAY_WAVE, NODE_WAVE, TRACKER_WAVE = 0, 1, 2
"""The Gateway ends first, so that clients hear of it; the Tracker last, so that Nodes can take their leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a cluster on this machine consists of."""

    host: str = "127.0.0.1"
    port: int = 8080
    tracker_port: int = 0
    api_keys_file: str | None = None
    insecure_plain_http: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    listen: str | None = None
    """Where other machines reach the Tracker, over HTTPS; None: nowhere."""
    advertise: str | None = None
    artifacts: tuple[Path, ...] = ()
    """Artifact folders that are offered to Nodes, with a seeder of their files."""
    trust: tuple[Path, ...] = ()
    folders: tuple[Path, ...] = ()
    """Where the seeder looks for the files, beside the usual places."""
    allow_unsigned: bool = False
    seed_port: int = 0
    model: Path | None = None
    ranges: list[tuple[int, int]] = field(default_factory=list)
    """Layers of each Node; none: no Nodes are started."""
    node_arguments: tuple[str, ...] = ()
    """Flags that all Nodes get."""
    node_flags_given: tuple[str, ...] = ()
    """Those of them that a person gave."""

    def words(self, command: str) -> str:
        """The cluster in a few words: `up model.gguf`."""
        if self.artifacts:
            return " ".join((command, *(folder.name for folder in self.artifacts)))
        return f"{command} {self.model.name}" if self.model else command


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalFlags:
    """What stands in front of the command of every part."""

    given: list[str]
    """As a person gave them."""
    added: list[str]
    """Ours."""

    @property
    def all(self) -> list[str]:
        return [*self.given, *self.added]


def tracker_part(plan: Plan, flags: GlobalFlags) -> Part:
    from shardline.cli.supervisor import Part

    arguments = [*flags.all, "tracker", "--port", str(plan.tracker_port)]
    arguments += ["--listen", plan.listen] if plan.listen else []
    arguments += ["--advertise", plan.advertise] if plan.advertise else []
    arguments += artifact_arguments(plan)
    return Part("tracker", tuple(arguments), TRACKER_WAVE)


def artifact_arguments(plan: Plan) -> list[str]:
    """Which artifacts, and whom to believe about them: of the Tracker and of the seeder."""
    arguments = [word for folder in plan.artifacts for word in ("--artifact", str(folder.absolute()))]
    arguments += [word for path in plan.trust for word in ("--trust", str(path.absolute()))]
    return [*arguments, "--allow-unsigned"] if plan.allow_unsigned else arguments


def seeder_part(plan: Plan, flags: GlobalFlags, tracker_url: str) -> Part:
    from shardline.cli.supervisor import Part

    own = ["artifact", "seed", "--tracker", tracker_url, "--port", str(plan.seed_port), *artifact_arguments(plan)]
    own += [word for folder in plan.folders for word in ("--files", str(folder.absolute()))]
    own += ["--host", plan.listen] if plan.listen else []
    if plan.advertise:
        from shardline.transport.addresses import advertised_url, make_url, split_url

        # The address by which others reach this machine; the port is the seeder's own.
        host = split_url(advertised_url(plan.advertise, "https", "", 1)).host
        own += ["--advertise", make_url("https", host, 1).removeprefix("https://").rpartition(":")[0]]
    return Part("seeder", (*flags.all, *own), NODE_WAVE, (*flags.given, *own))


def gateway_part(plan: Plan, flags: GlobalFlags, tracker_url: str) -> Part:
    from shardline.cli.supervisor import Part

    arguments = [*flags.all, "gateway", "--tracker", tracker_url, "--host", plan.host, "--port", str(plan.port)]
    arguments += ["--api-keys", plan.api_keys_file] if plan.api_keys_file else []
    arguments += ["--insecure-plain-http"] if plan.insecure_plain_http else []
    for flag, path in (("--tls-cert", plan.tls_cert), ("--tls-key", plan.tls_key)):
        arguments += [flag, str(path)] if path else []
    return Part("gateway", tuple(arguments), GATEWAY_WAVE)


def node_parts(plan: Plan, flags: GlobalFlags, tracker_url: str) -> list[Part]:
    from shardline.cli.supervisor import Part

    parts = []
    for number, (first, last) in enumerate(plan.ranges, 1):
        node = ("node", "--model", str(plan.model), "--tracker", tracker_url, "--layers", f"{first}:{last}")
        arguments = (*flags.all, *node, *plan.node_arguments)
        by_hand = (*flags.given, *node, *plan.node_flags_given)
        parts.append(Part(f"node-{number}", arguments, NODE_WAVE, by_hand))
    return parts
