"""Recordings of llama.cpp workers, repeated on the unsplit model by the library alone, in a process of its own.

`python llama_replay.py whole TAIL…` repeats each tail's calls, row for row, and compares its logits. `… layers NODE…`
takes any Node's calls: at its first layer the rows that came in over the Seam are laid into the unsplit graph, and what
the unsplit layers make of them is compared with what the Node gave away; so the Nodes of a route need not have batched
alike. `PATH@BYTES` is the beginning of a recording. Prints one JSON object a recording. No line of the product is
imported here.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from llama_cpp import llama_cpp as lib

RESIDUAL = "l_out-{}"

_BASE = ctypes.CDLL(str(Path(lib.__file__).parent / "lib" / "libggml-base.so"))
_BASE.ggml_get_name.restype = ctypes.c_char_p
_BASE.ggml_get_name.argtypes = (ctypes.c_void_p,)
_BASE.ggml_nbytes.restype = ctypes.c_size_t
_BASE.ggml_nbytes.argtypes = (ctypes.c_void_p,)
for _name in ("ggml_backend_tensor_get", "ggml_backend_tensor_set"):
    getattr(_BASE, _name).argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
    getattr(_BASE, _name).restype = None


class Entry(NamedTuple):
    """What one session brought to a call, and what it got."""

    sequence: int
    position: int
    rows: int
    tokens: bytes
    hidden_in: bytes
    hidden_out: bytes
    logits: bytes


class Call(NamedTuple):
    """One llama_decode."""

    positions: list[int]
    sequences: list[int]
    marks: list[int]


def events(path: Path, end: int | None = None) -> Iterator[list[Any]]:
    """Up to byte `end` of the file."""
    data = path.read_bytes()[:end]
    at = 0
    while at + 4 <= len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        if at + 4 + size > len(data):
            return
        yield msgspec.msgpack.decode(data[at + 4 : at + 4 + size])
        at += 4 + size


class Whole:
    """The unsplit model with the measures of a recording."""

    def __init__(self, about: dict[str, Any], *, through: bool) -> None:
        """`through`: rows are taken in at the first of the recording's layers and out behind the last."""
        first, last, n_layers = about["layers"]
        self._enter = RESIDUAL.format(first - 1) if through and first > 0 else None
        self._leave = RESIDUAL.format(last - 1) if through and last < n_layers else None
        self._given: bytes = b""
        self._got: bytes = b""
        self._callback = lib.ggml_backend_sched_eval_callback(self._see)
        self._model = lib.llama_model_load_from_file(about["source"].encode(), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        params.n_ctx = about["kv_tokens"]
        params.n_batch = params.n_ubatch = about["rows"]
        params.n_seq_max = about["sessions"]
        params.n_threads = params.n_threads_batch = about["threads"]
        params.kv_unified = True
        params.swa_full = False
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        if self._enter or self._leave:
            params.cb_eval = self._callback
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            sys.exit("no context")
        self._memory = lib.llama_get_memory(self._context)
        self._vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))

    def remove(self, sequence: int, start: int, end: int) -> None:
        lib.llama_memory_seq_rm(self._memory, sequence, start, end)

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        lib.llama_memory_seq_cp(self._memory, source, target, start, end)

    def run(self, call: Call, entries: list[Entry], *, outputs: bool) -> tuple[bytes, list[bytes]]:
        """The rows that leave, and the logits of each entry (b"" where none were wanted), in the order of the call."""
        tokens = np.concatenate([np.frombuffer(e.tokens, np.int32) for e in entries])
        self._given = b"".join(e.hidden_in for e in entries)
        self._got = b""
        count = len(call.positions)
        batch = lib.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        for i in range(count):
            batch.token[i] = int(tokens[i])
            batch.pos[i] = call.positions[i]
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = call.sequences[i]
            batch.logits[i] = call.marks[i] if outputs else 0
        code = lib.llama_decode(self._context, batch)
        lib.llama_batch_free(batch)
        if code:
            sys.exit(f"llama_decode says {code}")
        return self._got, self._logits(entries) if outputs else []

    def _logits(self, entries: list[Entry]) -> list[bytes]:
        found, at = [], -1
        for entry in entries:
            at += entry.rows
            if not entry.logits:
                found.append(b"")
                continue
            pointer = lib.llama_get_logits_ith(self._context, at)
            found.append(np.ctypeslib.as_array(pointer, (self._vocabulary,)).tobytes())
        return found

    def _see(self, tensor: int, asking: bool, _: object) -> bool:
        name = _BASE.ggml_get_name(tensor).decode()
        if name not in (self._enter, self._leave) or asking:
            return name in (self._enter, self._leave)
        size = _BASE.ggml_nbytes(tensor)
        if name == self._enter:
            if size != len(self._given):
                sys.exit(f"{name} has {size} bytes, and {len(self._given)} came in")
            _BASE.ggml_backend_tensor_set(tensor, self._given, 0, size)
        else:
            rows = ctypes.create_string_buffer(size)
            _BASE.ggml_backend_tensor_get(tensor, rows, 0, size)
            self._got = rows.raw
        return True


class Tally:
    """What was compared. A difference is the largest of any two floats, and 0.0 says: not one bit."""

    def __init__(self) -> None:
        self.calls = self.rows = self.compared = self.most_sequences = self.largest_call = 0
        self.difference = 0.0

    def count(self, call: Call) -> None:
        self.calls += 1
        self.rows += len(call.positions)
        self.largest_call = max(self.largest_call, len(call.positions))
        self.most_sequences = max(self.most_sequences, len(set(call.sequences)))

    def compare(self, expected: bytes, got: bytes) -> None:
        self.compared += 1
        if expected != got:
            a, b = np.frombuffer(expected, np.float32), np.frombuffer(got, np.float32)
            self.difference = max(self.difference, float(np.abs(a - b).max()) if a.shape == b.shape else np.inf)


def replay(path: Path, end: int | None, *, through: bool) -> dict[str, Any]:
    stored = list(events(path, end))
    about = next(event[1] for event in stored if event[0] == "loaded")
    whole, tally = Whole(about, through=through), Tally()
    is_tail = about["layers"][1] == about["layers"][2]
    calls: list[Call] = []
    testing = False
    for kind, *values in stored:
        if kind == "remove":
            whole.remove(*values)
        elif kind == "copy":
            whole.copy(*values)
        elif kind == "test":
            (testing,) = values
        elif kind == "decode":
            *shape, code = values
            if code:
                sys.exit(f"a recorded llama_decode returned {code}")
            calls.append(Call(*shape))
        elif kind == "run":
            # In a test that a Node makes by itself, rows come from nowhere: nothing end to end compares with them.
            compared = tally if through or not testing else Tally()
            entries = sorted((Entry(*e) for e in values[0]), key=lambda e: e.sequence)
            _repeat(whole, calls, entries, compared, is_tail=is_tail)
            calls = []
    return {"layers": about["layers"], **vars(tally)}


def _repeat(whole: Whole, calls: list[Call], entries: list[Entry], tally: Tally, *, is_tail: bool) -> None:
    for call in calls:
        own = take(entries, len(call.positions))
        rows, logits = whole.run(call, own, outputs=is_tail)
        tally.count(call)
        if not is_tail:
            tally.compare(b"".join(e.hidden_out for e in own), rows)
        for entry, got in zip(own, logits, strict=False):
            if entry.logits:
                tally.compare(entry.logits, got)
    if entries:
        sys.exit(f"{len(entries)} entries were in no call")


def take(entries: list[Entry], rows: int) -> list[Entry]:
    """The first entries, which have `rows` rows together; taken out."""
    taken: list[Entry] = []
    while rows > 0:
        taken.append(entries.pop(0))
        rows -= taken[-1].rows
    return taken


def shapes(path: Path, end: int | None = None) -> list[tuple[tuple[int, ...], int]]:
    """Positions and the number of sequences of each call that was not a test: what two Nodes of a route can share."""
    return [(tuple(v[0]), len(set(v[1]))) for kind, *v in _of_sessions(path, end) if kind == "decode"]


def _of_sessions(path: Path, end: int | None = None) -> Iterator[list[Any]]:
    """Events that belong to no self-test."""
    testing = False
    for event in events(path, end):
        if event[0] == "test":
            testing = event[1]
        elif not testing:
            yield event


def _rows(path: Path, field: str) -> Iterator[tuple[int, bytes, bytes]]:
    """Position, token id and row of all rows of sessions that went in or out."""
    for kind, *values in _of_sessions(path):
        for entry in map(Entry._make, values[0]) if kind == "run" else ():
            rows: bytes = getattr(entry, field)
            size = len(rows) // entry.rows
            for i in range(entry.rows):
                yield entry.position + i, entry.tokens[4 * i : 4 * i + 4], rows[size * i : size * i + size]


def with_one_bit_flipped(path: Path) -> Path:
    """A copy of a recording in which one value that came in over the Seam is another one."""
    copy, flipped = path.with_suffix(".flipped"), False
    with copy.open("wb") as file:
        for event in events(path):
            if event[0] == "run" and not flipped and (rows := event[1][0][4]):
                event[1][0][4] = rows[:-2] + bytes([rows[-2] ^ 0x40]) + rows[-1:]
                flipped = True
            data = msgspec.msgpack.encode(event)
            file.write(len(data).to_bytes(4, "little") + data)
    return copy


def strange_rows(sender: Path, receiver: Path) -> tuple[int, int]:
    """Over a Seam: rows that came in, and how many of them did not go out with that token at that position."""
    sent = set(_rows(sender, "hidden_out"))
    came = list(_rows(receiver, "hidden_in"))
    return len(came), sum(row not in sent for row in came)


if __name__ == "__main__":
    silent = lib.llama_log_callback(lambda *_: None)
    lib.llama_log_set(silent, ctypes.c_void_p(0))
    lib.llama_backend_init()
    for given in sys.argv[2:]:
        name, _, end = given.partition("@")
        print(json.dumps(replay(Path(name), int(end) if end else None, through=sys.argv[1] == "layers")), flush=True)
