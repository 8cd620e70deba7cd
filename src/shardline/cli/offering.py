"""The flags by which a Tracker offers Model Artifacts to Nodes, for every command that runs one.

Owns the list of flags, the reading of publishers' keys, and what a person is told of an artifact that is not believed.
What is believed, artifact/bundle.py says. Shown by tests/cli/test_offering.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardline.errors import ShardlineError

if TYPE_CHECKING:
    from shardline.artifact.bundle import Bundle, TrustPolicy

_PRIVATE = b"PRIVATE KEY-----"
"""In PEM, what tells that kind of key."""


class ArtifactFolder(click.Path):
    """A folder that is there; of a model, what makes one."""

    def __init__(self) -> None:
        super().__init__(exists=True, file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if Path(value).is_file():
            make = f"shardline artifact create {value}"
            self.fail(f"{value} is a file, and an artifact is a folder that describes one. Make it: {make}", param, ctx)
        return super().convert(value, param, ctx)


def offering(command: Callable[..., Any]) -> Callable[..., Any]:
    """The parameters `artifacts`, `trust` and `allow_unsigned`."""
    for option in (
        click.option("--allow-unsigned", is_flag=True, help="Without --trust: offer what nobody signed."),
        click.option(
            "--trust",
            multiple=True,
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            metavar="PEM",
            help="Public key of a publisher, by one of which each artifact must be signed. Repeatable.",
        ),
        click.option(
            "--artifact",
            "artifacts",
            multiple=True,
            type=ArtifactFolder(),
            metavar="DIR",
            help="Offer this model to Nodes that have no file: a folder that artifact create made. Repeatable.",
        ),
    ):
        command = option(command)
    return command


def trusted_keys(paths: Iterable[Path]) -> tuple[bytes, ...]:
    """The keys in these files (PEM); `setting_invalid` names the file that has none."""
    return tuple(map(_public_key, paths))


def check_offers(artifacts: Iterable[Path], trust: Iterable[Path], *, allow_unsigned: bool) -> None:
    """What a Tracker would refuse of `--artifact` and `--trust`, told before one is started. Blocking.

    Raises `setting_invalid` for a file that is no public key, `artifact_invalid`, `artifact_untrusted`.
    """
    artifacts, trust = tuple(artifacts), tuple(trust)
    if not artifacts and not trust:
        return  # what follows is slow to import
    from shardline.artifact.bundle import MANIFEST_NAME, TrustPolicy
    from shardline.artifact.signing import read_public_key

    keys = tuple(map(read_public_key, trusted_keys(trust)))
    policy = TrustPolicy(keys=keys, allow_unsigned=allow_unsigned)
    for folder in artifacts:
        if not (folder / MANIFEST_NAME).is_file():
            raise ShardlineError(
                "artifact_invalid",
                f"{folder} is no artifact: it has no {MANIFEST_NAME}",
                advice=f"Name the folder of an artifact, or make one: shardline artifact create {folder}",
            )
        believed(folder, policy, flag="--trust", otherwise="" if keys else " Else: --allow-unsigned.")


def believed(folder: Path, policy: TrustPolicy, *, flag: str, otherwise: str = "") -> Bundle:
    """The artifact in `folder`; one that is not believed is refused with `flag`, which names keys, and `otherwise`."""
    from shardline.artifact.bundle import SIGNATURE_NAME, load_bundle

    if policy.keys and not (folder / SIGNATURE_NAME).exists():
        advice = f"Ask its publisher for a signed one.{otherwise}"
        raise ShardlineError("artifact_untrusted", f"{folder} is not signed, so no key can vouch for it", advice=advice)
    try:
        return load_bundle(folder, policy)
    except ShardlineError as error:
        if error.code != "artifact_untrusted":
            raise
        message = f"{folder} is signed by somebody else: {error.message}" if policy.keys else error.message
        advice = f"Name the key of its publisher: {flag}.{otherwise}"
        raise ShardlineError(error.code, message, advice=advice, **error.details) from None


def refuse_private(pem: bytes, path: Path, *, code: str, param: str) -> None:
    """Raise `code` for a private key where a public one belongs, with which one that is."""
    if _PRIVATE in pem:
        advice = f"Give the public one, which keygen wrote as {path}.pub; show the private one to nobody."
        raise ShardlineError(code, f"{path} is a private key", param=param, advice=advice)


def _public_key(path: Path) -> bytes:
    from shardline.artifact.signing import KEY_BYTES_LIMIT, read_public_key

    try:
        with path.open("rb") as file:
            pem = file.read(KEY_BYTES_LIMIT)
    except OSError as error:
        raise ShardlineError("setting_invalid", f"{path}: {error.strerror}", param="trust") from None
    refuse_private(pem, path, code="setting_invalid", param="trust")
    try:
        read_public_key(pem)
    except ShardlineError as error:
        raise ShardlineError("setting_invalid", f"{path}: {error.message}", param="trust") from None
    return pem
