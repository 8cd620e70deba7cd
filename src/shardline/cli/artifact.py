"""`shardline artifact`: make, check and show the description of a model, and the keys that sign it.

Owns the commands and what they print. What a bundle is, artifact/bundle.py says; how one is made, creation.py; what
its files must be, verification.py. Shown by tests/cli/test_artifact.py.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardline.cli.invocation import Invocation, pass_invocation
from shardline.cli.listings import as_json_option, columns, size
from shardline.cli.offering import believed, refuse_private
from shardline.cli.progress import progress
from shardline.errors import ShardlineError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

    from shardline.artifact.bundle import Bundle, TrustPolicy
    from shardline.artifact.verification import Report

_EXISTING = click.Path(exists=True, path_type=Path)
_PIECES_SHOWN = 8
_PUBLIC = b"BEGIN PUBLIC KEY-----"
"""In PEM, what tells that kind of key."""

key_option = click.option(
    "--public-key", "public_keys", multiple=True, type=_EXISTING, metavar="PEM", help="The publisher's. Repeatable."
)
files_option = click.option(
    "--files",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="The model's files.",
)


@click.group()
def artifact() -> None:
    """Describe a model by digests, sign it, check it.

    Others can then fetch parts of it from anybody, and know that they are right. An artifact is a small folder: a
    manifest, a BitTorrent v2 file, the small files of the model, a signature. The model's own files stay as they are,
    wherever they are.
    """


@artifact.command()
@click.argument("model", type=_EXISTING, metavar="MODEL")
@click.option("--sign", "key_file", type=_EXISTING, metavar="KEY.pem", help="Sign with this key (artifact keygen).")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="DIR", help="[default: beside MODEL, as NAME.artifact]"
)
@click.option("--name", help="[default: the name of the file or folder]")
@click.option("--version", "version", metavar="TEXT", help="The publisher's word for this edition.")
@click.option("--license", "licence", metavar="SPDX", help="Such as Apache-2.0 [default: what a GGUF file says].")
@click.option("--source", "sources", multiple=True, metavar="URL", help="Where the files came from. Repeatable.")
@click.option("--webseed", "webseeds", multiple=True, metavar="URL/", help="A folder that serves them. Repeatable.")
@click.option("--include", multiple=True, type=_EXISTING, metavar="FILE", help="A small file to add. Repeatable.")
@as_json_option
def create(
    model: Path,
    key_file: Path | None,
    output: Path | None,
    name: str | None,
    version: str | None,
    licence: str | None,
    sources: tuple[str, ...],
    webseeds: tuple[str, ...],
    include: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Describe MODEL, for others to fetch and check.

    MODEL is a GGUF file (of a split one, any part) or a folder with safetensors. Its files are read once and never
    written. Without --sign nobody can tell who made the artifact: Nodes take it only by its content_id, or with
    --allow-unsigned.
    """
    from shardline.artifact import creation
    from shardline.artifact.signing import KEY_BYTES_LIMIT, read_private_key
    from shardline.wire.manifest import Origin

    key = None
    if key_file is not None:
        raw = _read(key_file, KEY_BYTES_LIMIT)
        if _PUBLIC in raw:
            advice = "Sign with the private one: keygen wrote it beside, without .pub at its end."
            raise ShardlineError("invalid_value", f"{key_file} is a public key", param="sign", advice=advice)
        key = read_private_key(raw)
    description = creation.Description(
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        name=name,
        version=version,
        license=licence,
        source=tuple(Origin(url=url) for url in sources),
        webseeds=webseeds,
        include=include,
    )
    folder = output or creation.default_bundle(model)
    if os.path.lexists(folder):
        advice = "Give the new one a place of its own, with -o DIR, or take the old one away."
        raise ShardlineError("setting_invalid", f"{folder} is there already", param="output", advice=advice)
    with progress("Hashing") as show_step:
        made = creation.create_bundle(model, folder, description, key=key, progress=show_step)
    _print(as_json, _facts(made), f"{from_here(made.folder)}: {_lines(made)}")


def from_here(path: Path) -> Path:
    """As a person in this folder would name it: what lies below by the way to it, anything else whole."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_absolute() and path.is_relative_to(here) else path


@artifact.command()
@click.argument("path", type=_EXISTING, metavar="DIR|MODEL")
@key_option
@files_option
@as_json_option
def verify(path: Path, public_keys: tuple[Path, ...], files: Path | None, as_json: bool) -> None:
    """Check an artifact and every file of its model, byte by byte.

    Given the artifact's folder, the model is looked for beside it; given the model, the artifact. Without --public-key
    the signature is not checked, and nothing says who vouches for these files.
    """
    from shardline.artifact.verification import verify_model

    bundle = _load(path, public_keys)
    folder = files or _model_folder(path, bundle)
    with progress("Verifying") as show_step:
        report = verify_model(bundle, folder, progress=show_step)
    answer = {**_facts(bundle), "signature": _signature(bundle), **_report_facts(report)}
    _print(as_json, answer, _report_text(bundle, report))
    if not report.holds:
        bad = next((found for found in report.files if found.state != "ok"), None)
        what = report.fault if bad is None else f"{bad.path} is {bad.state}"
        raise ShardlineError("artifact_mismatch", f"{folder} does not hold the model of this artifact: {what}")


@artifact.command()
@click.argument("path", type=click.Path(path_type=Path), metavar="DIR|MODEL|CONTENT_ID")
@key_option
@files_option
@as_json_option
@pass_invocation
def show(invocation: Invocation, path: Path, public_keys: tuple[Path, ...], files: Path | None, as_json: bool) -> None:
    """Show what an artifact says, and which layers are there.

    Also of one in the store, by its content_id, the beginning of that, or its name. With --files: which layers the
    files in FOLDER hold whole. For that all of them are read and hashed; they may have holes, be cut short, or be
    absent.
    """
    from shardline.artifact.ranges import servable
    from shardline.artifact.verification import held_pieces

    if not path.exists():
        from shardline.cli.artifact_store import stored_bundle

        path = stored_bundle(invocation, str(path))
    bundle = _load(path, public_keys)
    answer = {**_facts(bundle), "signature": _signature(bundle)}
    text = _lines(bundle) + f"\nsignature   {_signature_words(bundle)}"
    if files is not None:
        with progress("Reading") as show_step:
            held = held_pieces(bundle, files, progress=show_step)
        ranges = servable(bundle.manifest, held)
        count, total = sum(map(len, held.values())), sum(len(tree.layer) for tree in bundle.trees)
        answer |= {"pieces_held": count, "pieces": total, "servable": [list(found) for found in ranges]}
        words = ", ".join(f"{first}:{last}" for first, last in ranges) or "no layer whole"
        text += f"\nheld        {count} of {total} pieces; layers {words}"
    _print(as_json, answer, text)


@artifact.command()
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("publisher.pem"),
    metavar="FILE",
    show_default=True,
    help="Where to write it.",
)
@as_json_option
def keygen(output: Path, as_json: bool) -> None:
    """Make a key that signs artifacts.

    Writes FILE, and FILE.pub for all who shall trust it. Both are PEM (ECDSA P-256), as OpenSSL and model_signing read
    them. Keep FILE to yourself: it has no password.
    """
    from shardline.artifact.signing import key_id, new_key, private_pem, public_pem

    key = new_key()
    public = output.with_name(output.name + ".pub")
    _write_new(public, public_pem(key.public_key()), 0o644)
    try:
        _write_new(output, private_pem(key), 0o600)
    except ShardlineError:
        public.unlink()
        raise
    name = key_id(key.public_key())
    _print(
        as_json,
        {"private_key": str(output), "public_key": str(public), "key_id": name},
        f"{output}: sign with it, and show it to nobody\n{public}: give it to all who shall trust you\nkey id {name}",
    )


def _load(path: Path, public_keys: tuple[Path, ...]) -> Bundle:
    otherwise = " Without --public-key its files are checked, and not who made it."
    return believed(_bundle_folder(path), _policy(public_keys), flag="--public-key", otherwise=otherwise)


def _policy(public_keys: tuple[Path, ...]) -> TrustPolicy:
    """Commands that only look go without a key, and say so."""
    from shardline.artifact.bundle import TrustPolicy

    return TrustPolicy(keys=tuple(map(publisher_key, public_keys)), allow_unsigned=not public_keys)


def publisher_key(path: Path) -> EllipticCurvePublicKey:
    """The key in the file `path`. Raises `invalid_value`, with what to give instead of a private key."""
    from shardline.artifact.signing import KEY_BYTES_LIMIT, read_public_key

    raw = _read(path, KEY_BYTES_LIMIT)
    refuse_private(raw, path, code="invalid_value", param="public_key")
    return read_public_key(raw)


def _bundle_folder(path: Path) -> Path:
    from shardline.artifact.bundle import MANIFEST_NAME
    from shardline.artifact.creation import default_bundle

    folder = path if (path / MANIFEST_NAME).is_file() else default_bundle(path)
    if not folder.is_dir():
        raise ShardlineError(
            "artifact_invalid",
            f"{path} is no artifact, and {folder.name} is not beside it",
            advice="Name the folder of the artifact, with --files FOLDER for the model; or make one: artifact create",
        )
    return folder


def _model_folder(path: Path, bundle: Bundle) -> Path:
    """Where the files of the model are when nobody said it: where the paths of the manifest lead to from there."""
    from shardline.artifact.creation import SUFFIX

    if bundle.folder != path:
        return path if path.is_dir() else path.absolute().parent
    beside = bundle.folder.absolute().parent
    candidates = (beside / bundle.folder.absolute().name.removesuffix(SUFFIX), beside / bundle.manifest.name, beside)
    first = bundle.manifest.files[0].path
    return next((found for found in candidates if (found / first).is_file()), beside)


def _facts(bundle: Bundle) -> dict[str, Any]:
    import msgspec

    manifest = bundle.manifest
    return {
        "folder": str(bundle.folder),
        "content_id": manifest.content_id,
        "manifest_digest": bundle.manifest_digest,
        "signed_by": bundle.signed_by,
        "name": manifest.name,
        "version": manifest.version,
        "license": manifest.license,
        "created": manifest.created,
        "format": msgspec.to_builtins(manifest.format),
        "model": msgspec.to_builtins(manifest.model),
        "files": [msgspec.to_builtins(entry) for entry in manifest.files],
        "small_files": [msgspec.to_builtins(entry) for entry in manifest.small_files],
        "tensors": len(manifest.tensors),
        "transport": msgspec.to_builtins(manifest.transport),
    }


def _lines(bundle: Bundle) -> str:
    manifest, model = bundle.manifest, bundle.manifest.model
    types = sorted(model.quantization.tensor_types.items(), key=lambda item: (-item[1], item[0]))
    rows = [
        ("content_id", manifest.content_id),
        ("model", f"{manifest.format.container}, {model.architecture}, {model.n_layers} layers of {model.hidden_size}"),
        ("tensors", f"{len(manifest.tensors)}: " + ", ".join(f"{count} {kind}" for kind, count in types)),
        ("licence", manifest.license or "not stated"),
        ("pieces", f"{sum(len(tree.layer) for tree in bundle.trees)} of {size(manifest.piece_length)}"),
        ("torrent", manifest.transport.bittorrent.info_hash_v2),
        *(("file", f"{entry.path}  {size(entry.size)}  {entry.sha256}") for entry in manifest.files),
        *(("small file", f"{entry.path}  {size(entry.size)}") for entry in manifest.small_files),
        *(("web seed", url) for url in manifest.transport.webseeds),
    ]
    return manifest.name + "".join(f"\n{label:11} {text}" for label, text in rows)


def _signature(bundle: Bundle) -> str:
    from shardline.artifact.bundle import SIGNATURE_NAME

    if bundle.signed_by is not None:
        return "holds"
    return "not checked" if (bundle.folder / SIGNATURE_NAME).exists() else "none"


def _signature_words(bundle: Bundle) -> str:
    return {
        "holds": f"holds, by the key {bundle.signed_by}",
        "not checked": "NOT CHECKED: name the key of the publisher with --public-key",
        "none": "none: nobody vouches for this artifact",
    }[_signature(bundle)]


def _report_facts(report: Report) -> dict[str, Any]:
    return {
        "holds": report.holds,
        "fault": report.fault,
        "warnings": list(report.warnings),
        "checked": [
            {"path": f.path, "state": f.state, "bad_pieces": list(f.bad_pieces), "reason": f.reason}
            for f in report.files
        ],
    }


def _report_text(bundle: Bundle, report: Report) -> str:
    rows = []
    for found in report.files:
        more = found.reason or ""
        if found.bad_pieces:
            listed = ", ".join(map(str, found.bad_pieces[:_PIECES_SHOWN]))
            more += f": {listed}" + (" …" if len(found.bad_pieces) > _PIECES_SHOWN else "")
        rows.append((found.path, size(found.size), found.state, more))
    whole = all(found.state == "ok" for found in report.files)
    table = "not compared: files are not whole" if not whole else report.fault or "equal to the headers"
    text = columns(("FILE", "SIZE", "STATE", ""), rows)
    text += f"\ncontent_id    {bundle.manifest.content_id}\ntensor table  {table}"
    text += f"\nsignature     {_signature_words(bundle)}"
    return text + "".join(f"\nwarning       {warning}" for warning in report.warnings)


def _print(as_json: bool, answer: dict[str, Any], text: str) -> None:
    if as_json:
        import json

        text = json.dumps(answer, indent=2, ensure_ascii=False)
    click.echo(text)


def _read(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(limit + 1)
    except OSError as error:
        raise ShardlineError("invalid_value", f"{path} cannot be read: {error.strerror}") from None
    if len(raw) > limit:
        raise ShardlineError("invalid_value", f"{path} has more than {limit} bytes: it is no key")
    return raw


def _write_new(path: Path, raw: bytes, mode: int) -> None:
    """Never over a file that is there: a key that is lost cannot be made again."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "wb") as file:
            file.write(raw)
    except FileExistsError:
        advice = "Choose another name: -o FILE"
        raise ShardlineError("setting_invalid", f"{path} is there already", param="output", advice=advice) from None
    except OSError as error:
        raise ShardlineError("state_unwritable", f"{path} cannot be written: {error.strerror}") from None
