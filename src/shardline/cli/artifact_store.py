"""`shardline artifact list|fetch|scrub|rm`: the store of Model Artifacts on this machine.

Owns these commands and what they print. What the store is, artifact/store.py says; how pieces travel, artifact/fetch.py
and transport/piece_*.py. Shown by tests/cli/test_artifact_store.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from shardline.cli.artifact import key_option, publisher_key
from shardline.cli.config import normal_url
from shardline.cli.invocation import Invocation, credential_of, note_absent_state, pass_invocation
from shardline.cli.listings import as_json_option, columns, full_id, size
from shardline.cli.offering import believed
from shardline.cli.progress import progress
from shardline.cli.seeder import seed
from shardline.cli.values import LayerRange
from shardline.errors import ShardlineError
from shardline.options import STORE_FOLDER

if TYPE_CHECKING:
    from shardline.artifact.bundle import TrustPolicy
    from shardline.artifact.fetch import Fetch, FetchProgress
    from shardline.artifact.store import Store, StoredArtifact
    from shardline.cli.config import Configuration

store_option = click.option(
    "--store",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="[default: artifacts/ in the state folder]",
)


@click.command("list")
@store_option
@as_json_option
@pass_invocation
def list_artifacts(invocation: Invocation, folder: Path | None, as_json: bool) -> None:
    """List what is in the store, and which layers are held."""
    with _store(invocation, folder, looks=True) as store:
        found = [_holding(store, content_id) for content_id in store.content_ids()]
    rows = [
        (h["name"], size(h["held_bytes"]), size(h["total_bytes"]), _layers(h["servable"]), h["content_id"])
        for h in found
    ]
    text = columns(("NAME", "HELD", "OF", "LAYERS", "CONTENT_ID"), rows) if rows else "nothing is in the store"
    _print(as_json, found, text)


@click.command()
@click.argument("content_id", metavar="CONTENT_ID|NAME")
@store_option
@as_json_option
@pass_invocation
def rm(invocation: Invocation, content_id: str, folder: Path | None, as_json: bool) -> None:
    """Remove an artifact from the store.

    Refused while a process of this machine uses it. Files of other programs that it refers to stay.
    """
    with _store(invocation, folder, looks=True) as store:
        content_id = _full_id(store, content_id)
        freed = store.remove(content_id)
    _print(as_json, {"content_id": content_id, "freed_bytes": freed}, f"{content_id}: {size(freed)} freed")


@click.command()
@click.argument("content_id", metavar="CONTENT_ID|NAME")
@store_option
@as_json_option
@pass_invocation
def scrub(invocation: Invocation, content_id: str, folder: Path | None, as_json: bool) -> None:
    """Read what is held of an artifact again, and check it.

    A piece that is damaged is held no longer: the next fetch brings it again. At the pace of the setting
    scrub_bytes_per_s.
    """
    from shardline.artifact.scrub import scrub as scrub_pieces

    pace = invocation.configuration().settings.scrub_bytes_per_s
    with _store(invocation, folder, looks=True) as store:
        content_id = _full_id(store, content_id)
        with _opened(store, content_id) as found, progress("Reading") as show:
            report = asyncio.run(scrub_pieces(found, bytes_per_s=pace, progress=show))
    bad = sum(map(len, report.bad.values()))
    text = f"{content_id}: {size(report.checked_bytes)} read, {bad} pieces damaged, {report.found} found again"
    answer = {"content_id": content_id, "checked_bytes": report.checked_bytes, "bad": report.bad, "found": report.found}
    _print(as_json, answer, text)
    if bad:
        raise ShardlineError(
            "artifact_mismatch",
            f"{bad} pieces on this disk were damaged, and are held no longer",
            advice="Bring them again: shardline artifact fetch, or start the Node, which fetches what it lacks.",
        )


@click.command()
@click.argument("path", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR")
@click.option("--layers", type=LayerRange(), help="Half-open, as a Python slice: 0:15 [default: all].")
@click.option("--from", "urls", multiple=True, metavar="URL", help="A Node, or what `artifact seed` named. Repeatable.")
@click.option("--files", "folders", multiple=True, type=click.Path(exists=True, file_okay=False, path_type=Path),
              metavar="FOLDER", help="Look there for files of the model first. Repeatable.")  # fmt: skip
@key_option
@click.option("--allow-unsigned", is_flag=True, help="Believe DIR, whoever made it.")
@store_option
@as_json_option
@pass_invocation
def fetch(
    invocation: Invocation,
    path: Path,
    layers: tuple[int, int] | None,
    urls: tuple[str, ...],
    folders: tuple[Path, ...],
    public_keys: tuple[Path, ...],
    allow_unsigned: bool,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Fetch a model, or some layers of it, into the store.

    It is the one that the artifact in DIR describes.

    From the Nodes that are named and the artifact's own web seeds. Every piece is checked as it comes. Stopped at any
    time, the same command goes on from there.
    """
    from shardline.artifact.adoption import adopt_all

    policy = _policy(public_keys, allow_unsigned)
    otherwise = "" if public_keys else " Else: --allow-unsigned."
    with (
        _store(invocation, folder) as store,
        store.add(believed(path, policy, flag="--public-key", otherwise=otherwise)) as found,
    ):
        n_layers = found.bundle.manifest.model.n_layers
        first, last = layers or (0, n_layers)
        wanted = found.wanted(first, last) if layers else {n: range(f.count) for n, f in enumerate(found.files)}
        taken = adopt_all(found, folders)
        told = asyncio.run(_fetched(invocation, found, wanted, [normal_url(url) for url in urls]))
    sources = [msgspec.to_builtins(source) for source in told.sources]
    answer = {
        "content_id": found.content_id,
        "layers": [first, last],
        "fetched_bytes": told.fetched_bytes,
        "total_bytes": told.total_bytes,
        "adopted": [str(one.path) for one in taken],
        "sources": sources,
    }
    lines = [f"{found.content_id}: layers {first}:{last}, {size(told.total_bytes)}, {size(told.fetched_bytes)} fetched"]
    lines += [f"{one.path}: {one.way}, {one.pieces} pieces" for one in taken]
    lines += [
        f"{s['name']}: {s['state']}, {size(s['fetched_bytes'])}" + (f", {s['reason']}" if s["reason"] else "")
        for s in sources
    ]
    _print(as_json, answer, "\n".join(lines))


async def _fetched(invocation: Invocation, found: StoredArtifact, wanted: Any, urls: list[str]) -> FetchProgress:
    from shardline.artifact.fetch import Fetch
    from shardline.node.artifact_pieces import piece_files
    from shardline.transport.http_client import HttpClient
    from shardline.transport.pace import Pace
    from shardline.transport.piece_client import NodePieces, WebSeed

    configuration = invocation.configuration()
    settings = configuration.settings
    files, pace = piece_files(found.bundle.manifest), Pace(settings.fetch_bytes_per_s)
    nodes = HttpClient(settings, credential=credential_of(configuration) if urls else None)
    seeds = HttpClient(settings)
    try:
        job = Fetch(found, wanted, connections=settings.fetch_connections, progress=_show)
        for url in urls:
            job.add(NodePieces(nodes, url, found.content_id, files, pace))
        for url in found.bundle.manifest.transport.webseeds:
            job.add(WebSeed(seeds, url, files, pace))
        return await _with_line(job)
    except ShardlineError as error:
        raise _for_its_cause(error, configuration) from None
    finally:
        await nodes.aclose()
        await seeds.aclose()


def _for_its_cause(error: ShardlineError, configuration: Configuration) -> ShardlineError:
    """Sources that did not take our credential have the pieces: that it is another one is what to mend."""
    if error.code != "artifact_unavailable" or "cluster credential" not in error.message:
        return error
    advice = (
        f"Copy `credential` from the state folder of the machine that gives them to {configuration.credential_path} "
        "(mode 600), or name it: shardline --credential-file FILE …"
    )
    return ShardlineError(error.code, error.message, advice=advice, **error.details)


async def _with_line(job: Fetch) -> FetchProgress:
    try:
        return await job.run()
    finally:
        if sys.stderr.isatty():
            click.echo("\r\033[K", nl=False, err=True)


def _show(told: FetchProgress) -> None:
    if not sys.stderr.isatty():
        return
    left = "" if told.seconds_left is None else f", {told.seconds_left:.0f} s left"
    busiest = max(told.sources, key=lambda source: source.bytes_per_s, default=None)
    whom = "" if busiest is None else f", from {busiest.name}"
    line = f"{told.state}: {size(told.done_bytes)} of {size(told.total_bytes)}, {size(round(told.bytes_per_s))}/s"
    click.echo(f"\r\033[K{line}{left}{whom}"[:100], nl=False, err=True)


@contextlib.contextmanager
def _store(invocation: Invocation, folder: Path | None, *, looks: bool = False) -> Iterator[Store]:
    """`looks`: for what is there, so that a state folder that is not there is told."""
    from shardline.artifact.store import Store

    configuration = invocation.configuration()
    if looks and folder is None:
        note_absent_state(configuration)
    reserve = configuration.settings.store_reserve_bytes
    store = Store(folder or configuration.state_dir / STORE_FOLDER, reserve_bytes=reserve)
    try:
        yield store
    finally:
        store.close()


def _policy(public_keys: tuple[Path, ...], allow_unsigned: bool) -> TrustPolicy:
    """Nothing is fetched on anybody's word, unless a flag says so."""
    from shardline.artifact.bundle import TrustPolicy

    return TrustPolicy(keys=tuple(map(publisher_key, public_keys)), allow_unsigned=allow_unsigned)


def _opened(store: Store, content_id: str) -> StoredArtifact:
    """What lies in our own store was believed when it came; its name says what its bytes must be."""
    from shardline.artifact.bundle import TrustPolicy

    return store.open(content_id, TrustPolicy(content_ids=frozenset({content_id})))


def _full_id(store: Store, given: str) -> str:
    """The content_id that `given` is, begins (with or without `mac1-`), or names. `not_found`;
    `invalid_value` where it is several."""
    known = store.content_ids()
    if given in known:
        return given  # one that is damaged, too
    named = []
    for content_id in known:
        with contextlib.suppress(ShardlineError), _opened(store, content_id) as found:
            named += [content_id] if found.bundle.manifest.name == given else []
    if len(named) > 1:
        message = f"{len(named)} artifacts are called {given!r}: {', '.join(named)}"
        raise ShardlineError("invalid_value", message, advice="Give the content_id of the one you mean.")
    full = named[0] if named else full_id(given, known)
    if full not in known:
        why = f"{given!r:.200} is not in the store, by content_id or name"
        raise ShardlineError("not_found", why, advice="Ask: shardline artifact list")
    return full


def stored_bundle(invocation: Invocation, given: str) -> Path:
    """The folder of the description of what the store has under `given`; `not_found`, `invalid_value`."""
    with _store(invocation, None, looks=True) as store, _opened(store, _full_id(store, given)) as found:
        return found.bundle.folder


def _holding(store: Store, content_id: str) -> dict[str, Any]:
    with _opened(store, content_id) as found:
        answer: dict[str, Any] = msgspec.to_builtins(found.holding())
        return answer


def _layers(ranges: list[list[int]]) -> str:
    return ", ".join(f"{first}:{last}" for first, last in ranges) or "–"


def _print(as_json: bool, answer: Any, text: str) -> None:
    if as_json:
        import json

        text = json.dumps(answer, indent=2, ensure_ascii=False)
    click.echo(text)


STORE_COMMANDS = (list_artifacts, fetch, seed, scrub, rm)
