"""Secrets on disk: the cluster credential, a Node's identity key, the keys of a cluster.

Owns their files: made once, atomically, readable by their owner alone. It does not decide where they lie (the caller
does) and never writes a secret anywhere else. Shown by tests/transport/test_credentials.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from shardline.errors import ShardlineError

CREDENTIAL_BYTES = 32
SECRET_FILE_BYTES = 256 << 10
"""A secret file is small; a larger one is something else."""


def made_credential(path: Path) -> str:
    """The cluster credential in `path`: 32 random bytes, URL-safe base64; whoever comes first makes it.

    Raises `setting_invalid` for a file that others may read, or that holds no credential.
    """
    raw = _read_or_make(path, lambda: secrets.token_urlsafe(CREDENTIAL_BYTES).encode() + b"\n")
    return checked_credential(raw.decode("ascii", "replace").strip(), str(path))


def existing_credential(path: Path) -> str:
    """The cluster credential in `path`, which must be there. Raises `setting_invalid`."""
    try:
        raw = _read(path)
    except FileNotFoundError:
        raise _refused(path, "there is no such file: give the credential of the cluster") from None
    return checked_credential(raw.decode("ascii", "replace").strip(), str(path))


def checked_credential(text: str, source: str) -> str:
    """`text`, if it can be a credential: 16 to 512 visible ASCII characters. `source` names it in the error."""
    if not 16 <= len(text) <= 512 or not all("!" <= c <= "~" for c in text):
        raise ShardlineError("setting_invalid", f"{source}: a credential has 16 to 512 visible ASCII characters")
    return text


def made_secret(path: Path, content: Callable[[], bytes]) -> bytes:
    """What stands in the secret file `path`; whoever comes first makes it. Raises `setting_invalid`."""
    return _read_or_make(path, content)


def kept_secret(path: Path) -> bytes | None:
    """What stands in the secret file `path`, None where there is none. Raises `setting_invalid`."""
    try:
        return _read(path)
    except FileNotFoundError:
        return None


def keep_secret(path: Path, content: bytes) -> None:
    """Write `content` to `path`, whole or not at all, in the place of what was there. Raises `setting_invalid`."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = _written_beside(path, content)
        try:
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
        _keep_name(path)
    except OSError as error:
        raise _refused(path, f"it cannot be written ({error.strerror})") from None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One writer of `path` at a time, of all processes of this machine, for the milliseconds of reading and writing it.

    Raises `setting_invalid` where its folder takes no file.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path.parent / f".{path.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _refused(path, f"it cannot be written ({error.strerror})") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def identity_key(path: Path | None) -> Ed25519PrivateKey:
    """The Ed25519 key in the PEM file `path`, made if there is none; None: a key for this run only.

    Raises `setting_invalid` for a file that others may read, or that holds no such key.
    """
    if path is None:
        return Ed25519PrivateKey.generate()
    try:
        key = load_pem_private_key(_read_or_make(path, _new_key), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise _refused(path, "it holds no private key in PEM") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise _refused(path, "it holds a key of another kind, not Ed25519")
    return key


def _new_key() -> bytes:
    return Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _read_or_make(path: Path, content: Callable[[], bytes]) -> bytes:
    try:
        return _read(path)
    except FileNotFoundError:
        pass
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The file appears under its name whole or not at all, and never over another's: of two processes that start
        # at the same moment, one wins, and both read what it wrote.
        name = _written_beside(path, content())
        try:
            os.link(name, path)
            _keep_name(path)
        except FileExistsError:
            pass
        finally:
            os.unlink(name)
    except OSError as error:
        raise _refused(path, f"it cannot be made ({error.strerror})") from None
    return _read(path)


def _keep_name(path: Path) -> None:
    """That the file goes by `path` now outlasts a loss of power, too: a token that was used must stay used."""
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _written_beside(path: Path, content: bytes) -> str:
    """A new file with `content` in the folder of `path`, on the disk, for its owner alone; its name."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        os.unlink(name)
        raise
    return name


def _read(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise _refused(path, "it is not a file")
            if status.st_mode & 0o077:
                raise _refused(path, "others may read it: chmod 600 it, and make a new one if somebody has")
            content = file.read(SECRET_FILE_BYTES + 1)
            if len(content) > SECRET_FILE_BYTES:
                raise _refused(path, f"it is larger than the {SECRET_FILE_BYTES >> 10} KiB of any secret file")
            return content
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _refused(path, f"it cannot be read ({error.strerror})") from None


def _refused(path: Path, why: str) -> ShardlineError:
    return ShardlineError("setting_invalid", f"secret file {path}: {why}")
