"""Saved sequences: what llama.cpp gives for one, with a header in front that says what it belongs to.

Owns that header and its checks. llama.cpp checks shapes only: it takes the state of other layers of the same width,
and one that was damaged on disk. Here a state is taken back by a Shard like the one that gave it, and by nothing else.
Shown by tests/model/test_llama_backend.py.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct

from shardline.errors import ShardlineError
from shardline.model.llama_library import LlamaLibrary

_MAGIC = b"SHLNKV1\n"
_HEADER = struct.Struct("<8s32sQQ32s")
"""Magic, identity of the Shard, tokens held, bytes that follow, their SHA-256."""


def save(library: LlamaLibrary, context: int, sequence: int, tokens: int, identity: bytes) -> bytes:
    """The state of `sequence`, which holds `tokens`."""
    size = library.c.llama_state_seq_get_size(context, sequence)
    blob = bytearray(_HEADER.size + size)
    body = (ctypes.c_uint8 * size).from_buffer(blob, _HEADER.size)
    written = library.c.llama_state_seq_get_data(context, ctypes.addressof(body), size, sequence)
    if written != size:
        raise ShardlineError("engine_error", f"the library wrote {written} of {size} bytes of a saved sequence")
    del body
    digest = hashlib.sha256(memoryview(blob)[_HEADER.size :]).digest()
    _HEADER.pack_into(blob, 0, _MAGIC, identity, tokens, size, digest)
    return bytes(blob)


def check(state: bytes, identity: bytes) -> int:
    """Tokens that `state` holds; `snapshot_invalid` where it is damaged or of another Shard."""
    if len(state) < _HEADER.size:
        raise _invalid("it is cut short")
    magic, owner, tokens, size, digest = _HEADER.unpack_from(state)
    if magic != _MAGIC or len(state) != _HEADER.size + size:
        raise _invalid("it is damaged, or of another engine")
    if owner != identity:
        raise _invalid("it is of another Shard, model, build or context")
    if hashlib.sha256(memoryview(state)[_HEADER.size :]).digest() != digest:
        raise _invalid("it is damaged")
    return int(tokens)


def restore(library: LlamaLibrary, context: int, sequence: int, state: bytes) -> None:
    """Put a state that passed `check` into `sequence`, which is empty. `snapshot_invalid` where the library refuses
    it, as it does where its KV buffer has no room."""
    body = state[_HEADER.size :]
    size = len(body)
    if library.c.llama_state_seq_set_data(context, body, size, sequence) != size:
        raise _invalid("the library refused it: its KV may be full")


def _invalid(why: str) -> ShardlineError:
    return ShardlineError("snapshot_invalid", f"the saved slot cannot be taken: {why}")
