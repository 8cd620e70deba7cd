"""The llama.cpp engine: a `Backend` over one context, in which every slot is a sequence.

Owns the slots, the check that each row stands where its sequence ends, one llama_decode for all entries of a batch, and
what follows from its return codes. How a Shard is loaded is in llama_shard.py. What it hands out are views of the
library's memory, valid until the next call. Shown by tests/model/test_llama_backend.py and test_llama_exact.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardline.errors import ShardlineError
from shardline.model import llama_state
from shardline.model.backend import BackendEntry, BackendOutput, Buffer, ShardDescription
from shardline.model.llama_context import LlamaContext
from shardline.model.llama_embedding import EmbeddingMatrix
from shardline.model.llama_library import LlamaLibrary
from shardline.model.llama_rows import RowArrays, address_of
from shardline.model.llama_tap import Tap, view
from shardline.model.llama_text import LlamaText

_NO_ROOM = 1
_INVALID = -1
_OUT_OF_MEMORY = -2
_CODES = {2: "was aborted", _INVALID: "found the batch invalid", _OUT_OF_MEMORY: "ran out of memory", -3: "failed"}
_FAILURES_LIMIT = 2
"""Calls in succession that failed in computing before the engine as a whole counts as lost."""


@dataclass(frozen=True, slots=True)
class LoadedShard:
    """Everything that a backend works with, made and checked by llama_shard.py."""

    library: LlamaLibrary
    context: LlamaContext
    arrays: RowArrays
    rows: int
    """Most rows of one llama_decode …"""
    outputs: int
    """… and most of which something is taken out, on the tail."""
    sessions: int
    description: ShardDescription
    tap: Tap | None
    """None on the tail."""
    embedding: EmbeddingMatrix | None
    """Of a head that is cut; a whole model takes token ids itself."""
    divisor: float
    """Of rows that come in; 1.0 in all architectures but those whose graph scales whatever it is given."""
    equal_rows: bool
    """Entries of one call must have the same number of rows: the library would cut the call into several, and a tap
    sees only the last."""
    one_sequence: bool
    """Each entry is a call of its own: the library's graph for this architecture takes one sequence only."""
    window: int
    """Of sliding attention whose passed part is dropped; 0: nothing is."""
    recurrent: bool
    text: LlamaText | None
    identity: bytes
    """SHA-256 of what a saved slot belongs to."""
    tokens_beside: bool = False
    """Token ids go in with the rows that came over a Seam."""


class _Row(NamedTuple):
    """An entry that passed its checks."""

    place: int
    """In the batch that was given."""
    sequence: int
    entry: BackendEntry


class LlamaBackend:
    """One loaded Shard; implements `Backend`. Called by one thread, except for `tokenize`."""

    def __init__(self, shard: LoadedShard, held: ExitStack) -> None:
        """`held` frees model and context, in order."""
        self._held = held
        self._shard = shard
        self._c = shard.library.c
        self._context = shard.context.pointer
        self._memory = shard.context.memory
        self._arrays = shard.arrays
        self._description = shard.description
        self._is_head = shard.description.is_head
        self._is_tail = shard.description.is_tail
        self._width = shard.arrays.hidden.shape[1]
        self._row_bytes = shard.description.layout_out.row_bytes
        self._sequences: dict[int, int] = {}
        self._free = list(range(shard.sessions))
        self._failures = 0

    def describe(self) -> ShardDescription:
        return self._description

    def open(self, slot: int) -> None:
        """`capacity` where all sequences are taken."""
        if slot in self._sequences:
            raise ShardlineError("engine_error", f"slot {slot} is open already")
        if not self._free:
            raise ShardlineError("capacity", f"the engine has {self._shard.sessions} slots, and all are open")
        self._sequences[slot] = heapq.heappop(self._free)

    def fork(self, source: int, target: int, tokens: int) -> None:
        """Let `target` begin with what `source` holds first. Attention shares the cells: nothing is copied, unless a
        sliding window has passed some of them. A recurrent state is, and only as long as all of it is wanted. Else
        `rollback_unsupported`; `capacity` where all sequences are taken."""
        sequence, held = self._sequence(source), self.kv_tokens(source)
        if not 1 <= tokens <= held:
            raise ShardlineError("seam_gap", f"{tokens} tokens of a cache that ends at {held}")
        if tokens < held:
            self._check_cut(sequence, tokens)
        self.open(target)
        try:
            if self._shard.recurrent:
                self.restore(target, self.save(source))
            else:
                self._c.llama_memory_seq_cp(self._memory, sequence, self._sequences[target], 0, tokens)
                if self._holds_passed(self._sequences[target], tokens):
                    # The library uses a cell again that its sequence's window has passed, but never one that two
                    # sequences hold: other sessions would soon find no room. A saved state has no such cells.
                    self.restore(target, self.save(target))
            if self.kv_tokens(target) != tokens:
                raise ShardlineError("engine_error", f"the library did not copy {tokens} tokens of a sequence")
        except BaseException:
            self.close(target)
            raise

    def _holds_passed(self, sequence: int, tokens: int) -> bool:
        """Whether a sequence that ends at `tokens` holds cells that its sliding window has passed."""
        window = self._shard.window
        return bool(window) and self._c.llama_memory_seq_pos_min(self._memory, sequence) < tokens - window

    def close(self, slot: int) -> None:
        sequence = self._sequences.pop(slot, None)
        if sequence is not None:
            self._clear(sequence)
            heapq.heappush(self._free, sequence)

    def kv_tokens(self, slot: int) -> int:
        return int(self._c.llama_memory_seq_pos_max(self._memory, self._sequence(slot))) + 1

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids. `text_unavailable` on Shards and models without a tokenizer. Safe to call from any thread."""
        if self._shard.text is None:
            raise ShardlineError("text_unavailable", "this Shard has no tokenizer")
        return self._shard.text.tokenize(text, add_special=add_special, parse_special=parse_special)

    def text_bundle(self) -> bytes | None:
        return self._shard.text.bundle if self._shard.text is not None else None

    def unload(self) -> None:
        """Free everything. For processes that outlive their engine; a worker simply ends."""
        self._held.close()

    # ---- going back, and states --------------------------------------------------------------------------------

    def rollback(self, slot: int, position: int) -> None:
        """Exact, or `rollback_unsupported`: with recurrent layers, and where a window has dropped what is needed."""
        sequence, held = self._sequence(slot), self.kv_tokens(slot)
        if not 0 <= position <= held:
            raise ShardlineError("seam_gap", f"cannot go back to {position}: the cache ends at {held}")
        if position == held:
            return
        if position == 0:
            self._clear(sequence)
            return
        self._check_cut(sequence, position)
        if not self._c.llama_memory_seq_rm(self._memory, sequence, position, -1):
            raise ShardlineError("rollback_unsupported", f"the cache cannot be cut at {position}")

    def _check_cut(self, sequence: int, position: int) -> None:
        """`rollback_unsupported` where what is below `position` is not what it was when the sequence ended there."""
        if self._shard.recurrent:
            raise ShardlineError("rollback_unsupported", "layers of this Shard keep a state that cannot be taken back")
        oldest = self._c.llama_memory_seq_pos_min(self._memory, sequence)
        if self._shard.window and oldest > max(0, position - self._shard.window):
            raise ShardlineError(
                "rollback_unsupported", f"the sliding window has dropped what position {position} needs"
            )

    def save(self, slot: int) -> bytes:
        sequence = self._sequence(slot)
        return llama_state.save(
            self._shard.library, self._address(), sequence, self.kv_tokens(slot), self._shard.identity
        )

    def restore(self, slot: int, state: bytes) -> None:
        """Replace what an open slot holds by what `save` gave on a Shard like this; else `snapshot_invalid`, and the
        slot is as before, or empty where the library refused a state in the middle."""
        sequence = self._sequence(slot)
        tokens = llama_state.check(state, self._shard.identity)
        self._clear(sequence)
        try:
            llama_state.restore(self._shard.library, self._address(), sequence, state)
            if self.kv_tokens(slot) != tokens:
                raise ShardlineError("snapshot_invalid", f"{self.kv_tokens(slot)} tokens came of a state of {tokens}")
        except ShardlineError:
            self._clear(sequence)
            raise

    # ---- computing ---------------------------------------------------------------------------------------------

    def run(self, entries: Sequence[BackendEntry]) -> list[BackendOutput | Exception]:
        """One llama_decode for all entries (more only where their rows do not fit one). Rows are grouped by ascending
        sequence, as they lie in the cache."""
        if len(entries) == 1:
            return [self._run_one(entries[0])]
        results: list[BackendOutput | Exception | None] = [None] * len(entries)
        rows: dict[int, _Row] = {}
        for index, entry in enumerate(entries):
            if entry.embed_rows:
                results[index] = self._run_one(entry)  # its rows are copies
                continue
            try:
                sequence = self._check(entry)
                if sequence in rows:
                    raise ShardlineError("engine_error", f"slot {entry.slot} stands in a batch twice")
                rows[sequence] = _Row(index, sequence, entry)
            except ShardlineError as error:
                results[index] = error
        calls = self._calls([rows[sequence] for sequence in sorted(rows)])
        for call in calls:
            outputs = self._decode(call)
            for row, output in zip(call, outputs, strict=True):
                # Views end with the next call of the library.
                results[row.place] = output if len(calls) == 1 else _kept(output)
        return [result for result in results if result is not None]

    def _run_one(self, entry: BackendEntry) -> BackendOutput | Exception:
        try:
            row = _Row(0, self._check(entry), entry)
        except ShardlineError as error:
            return error
        return self._embedded(row) if entry.embed_rows else self._decode((row,))[0]

    def _embedded(self, row: _Row) -> BackendOutput | Exception:
        """The rows that are wanted behind the final norm, as calls of at most `outputs` rows that the library is told
        to give them of; those in front of them as usual. Whatever else is computed knows nothing of it."""
        if not (self._is_tail and row.entry.embed_rows <= row.entry.rows):
            return ShardlineError("engine_error", f"{row.entry.embed_rows} rows are wanted behind the final norm")
        made: list[npt.NDArray[np.float32]] = []
        for part in _parts(row.entry, self._shard.outputs):
            call = (_Row(0, row.sequence, part),)
            if not part.embed_rows:
                result = self._decode(call)[0]
                if isinstance(result, Exception):
                    return result
                continue
            self._c.llama_set_embeddings(self._context, True)
            try:
                code = self._c.llama_decode(self._context, self._filled(call))
            finally:
                self._c.llama_set_embeddings(self._context, False)
                self._arrays.unmark()
            if code:
                return self._failed(code, call)
            self._failures = 0
            made.append(self._rows_behind_norm(part.rows))
        return BackendOutput(embedded=np.concatenate(made))

    def _rows_behind_norm(self, rows: int) -> npt.NDArray[np.float32]:
        """A copy of what the library gives of the last call."""
        address = self._c.llama_get_embeddings(self._context)
        if not address:
            raise ShardlineError("engine_lost", "the library computed a batch and has no rows of it")
        embeddings = self._description.embeddings
        width = 0 if embeddings is None else embeddings.width
        return np.frombuffer(view(address, 4 * rows * width), np.float32).reshape(rows, width).copy()

    def _check(self, entry: BackendEntry) -> int:
        """The entry's sequence; `engine_error` where it is not open or ends elsewhere, or where token ids or rows are
        not what they should be. llama.cpp's own check passes a position twice in some architectures, and any in an
        empty sequence."""
        sequence = self._sequence(entry.slot)
        held = int(self._c.llama_memory_seq_pos_max(self._memory, sequence)) + 1
        if entry.position != held:
            raise ShardlineError("engine_error", f"rows for position {entry.position}, but the cache ends at {held}")
        rows = entry.rows
        if not 1 <= rows <= self._shard.rows:
            raise ShardlineError("engine_error", f"{rows} rows in one entry, expected 1 to {self._shard.rows}")
        if memoryview(entry.tokens).nbytes != 4 * rows:
            raise ShardlineError(
                "engine_error", f"{memoryview(entry.tokens).nbytes} bytes of token ids for {rows} rows"
            )
        if self._is_head or self._shard.tokens_beside:
            self._check_tokens(entry)
        if not self._is_head and [memoryview(h).nbytes for h in entry.hidden] != [4 * self._width * rows]:
            raise ShardlineError("engine_error", f"hidden rows of another size than {4 * self._width} bytes each")
        return sequence

    def _check_tokens(self, entry: BackendEntry) -> None:
        ids = np.frombuffer(entry.tokens, np.int32)
        size = self._description.vocab_size
        if not (0 <= ids[0] < size if entry.rows == 1 else int(ids.min()) >= 0 and int(ids.max()) < size):
            raise ShardlineError("engine_error", f"a token id is outside of 0 to {size - 1}")

    def _calls(self, rows: list[_Row]) -> list[list[_Row]]:
        """Rows that fit one llama_decode together, in order."""
        calls: list[list[_Row]] = []
        room = 0
        for row in rows:
            if not calls or row.entry.rows > room or not self._fit_together(calls[-1][-1], row):
                calls.append([])
                room = self._shard.rows
            calls[-1].append(row)
            room -= row.entry.rows
        return calls

    def _fit_together(self, one: _Row, other: _Row) -> bool:
        if self._shard.one_sequence:
            return False
        return not self._shard.equal_rows or one.entry.rows == other.entry.rows

    def _decode(self, call: Sequence[_Row]) -> list[BackendOutput | Exception]:
        code = self._c.llama_decode(self._context, self._filled(call))
        if code:
            self._arrays.unmark()
            return [self._failed(code, call)] * len(call)
        self._failures = 0
        return self._logits(call) if self._is_tail else self._hidden(call)

    def _filled(self, call: Sequence[_Row]) -> Any:
        """The batch of a call."""
        arrays = self._arrays
        start = 0
        for row in call:
            entry = row.entry
            arrays.place(start, entry.rows, row.sequence, entry.position)
            if self._is_head or self._shard.tokens_beside:
                arrays.tokens[start : start + entry.rows] = np.frombuffer(entry.tokens, np.int32)
            start += entry.rows
            for output in range(start - entry.embed_rows, start):
                arrays.mark(output)
            if self._is_tail and entry.want_output:
                arrays.mark(start - 1)
        if self._is_head:
            if self._shard.embedding is None:
                return arrays.with_tokens(start)
            self._shard.embedding.look_up(arrays.tokens[:start], arrays.hidden)
            return arrays.with_hidden(start)
        return arrays.with_hidden(start, self._take_hidden(call))

    def _take_hidden(self, call: Sequence[_Row]) -> int | None:
        """The address of the rows where they lie already as one; None: they were gathered in the arrays."""
        divisor = self._shard.divisor
        if len(call) == 1 and divisor == 1.0:
            address = address_of(call[0].entry.hidden[0])
            if address is not None:
                return address
        target, start = self._arrays.hidden, 0
        for row in call:
            given = np.frombuffer(row.entry.hidden[0], np.float32)
            target[start : start + row.entry.rows] = given.reshape(row.entry.rows, self._width)
            start += row.entry.rows
        if divisor != 1.0:
            target[:start] /= np.float32(divisor)
        return None

    def _hidden(self, call: Sequence[_Row]) -> list[BackendOutput | Exception]:
        tap = self._shard.tap
        if tap is None:
            raise ShardlineError("engine_lost", "a Shard that is not the tail has no tap")
        total = sum([row.entry.rows for row in call])
        rows = tap.rows(total)
        if len(call) == 1:
            return [BackendOutput((rows,))]
        outputs: list[BackendOutput | Exception] = []
        start = 0
        for row in call:
            end = start + self._row_bytes * row.entry.rows
            outputs.append(BackendOutput((rows[start:end],)))
            start = end
        return outputs

    def _logits(self, call: Sequence[_Row]) -> list[BackendOutput | Exception]:
        self._arrays.unmark()
        outputs: list[BackendOutput | Exception] = []
        size = 4 * self._description.vocab_size
        last = -1
        for row in call:
            last += row.entry.rows
            if not row.entry.want_output:
                outputs.append(BackendOutput())
                continue
            address = self._c.llama_get_logits_ith(self._context, last)
            if not address:
                raise ShardlineError("engine_lost", "the library computed a batch and has no logits of it")
            outputs.append(BackendOutput(logits=np.frombuffer(view(address, size), np.float32)))
        if not any(row.entry.want_output for row in call):
            # Decoding is asynchronous where there are accelerators; the next batch's rows must not overtake it.
            self._c.llama_synchronize(self._context)
        return outputs

    def _failed(self, code: int, call: Sequence[_Row]) -> ShardlineError:
        """What a return code means. The sessions of the call fail, all others go on: where nothing was computed
        nothing has changed, and where it was begun the sequences of the call are emptied here. `engine_lost` is raised
        where that does not help."""
        words = self._shard.library.log.last_words(1)
        said = f": {words[:300]}" if words else ""
        if code == _NO_ROOM:
            return ShardlineError("engine_out_of_memory", "the KV buffer has no room for the rows of this batch")
        if code == _INVALID:
            return ShardlineError("engine_error", f"llama.cpp {_CODES[code]}{said}")
        what = f"llama.cpp {_CODES.get(code, f'returned {code}')} in computing{said}"
        self._failures += 1
        if self._failures >= _FAILURES_LIMIT:
            raise ShardlineError("engine_lost", f"{what}; so did the batch before")
        for row in call:
            self._clear(row.sequence)
        return ShardlineError("engine_out_of_memory" if code == _OUT_OF_MEMORY else "engine_error", what)

    # ---- sequences ---------------------------------------------------------------------------------------------

    def _sequence(self, slot: int) -> int:
        sequence = self._sequences.get(slot)
        if sequence is None:
            raise ShardlineError("engine_error", f"slot {slot} is not open")
        return sequence

    def _clear(self, sequence: int) -> None:
        """Empty a sequence. A whole one can always be removed; `engine_lost` where it is not gone."""
        self._c.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        if self._c.llama_memory_seq_pos_max(self._memory, sequence) != -1:
            raise ShardlineError("engine_lost", f"sequence {sequence} cannot be removed from the cache")

    def _address(self) -> int:
        if self._context is None:
            raise ShardlineError("engine_lost", "the context is closed")
        return self._context


def _parts(entry: BackendEntry, most: int) -> list[BackendEntry]:
    """An entry of which rows at the end are wanted, as entries of which all are, or none."""
    first = entry.rows - entry.embed_rows
    starts = [*([0] if first else []), *range(first, entry.rows, most)]
    ends = [*starts[1:], entry.rows]
    return [_part(entry, start, end) for start, end in zip(starts, ends, strict=True)]


def _part(entry: BackendEntry, start: int, end: int) -> BackendEntry:
    def rows_of(buffer: Buffer) -> memoryview:
        data = memoryview(buffer).cast("B")
        size = len(data) // entry.rows
        return data[size * start : size * end]

    return replace(
        entry,
        position=entry.position + start,
        rows=end - start,
        tokens=rows_of(entry.tokens),
        hidden=tuple(map(rows_of, entry.hidden)),
        embed_rows=end - start if start >= entry.rows - entry.embed_rows else 0,
    )


def _kept(output: BackendOutput | Exception) -> BackendOutput | Exception:
    """A copy that outlives the library's next call."""
    if isinstance(output, Exception):
        return output
    hidden: tuple[Buffer, ...] = tuple(bytes(buffer) for buffer in output.hidden)
    return BackendOutput(hidden, None if output.logits is None else output.logits.copy())
