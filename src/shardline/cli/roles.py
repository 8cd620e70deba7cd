"""The commands that run one part as this process: `tracker`, `gateway`, `node`.

They parse, build the options of the role, and call its `run`. Shown by tests/cli/test_roles.py.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from shardline.cli.composite import UPSTREAM, check_flags, composite_options, upstream_options
from shardline.cli.config import Configuration
from shardline.cli.engine_choice import ENGINE_HELP, ENGINES, engine_for
from shardline.cli.invocation import Invocation, credential_of, environment, pass_invocation
from shardline.cli.offering import offering, trusted_keys
from shardline.cli.values import JoinLine, LayerRange, ListenAddress, Memory
from shardline.errors import ShardlineError
from shardline.options import CompositeOptions, GatewayOptions, NodeOptions, SeederOptions, TrackerOptions

TRACKER_KEY = "tracker.key"
"""Name in the state folder."""
JOIN_HELP = "Join a cluster of other machines by the line that it printed; @FILE or - (stdin) keeps it out of `ps`."
LISTEN_HELP = "Let other machines join: HTTPS with the cluster's keys, as 0.0.0.0; prints the line for the next one."
Options = TypeVar("Options", TrackerOptions, GatewayOptions, NodeOptions, CompositeOptions, SeederOptions)


def listener(port: int, port_help: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The flags of everything that listens."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in (
            click.option(
                "--insecure-plain-http", is_flag=True, help="Allow a --host beyond loopback, over unencrypted HTTP."
            ),
            click.option("--port", type=click.IntRange(0, 65535), default=port, show_default=True, help=port_help),
            click.option(
                "--host", type=ListenAddress(), default="127.0.0.1", show_default=True, help="Address to listen on."
            ),
        ):
            command = option(command)
        return command

    return add


_trust_option = click.option(
    "--trust",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="PEM",
    help="Public key of a publisher: take no artifact without the signature of one [default: what the Tracker names].",
)
files_option = click.option(
    "--files",
    "folders",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Look there for files of the model, too. Repeatable.",
)


def _held_elsewhere() -> tuple[Path, ...]:
    """Where other programs keep models."""
    from shardline.artifact.adoption import usual_folders

    return tuple(usual_folders(Path.home()))


def tls_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The flags of a listener for clients, with a certificate that they know."""
    file = click.Path(path_type=Path)
    for option in (
        click.option("--tls-key", type=file, metavar="FILE", help="Its private key (PEM)."),
        click.option(
            "--tls-cert", type=file, metavar="FILE", help="Serve the API over HTTPS: certificate chain (PEM)."
        ),
    ):
        command = option(command)
    return command


@click.command()
@listener(7070, "Port to listen on; 0: any free one.")
@click.option("--listen", type=ListenAddress(), metavar="ADDRESS", help=LISTEN_HELP)
@click.option("--advertise", metavar="HOST[:PORT]", help="What lines for joining name, where it is another address.")
@click.option(
    "--key", "key_path", type=click.Path(path_type=Path), help="Key that signs tickets [default: in the state folder]."
)
@offering
@pass_invocation
def tracker(
    invocation: Invocation,
    /,
    host: str,
    port: int,
    insecure_plain_http: bool,
    listen: str | None,
    advertise: str | None,
    key_path: Path | None,
    artifacts: tuple[Path, ...],
    trust: tuple[Path, ...],
    allow_unsigned: bool,
) -> None:
    """Run the Tracker of a cluster.

    It knows the Nodes, tells new ones which layers to take, and picks the route of each session. With --listen other
    machines may join: it prints the line for the next one. With --artifact a Node needs no file of the model; somebody
    must have one: shardline artifact seed.
    """
    from shardline.tracker.run import run
    from shardline.transport.addresses import is_loopback

    configuration = invocation.configuration()
    keys = listen is not None or not (insecure_plain_http or is_loopback(host))
    run_role(
        invocation,
        "tracker",
        configuration,
        lambda announce: TrackerOptions(
            settings=configuration.settings,
            host=listen or host,
            port=port,
            credential=credential_of(configuration, starts=True),
            state_dir=configuration.state_dir,
            insecure_plain_http=insecure_plain_http,
            keys=keys,
            advertise=advertise,
            key_path=with_room(key_path or configuration.state_dir / TRACKER_KEY),
            artifacts=artifacts,
            trusted_keys=trusted_keys(trust),
            allow_unsigned=allow_unsigned,
            announce=announce,
        ),
        run,
    )


@click.command()
@click.option("--tracker", "tracker_url", metavar="URL", help="The Tracker [default: the one of this machine].")
@click.option("--join", "line", type=JoinLine(), metavar="LINE", help=JOIN_HELP)
@click.option("--api-keys", "api_keys_file", metavar="FILE", help="Keys that clients must send, one a line.")
@tls_options
@listener(8080, "Port of the OpenAI API; 0: any free one.")
@pass_invocation
def gateway(
    invocation: Invocation,
    /,
    *,
    tracker_url: str | None,
    line: str | None,
    api_keys_file: str | None,
    host: str,
    port: int,
    insecure_plain_http: bool,
    tls_cert: Path | None,
    tls_key: Path | None,
) -> None:
    """Run a Gateway of a cluster.

    It speaks the OpenAI API, opens a session over a route for each request, and streams tokens and telemetry.
    """
    from shardline.gateway.run import run

    check_one_tracker(line, tracker_url)
    configuration = invocation.configuration(tracker=tracker_url, api_keys_file=api_keys_file)
    run_role(
        invocation,
        "gateway",
        configuration,
        lambda announce: GatewayOptions(
            settings=configuration.settings,
            tracker_url=configuration.url("tracker") if line is None else joined_url(line),
            host=host,
            port=port,
            credential=party_credential(configuration, line, insecure_plain_http=insecure_plain_http),
            join=line,
            state_dir=configuration.state_dir if line is None else writable(configuration.state_dir),
            api_keys=gateway_keys(host, insecure_plain_http or tls_cert is not None, configuration),
            insecure_plain_http=insecure_plain_http,
            tls_cert=tls_cert,
            tls_key=tls_key,
            finding_flags=tuple(invocation.finding_arguments()),
            announce=announce,
        ),
        run,
    )


@click.command()
@click.option(
    "--model",
    metavar="PATH",
    help="GGUF file or safetensors folder [default: what the Tracker offers, fetched as far as it is needed].",
)
@upstream_options
@click.option("--artifact", metavar="NAME", help="Which of the offered ones, by content_id or name.")
@_trust_option
@files_option
@click.option("--no-adopt", is_flag=True, help="Leave what other programs of this machine hold of it alone.")
@click.option(
    "--store",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Where pieces are kept [default: artifacts/ in the state folder].",
)
@click.option("--tracker", "tracker_url", metavar="URL", help="The Tracker [default: the one of this machine].")
@click.option(
    "--layers", type=LayerRange(), help="Half-open, as a Python slice: 0:15. Without it the Tracker places the Node."
)
@click.option(
    "--memory",
    "memory_bytes",
    type=Memory(),
    help="For layers and KV, where the Tracker places the Node, as 4GiB; its processes take some 200 MiB beside.",
)
@click.option("--engine", type=click.Choice(ENGINES), help=ENGINE_HELP)
@click.option("--kv-tokens", type=click.IntRange(1), help="KV capacity in tokens [default: what fits into memory].")
@click.option(
    "--threads", type=click.IntRange(0), default=0, show_default=True, help="Compute threads; 0: the engine's choice."
)
@click.option("--dtype", help="Number format of the computation, as bfloat16 [default: the engine's own].")
@click.option(
    "--context-length", type=click.IntRange(1), help="Longest sequence [default: what the model was trained for]."
)
@click.option("--content-id", help="Refuse to serve a model with another digest.")
@click.option("--join", "line", type=JoinLine(), metavar="LINE", help=JOIN_HELP)
@click.option(
    "--advertise", "advertise_url", metavar="URL", help="URL, or HOST[:PORT], by which others reach this Node."
)
@click.option(
    "--identity",
    "identity_path",
    type=click.Path(path_type=Path),
    help="Key file that keeps the Node's id over restarts.",
)
@click.option("--inline", is_flag=True, hidden=True, help="Scripted engine: inside this process.")
@listener(0, "Port to listen on; 0: any free one.")
@pass_invocation
def node(
    invocation: Invocation,
    /,
    *,
    tracker_url: str | None,
    line: str | None,
    layers: tuple[int, int] | None,
    host: str,
    insecure_plain_http: bool,
    identity_path: Path | None,
    engine: str | None,
    model: str | None,
    trust: tuple[Path, ...],
    folders: tuple[Path, ...],
    no_adopt: bool,
    **given: Any,
) -> None:
    """Run a Node: some layers of a model.

    It loads the layers, tests them, tells the Tracker, and computes them for sessions. Without --model it takes one
    that the Tracker offers, and fetches its layers from the machines that have them; stopped at any time, it goes on
    from there. With --join it listens where the Tracker reaches it, if no --host is given. With --upstream it computes
    nothing: another server does, and this Node makes it a part of the cluster.
    """
    from shardline.node.run import run

    check_flags(given["upstream"], model)
    if model is None and engine == "scripted":
        raise click.UsageError("--engine scripted needs its script: --model PATH")
    check_one_tracker(line, tracker_url)
    configuration = invocation.configuration(tracker=tracker_url)
    tracker_url = joined_url(line) if line is not None else configuration.url("tracker")
    if line is not None and is_default("host"):
        host = host_towards(tracker_url)
    upstream = {name: given.pop(name) for name in UPSTREAM}
    if upstream["upstream"] is not None:
        shared = {name: given[name] for name in ("port", "advertise_url", "context_length")}
        more = {"model": model, "insecure_plain_http": insecure_plain_http, "identity_path": identity_path}
        _composite_node(invocation, configuration, line=line, host=host, **shared, **more, **upstream)
        return
    first, last = layers if layers is not None else (None, None)
    shared = {"tracker_url": tracker_url, "host": host, "line": line, "insecure_plain_http": insecure_plain_http}
    found = {"trust": trust, "look_in": folders if no_adopt else (*folders, *_held_elsewhere())}
    given |= {**shared, **found, "first": first, "last": last, "model": model, "identity_path": identity_path}
    run_role(
        invocation,
        "node",
        configuration,
        lambda announce: _node_options(configuration, announce, engine=engine, **given),
        run,
    )


def _node_options(
    configuration: Configuration, announce: Any, *, line: str | None, engine: str | None, **given: Any
) -> NodeOptions:
    model, identity = given["model"], given.pop("identity_path")
    insecure: bool = given["insecure_plain_http"]
    return NodeOptions(
        settings=configuration.settings,
        credential=party_credential(configuration, line, insecure_plain_http=insecure),
        join=line,
        state_dir=writable(configuration.state_dir) if line is not None else configuration.state_dir,
        announce=announce,
        trusted_keys=trusted_keys(given.pop("trust")),
        environment=environment(),
        engine=engine_for(None if model is None else Path(model), engine),
        engine_is_default=engine is None,
        identity_path=None if identity is None else with_room(identity),
        **given,
    )


def _composite_node(invocation: Invocation, configuration: Configuration, **given: Any) -> None:
    from shardline.node.composite_run import run

    run_role(
        invocation, "node", configuration, lambda announce: composite_options(configuration, announce, **given), run
    )


def check_one_tracker(line: str | None, tracker_url: str | None) -> None:
    if line is not None and tracker_url is not None:
        raise click.UsageError("--join names the Tracker: leave --tracker out")


def joined_url(line: str) -> str:
    """The Tracker that a line for joining names; raises `setting_invalid`."""
    from shardline.transport.join import join_line

    return join_line(line).tracker


def party_credential(configuration: Configuration, line: str | None, *, insecure_plain_http: bool) -> str:
    """The credential of whoever goes to a Tracker that is there; whoever joins by a line is told it, and with a Tracker
    over HTTPS the role says what is missing. Raises `insecure_listener`, `setting_invalid`."""
    from shardline.transport.http_server import check_tracker

    if line is not None:
        return ""
    url = configuration.url("tracker")
    if url.startswith("https:"):
        return credential_of(configuration) if configuration.credential_path.exists() else ""
    check_tracker(url, insecure_plain_http=insecure_plain_http)
    return credential_of(configuration, tracker=url)


def host_towards(url: str) -> str:
    """The address of this machine that reaches what is at `url`."""
    from shardline.transport.addresses import address_towards, split_url

    parts = split_url(url)
    return address_towards(parts.host, parts.port)


def is_default(name: str) -> bool:
    """Whether nobody gave this flag of the running command."""
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.DEFAULT


def writable(folder: Path) -> Path:
    """`folder`, into which a membership will be written; raises `state_unwritable` before a token is spent."""
    from shardline.cli.state import check_room

    check_room(folder)
    return folder


def with_room(path: Path) -> Path:
    """`path`, which the role will make where it is not there; raises `state_unwritable` where it could not."""
    from shardline.cli.state import check_room_for

    check_room_for(path)
    return path


def gateway_keys(host: str, allowed: bool, configuration: Configuration) -> tuple[str, ...]:
    """The keys that clients must send; a Gateway that strangers reach and that asks for none is refused by name."""
    from shardline.transport.addresses import is_loopback

    keys = configuration.api_keys()
    if allowed and not keys and not is_loopback(host) and not configuration.has_kept_keys:
        why = f"{host} can be reached from other machines, and this Gateway would ask nobody for a key"
        raise ShardlineError(
            "insecure_listener",
            why,
            advice="Give --api-keys FILE, or make a key (shardline keys add NAME), or bind to loopback (no --host).",
        )
    return keys


def run_role(
    invocation: Invocation,
    name: str,
    configuration: Configuration,
    options: Callable[[Any], Options],
    run: Callable[[Options], Coroutine[Any, Any, None]],
) -> None:
    """Set up logs, run the role until a signal, and give a supervisor the reason of a failure."""
    from shardline.cli.client import for_a_person
    from shardline.cli.flags import flagged
    from shardline.cli.process import Announcer, is_one_place, run_until_signal
    from shardline.cli.span_export import span_export
    from shardline.telemetry.log_tail import LogTail
    from shardline.telemetry.logs import configure_logs

    places, tail = configuration.places, LogTail()
    like_logs = places.log_format != "console" and is_one_place()
    announcer = Announcer(name, supervised=invocation.supervised, like_logs=like_logs)
    tracker_url: str | None = None
    configure_logs(role=name, style=places.log_format, level=places.log_level, tail=tail)
    try:
        built = options(announcer)
        if isinstance(built, (NodeOptions, CompositeOptions, SeederOptions)):
            built = replace(built, log_lines=tail.since)
        tracker_url = None if isinstance(built, TrackerOptions) else built.tracker_url
        with span_export(environment(), name) as spans:
            if not isinstance(built, SeederOptions):
                built = replace(built, spans=spans)
            run_until_signal(run(built), drain_s=configuration.settings.drain_s, lifeline=invocation.supervised)
        announcer.ended()
    except ShardlineError as fault:
        # Whom a role asks before it serves is the Tracker.
        error = for_a_person(flagged(fault), "Tracker", tracker_url)
        announcer.failed(error)
        raise error from fault
