"""How a prompt is named for reuse: chained digests of its blocks of token ids, salted by whose prompt it is.

Owns block length, digest and salt, so that Gateway and Nodes name the same tokens alike. Two prompts have the first k
digests in common exactly when they have the first k blocks and the salt in common. Knows no cache and no session.
Pure. Shown by tests/wire/test_prefix.py.
"""

from __future__ import annotations

import hashlib

import msgspec

from shardline.errors import ShardlineError

BLOCK = 32
"""Tokens of a block."""
BLOCKS = 2048
"""Most blocks of a prompt that are named; what lies behind them is computed anew."""
DIGEST_BYTES = 16
SALT_BYTES = 16
_BLOCK_BYTES = 4 * BLOCK


class Prefix(msgspec.Struct, frozen=True, kw_only=True):
    """How a prompt begins. Sent: this session may begin with what was kept of others of the same salt, and may be kept
    in turn."""

    salt: bytes
    """16 bytes, of the API key: what one key left behind is found by no other."""
    digests: bytes
    """16 bytes for each whole block of the prompt, at most 2,048."""


def salt_of(key_id: str) -> bytes:
    """The salt of everything that the API key with this id sends."""
    return hashlib.sha256(b"shardline prefix salt\n" + key_id.encode()).digest()[:SALT_BYTES]


def digests_of(salt: bytes, ids: bytes | bytearray, before: bytes = b"") -> bytes:
    """Of each whole block of `ids` (I32 little-endian), in order: the first 16 bytes of SHA-256 over the salt, the
    digest of the block before it (zeros in front of the first) and the ids of the block. `before`: the digests of the
    blocks in front of `ids`, which stand first in the result."""
    last = before[-DIGEST_BYTES:] or bytes(DIGEST_BYTES)
    out = [before]
    end = min(len(ids) // _BLOCK_BYTES, BLOCKS - blocks_in(before)) * _BLOCK_BYTES
    for start in range(0, end, _BLOCK_BYTES):
        last = hashlib.sha256(salt + last + ids[start : start + _BLOCK_BYTES]).digest()[:DIGEST_BYTES]
        out.append(last)
    return b"".join(out)


def blocks_in(digests: bytes) -> int:
    return len(digests) // DIGEST_BYTES


def common_blocks(a: bytes, b: bytes) -> int:
    """How many blocks two chains of digests have in common. Equal digests stand for all blocks before them too, so
    halving finds the last."""
    low, high = 0, min(blocks_in(a), blocks_in(b))
    while low < high:
        middle = (low + high + 1) // 2
        at = slice((middle - 1) * DIGEST_BYTES, middle * DIGEST_BYTES)
        if a[at] == b[at]:
            low = middle
        else:
            high = middle - 1
    return low


def check_prefix(prefix: Prefix) -> None:
    """`invalid_value` for what no Gateway makes."""
    blocks, rest = divmod(len(prefix.digests), DIGEST_BYTES)
    if len(prefix.salt) != SALT_BYTES or rest or blocks > BLOCKS:
        raise ShardlineError(
            "invalid_value",
            f"a prefix has a salt of {SALT_BYTES} bytes and at most {BLOCKS} digests of {DIGEST_BYTES}",
            param="prefix",
        )
