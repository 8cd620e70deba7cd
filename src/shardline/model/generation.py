"""Slots and tokens on top of any backend: what is the same for every engine, written once.

Owns what a slot was opened with, the check that a batch fits the cache, the sampler of each tail slot, and when a
generation ends by itself. Refuses to own caches (the backend's), processes (worker.py) and text. Synchronous, one
thread. Shown by tests/model/test_generation.py.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from shardline.errors import ShardlineError
from shardline.model.backend import Backend, BackendEntry, BackendOutput, Buffer, Reuse, ShardDescription, SlotSpec
from shardline.model.grammar import Grammars
from shardline.model.pooling import Pool, pooling_of
from shardline.model.sampling import Sampler
from shardline.wire.messages import Pooling, Sampling

End = Literal["stop", "length"]
_I32 = np.dtype("<i4")


class SampledToken(NamedTuple):
    """The tail's choice. `end` "stop": `id` is an end-of-generation or stop id; "length": the last permitted token."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] | None = None
    """(id, logprob) of the most likely tokens."""
    end: End | None = None


class Pooled(NamedTuple):
    """The tail's vector of a whole prompt: float32 little-endian, not normalised."""

    vector: bytes
    pooling: Pooling


@dataclass(frozen=True, slots=True)
class StepResult:
    """Of one entry: the rows for the next Shard (one buffer a tensor of `layout_out`), or on the tail a token or a
    vector, or nothing where no output was wanted, or where the entry was skipped."""

    hidden: tuple[Buffer, ...] = ()
    token: SampledToken | None = None
    pooled: Pooled | None = None
    skipped: bool = False
    """The entry was for the token of the batch before, and that ended the generation, or failed: nothing was done."""


_SKIPPED = StepResult(skipped=True)


class _Ends(msgspec.Struct):
    """Of a `TextBundle`."""

    eog: list[int]


class _Slot:
    __slots__ = ("ended", "expected", "kept", "kv_tokens", "pool", "sampler", "spec")

    def __init__(self, spec: SlotSpec, sampler: Sampler | None, pool: Pool | None) -> None:
        self.spec = spec
        self.sampler = sampler
        self.pool = pool
        """Of a prompt that becomes a vector: there is then no sampler."""
        self.kv_tokens = 0
        """As last read from the backend."""
        self.expected: int | None = None
        """The token sampled last: it must come round as the next row."""
        self.ended = False
        """That token is the last of the generation."""
        self.kept = False
        """Its session has ended: nothing is computed here, others begin with what it holds."""


class Generator:
    """Opens, runs and closes slots of one backend.

    An `engine_lost` that the backend raises leaves `run`, `open` and the rest as it is: the engine is unusable as a
    whole, and its owner starts it again. Every other fault of a batch becomes the result of its entries.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.description: ShardDescription = backend.describe()
        self.text: bytes | None = backend.text_bundle()
        self._end_ids = frozenset(msgspec.msgpack.decode(self.text, type=_Ends).eog if self.text else ())
        self.grammars = Grammars(self.text if self.description.is_tail else None, self.description.vocab_size)
        self._row_bytes = tuple(t.row_bytes for t in self.description.layout_out.tensors)
        self._slots: dict[int, _Slot] = {}
        self.kv_tokens = 0
        """Tokens in the caches of all open slots, as the backend reports them."""

    @property
    def slots(self) -> int:
        return len(self._slots)

    def open(self, slot: int, spec: SlotSpec) -> None:
        """Make a cache, and on the tail a sampler: empty, or as `spec.reuse` says. Raises what either raises; `slot` is
        not open then."""
        reuse = spec.reuse
        if slot in self._slots and (reuse is None or reuse.source != slot):
            raise ShardlineError("engine_error", f"slot {slot} is open already")
        try:
            sampler, pool = self._sampler(spec), self._pool(spec)
            if reuse is None:
                self.backend.open(slot)
            else:
                self._fork(slot, reuse, sampler)
        except Exception as error:
            self.close(slot)
            raise fault_of(error) from error
        before = self._slots.get(slot)
        held = self._slots[slot] = _Slot(spec, sampler, pool)
        if reuse is not None:
            held.kv_tokens = before.kv_tokens if before is not None else 0
            self._read_kv(slot, held)

    def _sampler(self, spec: SlotSpec) -> Sampler | None:
        if not self.description.is_tail or spec.pooling is not None:
            return None
        sampling = spec.sampling if spec.sampling is not None else Sampling()
        return Sampler(
            sampling,
            constraint=None if sampling.grammar is None else self.grammars.constraint(sampling.grammar),
            vocab_size=self.description.vocab_size,
            prompt_tokens=spec.prompt_tokens,
            end_ids=self._end_ids,
        )

    def _pool(self, spec: SlotSpec) -> Pool | None:
        """Of rows that are not computed again there is nothing to pool, so such a slot begins empty."""
        if not self.description.is_tail or spec.pooling is None:
            return None
        if spec.reuse is not None:
            raise ShardlineError("engine_error", "a prompt that becomes a vector begins with no kept cache")
        embeddings = self.description.embeddings
        pooling = pooling_of(embeddings, spec.pooling)
        return Pool(pooling, 0 if embeddings is None else embeddings.width, spec.prompt_tokens)

    def _fork(self, slot: int, reuse: Reuse, sampler: Sampler | None) -> None:
        """Begin with what a kept slot holds; the sampler observes the tokens that are not computed again."""
        source = self._slots.get(reuse.source)
        if source is None or not source.kept or not 0 < reuse.tokens <= source.kv_tokens:
            raise ShardlineError("session_gone", f"slot {reuse.source} is not kept with {reuse.tokens} tokens")
        if sampler is not None:
            ids = np.frombuffer(reuse.ids, dtype=_I32)
            if len(ids) != reuse.tokens:
                raise ShardlineError("engine_error", f"{len(ids)} token ids for {reuse.tokens} that are reused")
            sampler.observe(ids)
        if reuse.source == slot:
            self.backend.rollback(slot, reuse.tokens)
        else:
            self.backend.fork(reuse.source, slot, reuse.tokens)

    def keep(self, slot: int, tokens: int) -> None:
        """The session of `slot` has ended: hold on to its first `tokens` for `Reuse`, and to nothing else of it.
        Raises what a rollback raises; the caller then closes the slot."""
        held = self._held(slot)
        held.sampler = held.pool = None
        self.rollback(slot, tokens)
        held.kept = True

    def close(self, slot: int) -> None:
        """Free the slot; closing what is not open is nothing."""
        held = self._slots.pop(slot, None)
        if held is not None:
            self.kv_tokens -= held.kv_tokens
        self.backend.close(slot)

    def rollback(self, slot: int, position: int) -> None:
        """Drop everything at and above `position`. Raises `rollback_unsupported` where the engine cannot."""
        held = self._held(slot)
        if not 0 <= position <= held.kv_tokens:
            raise ShardlineError("seam_gap", f"cannot go back to {position}: the cache ends at {held.kv_tokens}")
        if held.pool is not None:
            raise ShardlineError("rollback_unsupported", "rows of this prompt have gone into a vector already")
        try:
            self.backend.rollback(slot, position)
        except Exception as error:
            raise fault_of(error) from error
        finally:
            self._read_kv(slot, held)
        held.expected = None
        if held.sampler is not None:
            held.sampler.rollback(position)

    def run(self, entries: Sequence[BackendEntry]) -> list[StepResult | ShardlineError]:
        """Compute one batch: a result or an error for each entry, in order. The caller closes slots that failed."""
        results: list[StepResult | ShardlineError] = [_SKIPPED] * len(entries)
        runnable: dict[int, BackendEntry] = {}
        for i, given in enumerate(entries):
            entry = given if given.tokens else self._with_token(given)
            if entry is None:
                continue
            try:
                self._check(entry)
                runnable[i] = entry
            except ShardlineError as error:
                results[i] = error
        if runnable:
            outputs = self._compute([self._asked(entry) for entry in runnable.values()])
            for (i, entry), output in zip(runnable.items(), outputs, strict=True):
                results[i] = self._result(entry, output)
        return results

    def _with_token(self, entry: BackendEntry) -> BackendEntry | None:
        """The entry with the token that was sampled last; None where none is to follow."""
        held = self._slots.get(entry.slot)
        if held is None or held.sampler is None or entry.rows != 1:
            return entry  # and what is wrong with it is told
        if held.expected is None or held.ended:
            return None
        return replace(entry, tokens=held.expected.to_bytes(4, "little"))

    def _asked(self, entry: BackendEntry) -> BackendEntry:
        """What the backend is asked for: of a prompt that becomes a vector, rows in place of logits."""
        pool = self._slots[entry.slot].pool
        if pool is None:
            return entry
        return replace(entry, want_output=False, embed_rows=pool.rows_wanted(entry.rows))

    def _compute(self, entries: list[BackendEntry]) -> Sequence[BackendOutput | Exception]:
        try:
            outputs: Sequence[BackendOutput | Exception] = self.backend.run(entries)
        except Exception as error:  # an engine's fault is the result of its batch, whatever it is
            fault = fault_of(error)
            if fault.code == "engine_lost":
                raise fault from error
            outputs = [fault] * len(entries)
        for entry in entries:
            self._read_kv(entry.slot, self._slots[entry.slot])
        if len(outputs) != len(entries):
            wrong = ShardlineError("engine_error", f"the engine returned {len(outputs)} results for {len(entries)}")
            return [wrong] * len(entries)
        return outputs

    def _held(self, slot: int) -> _Slot:
        held = self._slots.get(slot)
        if held is None or held.kept:
            raise ShardlineError("session_gone", f"slot {slot} is not open")
        return held

    def _read_kv(self, slot: int, held: _Slot) -> None:
        now = self.backend.kv_tokens(slot)
        self.kv_tokens += now - held.kv_tokens
        held.kv_tokens = now

    def _check(self, entry: BackendEntry) -> None:
        """Refuse what would make a cache or a text wrong, before the engine sees it."""
        held = self._held(entry.slot)
        if entry.position != held.kv_tokens:
            raise ShardlineError("seam_gap", f"rows for position {entry.position}: the cache ends at {held.kv_tokens}")
        end = entry.position + entry.rows
        limit = self.description.context_length
        if end > limit:
            raise ShardlineError("context_length_exceeded", f"position {end} is past the context of {limit}")
        tokens = np.frombuffer(entry.tokens, dtype=_I32)
        if len(tokens) != entry.rows or entry.rows < 1:
            raise ShardlineError("seam_invalid", f"{len(tokens)} token ids for {entry.rows} rows")
        lowest, highest = (tokens[0],) * 2 if entry.rows == 1 else (tokens.min(), tokens.max())
        self._check_tokens(int(tokens[0]), int(lowest), int(highest), held)
        if held.sampler is not None:
            if entry.want_output and end < held.spec.prompt_tokens:
                raise ShardlineError(
                    "seam_invalid", f"a token is wanted at {end}, inside the prompt of {held.spec.prompt_tokens}"
                )
            held.sampler.observe(tokens)
        elif held.pool is not None and entry.want_output != (end == held.spec.prompt_tokens):
            raise ShardlineError("seam_invalid", f"rows up to {end} of a prompt of {held.spec.prompt_tokens} to pool")
        held.expected = None

    def _check_tokens(self, first: int, lowest: int, highest: int, held: _Slot) -> None:
        size = self.description.vocab_size
        if size and (lowest < 0 or highest >= size):
            raise ShardlineError("seam_invalid", f"a token id lies outside the vocabulary of {size}")
        if held.expected is not None and first != held.expected:
            raise ShardlineError("seam_invalid", "the token that came round is not the one that was sampled")

    def _result(self, entry: BackendEntry, output: BackendOutput | Exception) -> StepResult | ShardlineError:
        if isinstance(output, Exception):
            return fault_of(output)
        try:
            if not self.description.is_tail:
                self._check_rows(entry, output)
                return StepResult(hidden=output.hidden)
            pool = self._slots[entry.slot].pool
            if pool is not None:
                return _pooled(pool, entry, output)
            return StepResult(token=self._sample(entry, output)) if entry.want_output else StepResult()
        except Exception as error:  # whatever an engine returned for one entry harms that entry only
            return fault_of(error)

    def _check_rows(self, entry: BackendEntry, output: BackendOutput) -> None:
        sizes = [memoryview(b).nbytes for b in output.hidden]
        wanted = [entry.rows * n for n in self._row_bytes]
        if sizes != wanted:
            raise ShardlineError("engine_error", f"the engine returned rows of {sizes} bytes, expected {wanted}")

    def _sample(self, entry: BackendEntry, output: BackendOutput) -> SampledToken:
        held = self._slots[entry.slot]
        if output.logits is None or held.sampler is None:
            raise ShardlineError("engine_error", "the engine returned no logits where a token is wanted")
        logits = np.frombuffer(output.logits, dtype=np.float32)
        number = held.sampler.generated
        choice = held.sampler.sample(logits)
        held.expected = choice.id
        end: End | None = None
        if choice.id in self._end_ids or choice.id in held.sampler.stop_ids:
            end = "stop"
        elif number + 1 >= held.spec.max_tokens:
            end = "length"
        held.ended = end is not None
        return SampledToken(choice.id, choice.logprob, choice.top, end)


def _pooled(pool: Pool, entry: BackendEntry, output: BackendOutput) -> StepResult:
    wanted = pool.rows_wanted(entry.rows)
    pool.passed(entry.rows)
    if wanted:
        if output.embedded is None or len(output.embedded) != wanted:
            raise ShardlineError("engine_error", f"the engine did not return {wanted} rows to pool")
        pool.add(output.embedded)
    return StepResult(pooled=Pooled(pool.vector(), pool.pooling)) if entry.want_output else StepResult()


def fault_of(error: BaseException) -> ShardlineError:
    """The catalogue's error for what an engine raised; the traceback of an unexpected one goes to standard error,
    which is the worker's log."""
    if isinstance(error, ShardlineError):
        return error
    name = type(error).__name__
    text = str(error).strip().partition("\n")[0][:300]
    if isinstance(error, MemoryError) or name == "OutOfMemoryError" or "can't allocate memory" in str(error):
        return ShardlineError("engine_out_of_memory", f"the engine ran out of memory: {text or name}")
    traceback.print_exception(error)
    return ShardlineError("engine_error", f"the engine failed: {name}: {text}")
