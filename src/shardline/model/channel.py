"""What crosses between the Node and its engine worker: typed frames on a socket, rows in shared memory.

Owns the frames (u32 little-endian length, MessagePack of one tagged struct), and where the rows of a batch lie in a
shared file: a header page that the worker writes (ticks and KV tokens, in the first file), an area for rows in, an
area for rows out. Both sides compute the same places from the same entries. Refuses to own processes. Shown by
tests/model/test_channel.py.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import msgspec

from shardline.errors import CATALOGUE, ShardlineError
from shardline.model.backend import Buffer, Reuse, ShardDescription, ShardSpec
from shardline.wire.messages import Grammar, Pooling, Sampling, StepTimes
from shardline.wire.steps import SeamLayout

FRAME_LIMIT = 64 << 20
HEADER_BYTES = 4096
AREAS = 2
"""Shared files: the rows of a batch that runs, and those of the one behind it."""
AREAS_LIMIT = 1 << 30
"""Of a shared file: what is asked for is reserved, so a wrong number must not take the machine's memory."""
_ALIGN = 64
_LENGTH = struct.Struct("<I")


class Fault(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A `ShardlineError` on its way through the socket."""

    code: str
    message: str
    param: str | None = None
    details: dict[str, Any] = {}
    advice: str | None = None

    @classmethod
    def of(cls, error: ShardlineError) -> Fault:
        return cls(error.code, error.message, error.param, error.details, error.advice)

    def error(self) -> ShardlineError:
        known = self.code if self.code in CATALOGUE else "engine_error"
        return ShardlineError(known, self.message, param=self.param, advice=self.advice, **self.details)


# Node -> worker. Each is answered once, in order; texts on a socket of their own (worker_texts.py).


class Load(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """First frame. `backend` is a name of `backends.BACKENDS`."""

    backend: str
    spec: ShardSpec


class Open(msgspec.Struct, frozen=True, array_like=True, tag=1):
    slot: int
    prompt_tokens: int
    max_tokens: int
    sampling: Sampling | None
    reuse: Reuse | None = None
    pooling: Pooling | None = None


class Close(msgspec.Struct, frozen=True, array_like=True, tag=2):
    slot: int


class Rollback(msgspec.Struct, frozen=True, array_like=True, tag=3):
    slot: int
    position: int


class Batch(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """One engine call. `entries`: (slot, position, rows, want_output, sampled), where `sampled` says that the token is
    the one that the batch before sampled. Its rows are in the shared file number `area`, and the sizes say how that is
    divided."""

    area: int
    entries: list[tuple[int, int, int, bool, bool]]
    in_bytes: int
    out_bytes: int


class Tokenize(msgspec.Struct, frozen=True, array_like=True, tag=5):
    text: str
    add_special: bool
    parse_special: bool


class Test(msgspec.Struct, frozen=True, array_like=True, tag=6):
    __test__ = False  # not a test class, whatever its name says to pytest


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """End the process; answered by the end of the stream."""


class Keep(msgspec.Struct, frozen=True, array_like=True, tag=8):
    slot: int
    tokens: int


class Compile(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """See whether a grammar can be kept to; like a text, beside the engine. No token ids are the answer: it can."""

    grammar: Grammar


Request = Load | Open | Keep | Close | Rollback | Batch | Test | Stop
TextRequest = Tokenize | Compile

# Worker -> Node.


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag=0):
    description: ShardDescription
    text: bytes | None


class Done(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """An open, keep, close or rollback is done."""


class Sampled(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A `SampledToken`."""

    id: int
    logprob: float | None
    top: list[tuple[int, float]] | None
    end: Literal["stop", "length"] | None


class PooledPrompt(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A `Pooled`."""

    vector: bytes
    pooling: Pooling


class Skipped(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The entry had no token to go on with."""


Outcome = Fault | Sampled | PooledPrompt | Skipped | None
"""Of one entry; None where rows or nothing came out."""


class BatchDone(msgspec.Struct, frozen=True, array_like=True, tag=2):
    outcomes: list[Outcome]
    compute_us: float


class Tokens(msgspec.Struct, frozen=True, array_like=True, tag=3):
    tokens: list[int]


class Tested(msgspec.Struct, frozen=True, array_like=True, tag=4):
    times: StepTimes


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The request failed as a whole; the worker lives."""

    fault: Fault


class Progress(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """While loading, unasked; the unit is the engine's own (layers, bytes)."""

    done: int
    total: int


Answer = Loaded | Done | BatchDone | Tested | Refused | Progress
TextAnswer = Tokens | Refused


def _encode_layout(value: object) -> object:
    if isinstance(value, SeamLayout):
        return value.to_json()
    raise NotImplementedError(f"{type(value).__name__} does not cross the socket")


def _decode_layout(kind: type, value: Any) -> object:
    if kind is SeamLayout:
        return SeamLayout.from_json(value)
    raise NotImplementedError(f"{kind.__name__} does not cross the socket")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_layout)


def frame(message: Request | Answer | TextRequest | Tokens) -> bytes:
    """The bytes of one frame; ValueError where it is over the limit."""
    body = _encoder.encode(message)
    if len(body) > FRAME_LIMIT:
        raise ValueError(f"a frame of {len(body)} bytes is over the limit of {FRAME_LIMIT}")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Bytes in, messages of one direction out. ValueError for what is no frame: the other side is then of no use."""

    def __init__(self, kind: Any) -> None:
        """`kind`: `Request`, `Answer`, `TextRequest` or `TextAnswer`."""
        self._decoder = msgspec.msgpack.Decoder(kind, dec_hook=_decode_layout)
        self._buffer = bytearray()

    def feed(self, data: Buffer) -> Sequence[Any]:
        """The messages that are whole now. `data` may be overwritten when this has returned."""
        if not self._buffer and len(data) > _LENGTH.size and len(data) == _LENGTH.size + _LENGTH.unpack_from(data)[0]:
            # One frame in one piece, as nearly always.
            return (self._message(memoryview(data)[_LENGTH.size :]),)
        self._buffer += data
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > FRAME_LIMIT:
                raise ValueError(f"a frame claims {length} bytes, the limit is {FRAME_LIMIT}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            messages.append(self._message(body))
        return messages

    def _message(self, body: Buffer) -> Any:
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, NotImplementedError, RecursionError, TypeError) as error:
            raise ValueError(f"a frame is not readable: {error}") from None


class Place(NamedTuple):
    """Where one entry's buffers lie in an area: (offset, bytes) each."""

    tokens: tuple[int, int]
    """(0, 0) in the area for rows out."""
    hidden: tuple[tuple[int, int], ...]


@lru_cache(maxsize=512)
def places(rows: tuple[int, ...], row_bytes: tuple[int, ...], with_tokens: bool) -> tuple[tuple[Place, ...], int]:
    """Where the buffers of entries with `rows` lie, one a tensor of `row_bytes`, and the bytes that they take.

    Each begins at a multiple of 64 bytes, so that engines can use it as a tensor where it is. Remembered, because one
    decode step is like the last.
    """
    offset = 0
    result = []
    for n in rows:
        tokens = (0, 0)
        if with_tokens:
            tokens = (offset, 4 * n)
            offset = _aligned(offset + 4 * n)
        hidden = []
        for size in row_bytes:
            hidden.append((offset, size * n))
            offset = _aligned(offset + size * n)
        result.append(Place(tokens, tuple(hidden)))
    return tuple(result), offset


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


class SharedRows:
    """One side's view of the shared file: header page, rows in, rows out.

    The Node makes the file and alone changes its size; the worker follows the sizes that stand in a `Batch`.
    """

    def __init__(self, fd: int) -> None:
        """Takes over `fd`, which is at least one page long."""
        self.fd = fd
        self.in_bytes = 0
        self.out_bytes = 0
        self._header_map = mmap.mmap(fd, HEADER_BYTES)
        self._header = memoryview(self._header_map).cast("Q")
        self._areas: mmap.mmap | None = None
        self._view = memoryview(b"")

    @classmethod
    def make(cls) -> SharedRows:
        """A file that has no name and ends with its last user: memory where the system has `memfd`, else a
        temporary file (in /dev/shm, where there is one) that is unlinked at once."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("shardline-rows")
        else:
            fd, path = tempfile.mkstemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
            os.unlink(path)
        try:
            os.ftruncate(fd, HEADER_BYTES)
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    def grow(self, in_bytes: int, out_bytes: int) -> None:
        """Node: make room, by powers of two. Raises `engine_out_of_memory` where the system has none: the pages are
        reserved here, because touching one that cannot be had would kill the process (SIGBUS)."""
        new_in, new_out = _grown(self.in_bytes, in_bytes), _grown(self.out_bytes, out_bytes)
        if (new_in, new_out) == (self.in_bytes, self.out_bytes):
            return
        size = HEADER_BYTES + new_in + new_out
        if size > AREAS_LIMIT:
            raise ShardlineError(
                "engine_out_of_memory", f"rows of {size} bytes in one batch are over the limit of {AREAS_LIMIT}"
            )
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.fd, 0, size)
            else:
                os.ftruncate(self.fd, size)
        except OSError as error:
            raise ShardlineError(
                "engine_out_of_memory", f"no {size} bytes of shared memory for rows: {error.strerror}"
            ) from None
        self.follow(new_in, new_out)

    def follow(self, in_bytes: int, out_bytes: int) -> None:
        """Map the areas anew where their sizes changed. ValueError where the file is not that long."""
        if (in_bytes, out_bytes) == (self.in_bytes, self.out_bytes):
            return
        size = HEADER_BYTES + in_bytes + out_bytes
        if in_bytes < 0 or out_bytes < 0 or os.fstat(self.fd).st_size < size:
            raise ValueError(f"areas of {in_bytes} and {out_bytes} bytes do not fit the shared file")
        self._drop_areas()
        self._areas = mmap.mmap(self.fd, size)
        self._view = memoryview(self._areas)
        self.in_bytes, self.out_bytes = in_bytes, out_bytes

    def rows_in(self, offset: int, size: int) -> memoryview:
        return self._view[HEADER_BYTES + offset : HEADER_BYTES + offset + size]

    def rows_out(self, offset: int, size: int) -> memoryview:
        start = HEADER_BYTES + self.in_bytes + offset
        return self._view[start : start + size]

    @property
    def ticks(self) -> int:
        return self._header[0]

    def tick(self) -> None:
        self._header[0] += 1

    @property
    def kv_tokens(self) -> int:
        return self._header[1]

    @kv_tokens.setter
    def kv_tokens(self, value: int) -> None:
        self._header[1] = value

    def _drop_areas(self) -> None:
        self._view.release()
        if self._areas is not None:
            # BufferError: an engine still holds a view of a past batch. The memory goes when that view does.
            with contextlib.suppress(BufferError):
                self._areas.close()
        self._areas = None

    def close(self) -> None:
        self._drop_areas()
        self._header.release()
        self._header_map.close()
        os.close(self.fd)


def _grown(have: int, need: int) -> int:
    return have if need <= have else max(64 << 10, 1 << (need - 1).bit_length())
