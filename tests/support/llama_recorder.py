"""What a llama.cpp worker really computed, written down inside the worker: each llama_decode with its rows, each change
of its cache, and what went in and came out.

`recorded(folder)` makes a folder for PYTHONPATH; workers started with it write one file each, read by
llama_replay.py. Nothing of it is in the product, so it costs nothing where nobody records.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

ENGINE = "llama"
REPOSITORY = Path(__file__).parents[2]
_SITE = """\
import sys
if "shardline.model.worker" in sys.orig_argv:
    from tests.support.llama_recorder import install
    install({folder!r})
"""


def recorded(folder: Path) -> str:
    """The PYTHONPATH for processes whose workers shall record into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(_SITE.format(folder=str(folder)))
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(folder), str(REPOSITORY), *([inherited] if inherited else [])])


def install(folder: str) -> None:
    """In a worker, before it loads: its llama.cpp engine is recorded from now on."""
    from shardline.model import backends

    _Recording.folder = Path(folder)
    backends.BACKENDS[ENGINE] = f"{__name__}:load"
    backends.SELF_TESTS[ENGINE] = f"{__name__}:self_test"


class _Recording:
    """The file of this worker. Events are MessagePack objects, each behind its length."""

    folder: Path

    def __init__(self, first: int, last: int) -> None:
        path = self.folder / f"{first:03}-{last:03}.{os.getpid()}.events"
        self._file = path.open("wb", buffering=0)

    def write(self, *event: Any) -> None:
        data = msgspec.msgpack.encode(event)
        self._file.write(len(data).to_bytes(4, "little") + data)


class _Functions:
    """The library's functions, three of them with an ear."""

    def __init__(self, functions: Any, recording: _Recording) -> None:
        self._functions = functions
        self._recording = recording

    def __getattr__(self, name: str) -> Any:
        return getattr(self._functions, name)

    def llama_decode(self, context: Any, batch: Any) -> int:
        count = batch.n_tokens
        positions = list((ctypes.c_int32 * count).from_address(batch.pos))
        pointers = (ctypes.c_uint64 * count).from_address(batch.seq_id)
        sequences = [ctypes.c_int32.from_address(p).value for p in pointers]
        marks = list((ctypes.c_int8 * count).from_address(batch.logits))
        code = int(self._functions.llama_decode(context, batch))
        self._recording.write("decode", positions, sequences, marks, code)
        return code

    def llama_memory_seq_rm(self, memory: Any, sequence: int, start: int, end: int) -> Any:
        self._recording.write("remove", sequence, start, end)
        return self._functions.llama_memory_seq_rm(memory, sequence, start, end)

    def llama_memory_seq_cp(self, memory: Any, source: int, target: int, start: int, end: int) -> Any:
        self._recording.write("copy", source, target, start, end)
        return self._functions.llama_memory_seq_cp(memory, source, target, start, end)


class RecordedBackend:
    """A backend of the product, with what goes in and comes out of `run` written down."""

    def __init__(self, backend: Any, recording: _Recording) -> None:
        self._backend = backend
        self.recording = recording

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def run(self, entries: Sequence[Any]) -> Any:
        given = [
            (self._backend._sequence(e.slot), e.position, e.rows, bytes(e.tokens), b"".join(map(bytes, e.hidden)))
            for e in entries
        ]
        outputs = self._backend.run(entries)
        came = [(b"".join(map(bytes, o.hidden)), b"" if o.logits is None else bytes(o.logits)) for o in outputs]
        self.recording.write("run", [(*g, *c) for g, c in zip(given, came, strict=True)])
        return outputs


def load(spec: Any, *, progress: Callable[[int, int], None] | None = None) -> RecordedBackend:
    from shardline.model import llama_shard
    from shardline.model.llama_library import library

    recording = _Recording(spec.first, spec.last)
    loaded = library()
    object.__setattr__(loaded, "c", _Functions(loaded.c, recording))
    backend = llama_shard.load(spec, progress=progress)
    shard = backend._shard
    about = backend.describe()
    recording.write(
        "loaded",
        {
            "layers": [about.first, about.last, about.n_layers],
            "kv_tokens": shard.context.kv_tokens,
            "sessions": shard.sessions,
            "rows": shard.rows,
            "threads": spec.threads,
            "vocabulary": about.vocab_size,
            "source": spec.model,
        },
    )
    return RecordedBackend(backend, recording)


def self_test(backend: RecordedBackend) -> Any:
    from shardline.model.self_test import self_test as run_test

    backend.recording.write("test", True)
    try:
        return run_test(backend)  # type: ignore[arg-type]
    finally:
        backend.recording.write("test", False)


def recordings(folder: Path) -> list[Path]:
    """The files of one run, in the order of their layers; each Shard has been loaded once."""
    return sorted(folder.glob("*.events"))


if __name__ == "__main__":
    sys.exit("this is loaded by workers that are recorded")
