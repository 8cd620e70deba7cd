"""The commands that run a whole cluster on this machine, a process for each part: `up`, `serve`, `demo`.

Owns which parts there are and in which order; supervisor.py owns the processes. Shown by tests/cli/test_up.py.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardline.cli.cluster_parts import (
    GlobalFlags,
    Plan,
    artifact_arguments,
    gateway_part,
    node_parts,
    seeder_part,
    tracker_part,
)
from shardline.cli.engine_choice import ENGINE_HELP, ENGINES, engine_for, shared_out
from shardline.cli.invocation import Invocation, environment, pass_invocation
from shardline.cli.model_layers import layer_count
from shardline.cli.offering import check_offers, offering
from shardline.cli.roles import LISTEN_HELP, files_option, tls_options
from shardline.cli.values import LayerRanges, ListenAddress, check_cover, counted
from shardline.errors import ShardlineError
from shardline.options import LLAMA_ENGINES

if TYPE_CHECKING:
    from shardline.cli.client import Endpoint
    from shardline.cli.config import Configuration
    from shardline.cli.supervisor import Child, Supervisor

START_S = 30.0
ANSWER = {"max_tokens": 120, "temperature": 0}
QUESTION = "What is a shard, in one sentence?"


class Cluster:
    """A running cluster: the supervisor, the parts by name, and where they listen."""

    def __init__(self, supervisor: Supervisor, plan: Plan, say: Callable[[str], None]) -> None:
        self._supervisor = supervisor
        self._plan = plan
        self._say = say
        self._nodes: list[Child] = []
        self._gateway: Child | None = None
        self._tracker: Child | None = None
        self._seeder: Child | None = None
        self._flags = GlobalFlags(given=[], added=[])
        self.gateway_url = ""
        self.tracker_url = ""
        self.before: list[str] = []
        """Flags that a command needs in front to find this cluster."""
        self.is_only_one = True
        """On this machine, as it was when it became ready."""
        self.api_key = ""
        """One that the Gateway takes, if it asks for any."""
        self.kept_keys: Path | None = None
        """Where the keys are kept that the Gateway asks for because they were once made with this state folder."""

    @property
    def urls_to_name(self) -> tuple[str, str]:
        """What stands behind a command that asks the Gateway, and the Tracker, so that it finds this cluster."""
        if self.is_only_one:
            return "", ""
        return f" --gateway {self.gateway_url}", f" --tracker {self.tracker_url}"

    @property
    def offers(self) -> list[str]:
        """The artifacts that the seeder gives away, a line each."""
        return [] if self._seeder is None else list(self._seeder.offers)

    @property
    def endpoint(self) -> Endpoint:
        from shardline.cli.client import Endpoint

        return Endpoint("Gateway", self.gateway_url, self.api_key)

    def start(self, configuration: Configuration, flags: GlobalFlags) -> None:
        """Start everything, and return when all of it serves."""
        supervisor, plan = self._supervisor, self._plan
        self.api_key = next(iter(configuration.api_keys()), "") or configuration.own_key()
        self.kept_keys = configuration.kept_keys if configuration.has_kept_keys else None
        self._flags = flags
        tracker = self._tracker = supervisor.start(tracker_part(plan, flags))
        supervisor.until_ready([tracker], within_s=START_S)
        self.tracker_url = str(tracker.url)
        gateway = self._gateway = supervisor.start(gateway_part(plan, flags, self.tracker_url))
        self._nodes = [supervisor.start(part) for part in node_parts(plan, flags, self.tracker_url)]
        supervisor.until_ready([gateway], within_s=START_S)
        if plan.artifacts:
            self._seeder = supervisor.start(seeder_part(plan, flags, self.tracker_url))
            supervisor.until_ready([self._seeder], within_s=configuration.settings.worker_start_s)
        supervisor.until_ready(self._nodes, within_s=configuration.settings.worker_start_s)
        self.gateway_url = str(gateway.url)

    def on_invitation(self, say: Callable[[str], None]) -> None:
        """`say` the line for the next machine, now and whenever one was used."""
        if self._tracker is not None:
            self._tracker.on_line(say)

    def watch(self) -> None:
        """Report each part that ends; return only by the error that the API itself has gone.

        Without a Node, or a Tracker, the Gateway still answers: with what is missing, until it is back.
        """
        from shardline.cli.supervisor import death

        dead: list[Child] = []
        while True:
            child = self._supervisor.next_death(dead)
            dead.append(child)
            if child is self._gateway:
                raise death(child)
            self._say(
                f"\n{death(child).message}\n{self._consequence(child, dead)}\n"
                f"To start it again, in another terminal:\n  {shlex.join((*command_words(), *self._by_hand(child)))}\n"
                "Ctrl-C ends everything else."
            )

    def _consequence(self, child: Child, dead: list[Child]) -> str:
        if child is self._tracker:
            return "Running sessions go on; the Gateway answers new requests with 503 until the Tracker is back."
        if child is self._seeder:
            return "Nodes that run go on; those that still fetch get only what other Nodes have, until it is back."
        ranges = dict(zip(self._nodes, self._plan.ranges, strict=True))
        first, last = ranges[child]
        held = {n for c, (low, high) in ranges.items() if c not in dead for n in range(low, high)}
        missing = ranges_of(n for n in range(first, last) if n not in held)
        if not missing:
            return f"Other Nodes have its layers, {first}:{last}, too: requests go on over them."
        which = "No Node of this command is left. " if len(held) == 0 else ""
        return f"{which}The Gateway answers requests with 503 until a Node has the layers {missing} again."

    def _by_hand(self, child: Child) -> tuple[str, ...]:
        """What starts this part again; the Tracker where all others look for it."""
        if child is not self._tracker:
            return child.part.by_hand
        from shardline.transport.addresses import split_url

        given = [("--listen", self._plan.listen), ("--advertise", self._plan.advertise)]
        keys = [word for flag, value in given if value for word in (flag, value)]
        port = str(split_url(self.tracker_url).port)
        return (*self._flags.given, "tracker", "--port", port, *keys, *artifact_arguments(self._plan))


@click.command()
@click.argument("model", metavar="MODEL", type=click.Path(exists=True, path_type=Path))
@click.option("--nodes", type=click.IntRange(1), help="Nodes that share the model, as evenly as it goes.  [default: 2]")
@click.option("--layers", "ranges", type=LayerRanges(), help="Or the range of each Node: 0:10,10:20,20:30.")
@click.option("--engine", type=click.Choice(ENGINES), help=ENGINE_HELP)
@click.option("--host", type=ListenAddress(), default="127.0.0.1", show_default=True, help="Address of the Gateway.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="Port of the OpenAI API; 0: any."
)
@click.option("--tracker-port", type=click.IntRange(0, 65535), default=0, show_default=True, help="0: any free one.")
@click.option(
    "--threads",
    type=click.IntRange(1),
    help="Compute threads of each Node.  [default: what llama.cpp takes, else all cores]",
)
@click.option("--kv-tokens", type=click.IntRange(1), help="KV capacity of each Node, in tokens.")
@click.option("--api-keys", "api_keys_file", metavar="FILE", help="Keys that clients must send, one a line.")
@click.option("--insecure-plain-http", is_flag=True, help="Allow a --host beyond loopback, over unencrypted HTTP.")
@click.option("--listen", hidden=True)
@pass_invocation
def up(
    invocation: Invocation,
    /,
    *,
    listen: str | None,
    model: Path,
    nodes: int | None,
    ranges: list[tuple[int, int]] | None,
    engine: str | None,
    threads: int | None,
    kv_tokens: int | None,
    **gateway_flags: Any,
) -> None:
    """Run a whole cluster for MODEL on this machine.

    A Tracker, a Gateway and Nodes, each a process of its own, until Ctrl-C. MODEL is a GGUF file or a safetensors
    folder. With --engine scripted it is a script. The llama engine shares a model out by the bytes of its layers, the
    others by their number; `shardline cuts MODEL --nodes N` shows the ranges. For other machines: `shardline serve`.
    """
    if listen is not None:
        raise click.UsageError(
            "up is for this machine alone. Other machines join what `shardline serve --listen ADDRESS` runs, and so "
            "do Nodes of this one: shardline node --join 'LINE' --model MODEL"
        )
    plan = planned(model, nodes, ranges, engine, threads=threads, kv_tokens=kv_tokens, **gateway_flags)
    run_cluster(invocation, plan, lambda cluster: print_usage(cluster, first_model_of(cluster)), command="up")


@click.command()
@click.option("--host", type=ListenAddress(), default="127.0.0.1", show_default=True, help="Address of the Gateway.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="Port of the OpenAI API; 0: any."
)
@click.option("--tracker-port", type=click.IntRange(0, 65535), default=7070, show_default=True, help="0: any free one.")
@click.option("--listen", type=ListenAddress(), metavar="ADDRESS", help=LISTEN_HELP)
@click.option(
    "--advertise", metavar="HOST[:PORT]", help="What the line for joining names, where it is another address."
)
@click.option("--api-keys", "api_keys_file", metavar="FILE", help="Keys that clients must send, one a line.")
@tls_options
@click.option("--insecure-plain-http", is_flag=True, help="Allow a --host beyond loopback, over unencrypted HTTP.")
@offering
@files_option
@click.option("--seed-port", type=click.IntRange(0, 65535), default=0, show_default=True,
              help="Port by which Nodes fetch from this machine; 0: any free one.")  # fmt: skip
@pass_invocation
def serve(invocation: Invocation, /, **flags: Any) -> None:
    """Run a Tracker and a Gateway, as two processes.

    Nodes of this machine join with `shardline node --tracker URL --model PATH`. With --listen ADDRESS other machines
    join, each by a line that is printed here. With --artifact DIR Nodes fetch their layers from here and from one
    another, and need no --model.
    """

    def ready(cluster: Cluster) -> None:
        urls = f"\nGateway: {cluster.gateway_url}\nTracker: {cluster.tracker_url}\n{page_line(cluster)}"
        click.echo("\n".join((urls, *keys_lines(cluster))))
        own = shlex.join((*command_words(), *invocation.finding_arguments()))
        offers = cluster.offers
        if offers:
            click.echo("\n".join(("Offers to Nodes, which need no file of it:", *(f"  {line}" for line in offers))))
        if flags["listen"]:
            click.echo(f"Another line for joining: {own} invite\nCtrl-C ends all.")
            cluster.on_invitation(lambda line: click.echo(invitation_text(line, needs_model=not offers)))
            return
        more = "" if offers else " --model PATH"
        click.echo(f"Add Nodes: {own} node --tracker {cluster.tracker_url}{more}\nCtrl-C ends all.")

    check_offers(flags["artifacts"], flags["trust"], allow_unsigned=flags["allow_unsigned"])
    run_cluster(invocation, Plan(**flags), ready, command="serve")


@click.command()
@click.option("--nodes", type=click.IntRange(1), default=2, show_default=True, help="Nodes that share the model.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="Port of the OpenAI API; 0: any."
)
@click.option("--question", default=QUESTION, show_default=True, help="What to ask the model.")
@click.option("--once", is_flag=True, help="End after the answer.")
@click.option(
    "--model", type=click.Path(exists=True, path_type=Path), help="[default: SmolLM2, if its package is there]"
)
@click.option("--engine", type=click.Choice(ENGINES), help=ENGINE_HELP)
@pass_invocation
def demo(
    invocation: Invocation, nodes: int, port: int, question: str, once: bool, model: Path | None, engine: str | None
) -> None:
    """Run a small real model and ask it a question.

    SmolLM2-135M-Instruct on two Nodes of this machine; shows the telemetry of the answer, then serves until Ctrl-C.
    """
    from shardline.cli.chat import Conversation, answer
    from shardline.cli.demo_model import demo_model
    from shardline.cli.live import failure_words

    plan = planned(model or demo_model(), nodes, None, engine, port=port)

    def ask(cluster: Cluster) -> None:
        name = first_model_of(cluster)
        click.echo(f"\nAsking {name}: {question}\n")
        conversation = Conversation(cluster.endpoint, name, None, ANSWER)
        try:
            answer(conversation, question)
        except ShardlineError as error:
            if once:
                raise
            # The cluster goes on: what died of it is told next, and how to start that again.
            click.echo(f"failed: {failure_words(error)}", err=True)
        if once:
            click.echo("\nAsked once, as told; without it the cluster goes on serving.")
        else:
            print_usage(cluster, name)

    run_cluster(invocation, plan, ask, command="demo", once=once)


def invitation_text(line: str, *, needs_model: bool = True) -> str:
    """The line for the next machine, alone on its line."""
    from shardline.cli.process import join_command

    more = "; add --model PATH" if needs_model else ""
    return f"\nOn the next machine (it works once{more}):\n  {join_command(line)}"


def planned(
    model: Path,
    nodes: int | None,
    ranges: list[tuple[int, int]] | None,
    engine: str | None,
    *,
    threads: int | None = None,
    kv_tokens: int | None = None,
    **gateway_flags: Any,
) -> Plan:
    """The plan of a cluster for `model`; raises `layers_invalid` where its layers cannot be shared out as asked."""
    if nodes is not None and ranges is not None and nodes != len(ranges):
        raise click.UsageError(f"--nodes {nodes} and {len(ranges)} ranges in --layers do not fit: give one of them")
    chosen = engine_for(model, engine)
    if ranges is None:
        ranges = shared_out(model, chosen, nodes or 2)
    else:
        check_cover(ranges, layer_count(model, chosen))
    given = [] if engine is None else ["--engine", engine]
    given += [] if threads is None else ["--threads", str(threads)]
    given += [] if kv_tokens is None else ["--kv-tokens", str(kv_tokens)]
    # llama.cpp's own choice depends on how large the layers are.
    added = ["--threads", str(physical_cores())] if threads is None and chosen not in LLAMA_ENGINES else []
    return Plan(
        model=model.resolve(),
        ranges=ranges,
        node_arguments=(*given, *added),
        node_flags_given=tuple(given),
        **gateway_flags,
    )


def ranges_of(layers: Iterable[int]) -> str:
    """`0:3, 7:9` of ascending layers; empty of none."""
    found: list[list[int]] = []
    for layer in layers:
        if found and found[-1][1] == layer:
            found[-1][1] = layer + 1
        else:
            found.append([layer, layer + 1])
    return ", ".join(f"{first}:{last}" for first, last in found)


def physical_cores() -> int:
    """Nodes of one route compute in turns, so each may have all cores; hyper-threads do not help them."""
    import psutil

    return psutil.cpu_count(logical=False) or psutil.cpu_count() or 1


def run_cluster(
    invocation: Invocation, plan: Plan, when_ready: Callable[[Cluster], None], *, command: str, once: bool = False
) -> None:
    """Start, say that it runs, call `when_ready`, then watch until a signal (or end at once); leave nothing behind."""
    from shardline.cli.running import RunningCluster, entered, new_log_dir, running_clusters
    from shardline.cli.startup import StartView
    from shardline.cli.supervisor import Supervisor

    configuration = invocation.configuration(api_keys_file=plan.api_keys_file)
    by_make = command == "demo" and "MAKELEVEL" in environment()
    check_start(plan, configuration, by_make=by_make)
    notes = {f"node-{i}": f"{first}:{last}" for i, (first, last) in enumerate(plan.ranges, 1)}
    log_dir = new_log_dir(configuration.state_dir)
    click.echo(f"Starting {'a Tracker, a Gateway' if plan.ranges else 'a Tracker and a Gateway'}", nl=False)
    click.echo(f" and {counted(len(plan.ranges), 'Node')} for {plan.model.name}" if plan.model else "", nl=False)
    click.echo(f"; logs: {log_dir}")
    view = StartView(sys.stdout, notes)
    with Supervisor(log_dir, view) as supervisor:
        cluster = Cluster(supervisor, plan, lambda words: click.echo(words, err=True))
        try:
            cluster.start(configuration, global_flags(invocation, configuration))
        finally:
            view.close()
        entry = RunningCluster(
            pid=os.getpid(), gateway=cluster.gateway_url, tracker=cluster.tracker_url, what=plan.words(command)
        )
        with entered(configuration.state_dir, entry):
            cluster.before = invocation.finding_arguments()
            cluster.is_only_one = len(running_clusters(configuration.state_dir)) == 1
            when_ready(cluster)
            if not once:
                cluster.watch()
    click.echo("Ended; nothing is left running.")


def check_start(plan: Plan, configuration: Configuration, *, by_make: bool = False) -> None:
    """What can be known to fail is told before a process is started: no room for state, no free port, no key."""
    from shardline.cli.invocation import credential_of
    from shardline.cli.port import check_port
    from shardline.cli.roles import gateway_keys
    from shardline.cli.state import check_room
    from shardline.transport.http_server import check_listener

    check_room(configuration.state_dir)
    credential = credential_of(configuration, starts=True)  # Made here, once, so that no two parts race for it.
    if plan.tls_cert is None:
        with advice_for_clients(plan.host):
            check_listener(plan.host, insecure_plain_http=plan.insecure_plain_http, credential=credential)
        if plan.insecure_plain_http:
            click.echo(f"WARNING: {plan.host} is served over plain HTTP: whoever is on the way reads it.", err=True)
    gateway_keys(plan.host, plan.insecure_plain_http or plan.tls_cert is not None, configuration)
    if plan.port and plan.port == plan.tracker_port:
        why = f"--port and --tracker-port are both {plan.port}: the Gateway and the Tracker need one each"
        raise ShardlineError("setting_invalid", why, advice="Give two different ports; 0 takes any that is free.")
    check_port(plan.host, plan.port, "--port", configuration.clusters, by_make=by_make)
    check_port(plan.listen or "127.0.0.1", plan.tracker_port, "--tracker-port", configuration.clusters)


@contextlib.contextmanager
def advice_for_clients(host: str) -> Iterator[None]:
    """A Gateway that was to listen beyond this machine hears the whole command for that."""
    try:
        yield
    except ShardlineError as error:
        advice = (
            f"For clients elsewhere: shardline serve --host {host} --tls-cert CERT.pem --tls-key KEY.pem, with keys "
            "(shardline keys add NAME). Nodes elsewhere need --listen alone. Else leave --host out, or say "
            "--insecure-plain-http."
        )
        raise ShardlineError(error.code, error.message, advice=advice) from None


def global_flags(invocation: Invocation, configuration: Configuration) -> GlobalFlags:
    """Of every part. Whoever presses Ctrl-C here wants an end, not a drain, unless a setting says so."""
    added = ["--set", "drain_s=1"] if configuration.sources["drain_s"] == "default" else []
    return GlobalFlags(given=invocation.child_arguments(), added=added)


def first_model_of(cluster: Cluster) -> str:
    """The name under which the Gateway serves the model; it may take a moment to hear of the Nodes."""
    import time

    from shardline.cli.chat import first_model

    deadline = time.monotonic() + 10
    while True:
        try:
            return first_model(cluster.endpoint)
        except ShardlineError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def command_words() -> tuple[str, ...]:
    """`shardline` as it can be typed on this machine, in any folder: by name where PATH leads to this installation,
    else by its whole path."""
    found = shutil.which("shardline")
    own = Path(sys.executable).parent / "shardline"
    if found is not None and Path(found).absolute() == own:
        return ("shardline",)
    return (str(own),) if own.exists() else (sys.executable, "-m", "shardline")


def keys_lines(cluster: Cluster) -> list[str]:
    """What to know where keys of the state folder outlive the cluster that they were made for."""
    if cluster.kept_keys is None:
        return []
    own = shlex.join((*command_words(), *cluster.before))
    return [
        f"This Gateway asks for keys: {own} keys add NAME makes one. To have none asked for, end this, delete",
        f"  {cluster.kept_keys}",
        "and start it again.",
    ]


def page_line(cluster: Cluster) -> str:
    """Where to look at the cluster with a browser."""
    return f"Page, for a browser: {cluster.gateway_url}/"


def print_usage(cluster: Cluster, model: str) -> None:
    """What one can do now, as lines that work when they are copied."""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}], "stream": true}}'
    key = " -H 'Authorization: Bearer A-KEY-OF-YOURS'" if cluster.api_key else ""
    own, (gateway, tracker) = shlex.join((*command_words(), *cluster.before)), cluster.urls_to_name
    click.echo(
        f"\n{page_line(cluster)}\nThe OpenAI API is at {cluster.gateway_url}/v1\n"
        f"  curl -N {cluster.gateway_url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'\n"
        f"In another terminal:\n  {own} chat{gateway}\n  {own} nodes{tracker}\n  {own} sessions{gateway}\n"
        + "\n".join((*keys_lines(cluster), "Ctrl-C ends everything."))
    )
