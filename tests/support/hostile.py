"""Artifacts of a publisher who signs a lie: hostile bytes, with digests, pieces and a table that fit them."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import msgspec

from shardline.artifact.bundle import MANIFEST_NAME, TORRENT_NAME, Bundle, TrustPolicy, expected_identity, load_bundle
from shardline.artifact.torrent import MIN_PIECE, write_torrent
from shardline.formats.merkle import hash_file
from shardline.wire.manifest import FileEntry, Manifest, TensorRow, encode_manifest
from tests.support.artifacts import publisher, sign_again

TAIL = 64
"""Bytes of tensors behind the header that is claimed."""


def lying_bundle(true: Bundle, raw: bytes, path: str, folder: Path) -> Bundle:
    """A signed bundle like `true`, of one file: `raw`, all of it header, and a small tensor behind it."""
    content = raw + bytes(TAIL)
    tree = hash_file(io.BytesIO(content), MIN_PIECE)
    assert tree.root is not None
    entry = FileEntry(
        path=path,
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        pieces_root=tree.root.hex(),
        data_offset=len(raw),
    )
    torrent = write_torrent(true.manifest.name, [(path, tree)])
    bittorrent = msgspec.structs.replace(
        true.manifest.transport.bittorrent,
        piece_length=MIN_PIECE,
        info_hash_v2=torrent.info_hash,
        torrent_sha256=hashlib.sha256(torrent.raw).hexdigest(),
    )
    row = TensorRow("blk.0.attn_q.weight", 0, len(raw), TAIL, "F32", (TAIL // 4,), 0)
    manifest: Manifest = msgspec.structs.replace(
        true.manifest,
        content_id=expected_identity(true.manifest.format.container, (entry,), true.manifest.small_files),
        files=(entry,),
        tensors=(row,),
        transport=msgspec.structs.replace(true.manifest.transport, bittorrent=bittorrent),
    )
    for small in true.manifest.small_files:
        target = folder / "files" / small.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((true.folder / "files" / small.path).read_bytes())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST_NAME).write_bytes(encode_manifest(manifest))
    (folder / TORRENT_NAME).write_bytes(torrent.raw)
    sign_again(folder)
    return load_bundle(folder, TrustPolicy((publisher().public_key(),)))
