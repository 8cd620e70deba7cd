"""Parties of clusters for tests: contexts of any party of any authority, also of ones that have expired."""

from __future__ import annotations

import time
from pathlib import Path

from shardline.transport.authority import Authority, key_pem, new_key
from shardline.transport.tls import ClusterTls

DAY_S = 86400.0


def authority(folder: Path, name: str = "authority") -> Authority:
    return Authority.made(folder / f"{name}.pem", time.time())


def party(signer: Authority, name: str, *, ended_s: float | None = None, trusts: Authority | None = None) -> ClusterTls:
    """The contexts of `name`. `ended_s`: its certificate ended so long ago; `trusts`: another authority."""
    key = new_key()
    start = time.time() - (0.0 if ended_s is None else DAY_S + ended_s)
    certificate = signer.issue(key.public_key(), name, ["127.0.0.1"], now=start, seconds=DAY_S)
    return ClusterTls((trusts or signer).certificate_pem, certificate, key_pem(key))
