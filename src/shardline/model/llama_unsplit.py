"""The unsplit model, as its measure: llama.cpp in one plain process, with nothing of a cluster in it.

Owns the shortest loop that the library allows: prompts, then one llama_decode a step for all sequences, the likeliest
token each time. Model and context are made as the engine makes them, so that only the split is compared. One JSON
request a line on stdin, one answer a line on stdout. Shown by tests/model/test_llama_unsplit.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardline.model.llama_context import ContextPlan, LlamaContext, LlamaModel
from shardline.model.llama_library import library
from shardline.model.llama_rows import RowArrays
from shardline.model.llama_tap import view

ROWS = 512
"""Of one call: llama.cpp's own default for a physical batch."""


class Rates(NamedTuple):
    """Of one request; seconds."""

    first_s: float
    """From the start to the first token of every sequence."""
    decode_s: float
    steps: int
    """Steps behind the first token, each with one token a sequence."""
    last: list[int]
    """The last token of each sequence."""


class Unsplit:
    """The whole model in one context."""

    def __init__(self, path: Path, *, threads: int, sequences: int, kv_tokens: int, kv_type: str = "f16") -> None:
        self._library = loaded = library()
        self._c = loaded.c
        self._model = LlamaModel(loaded, path)
        plan = ContextPlan(kv_tokens, sequences, ROWS, 0, threads, kv_type, swa_full=False)
        self._context = LlamaContext(loaded, self._model, plan, None)
        self._arrays = RowArrays(rows=ROWS, width=0, sequences=sequences, multi=False, outputs=False)
        self.vocab_size: int = self._c.llama_vocab_n_tokens(self._model.vocabulary)

    def facts(self) -> dict[str, Any]:
        """What is measured, for the head of a report."""
        return {
            "build": self._library.build,
            "vocab_size": self.vocab_size,
            "weight_bytes": int(self._c.llama_model_size(self._model.pointer)),
        }

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> Rates:
        """`tokens` tokens for each of `prompts`, all sequences in step; the cache is empty before and behind."""
        started = time.perf_counter()
        last = [self._prompt(sequence, ids) for sequence, ids in enumerate(prompts)]
        first = time.perf_counter()
        positions = [len(ids) for ids in prompts]
        for _ in range(tokens - 1):
            last = self._step(last, positions)
            positions = [position + 1 for position in positions]
        ended = time.perf_counter()
        for sequence in range(len(prompts)):
            self._c.llama_memory_seq_rm(self._context.memory, sequence, -1, -1)
        return Rates(first - started, ended - first, tokens - 1, last)

    def _prompt(self, sequence: int, ids: Sequence[int]) -> int:
        arrays = self._arrays
        for start, chunk in _chunks(ids):
            arrays.place(0, len(chunk), sequence, start)
            arrays.tokens[: len(chunk)] = chunk
            if start + len(chunk) == len(ids):
                arrays.mark(len(chunk) - 1)
            self._decode(len(chunk))
        token = self._likeliest(len(chunk) - 1)
        arrays.unmark()
        return token

    def _step(self, last: Sequence[int], positions: Sequence[int]) -> list[int]:
        arrays = self._arrays
        for sequence, (token, position) in enumerate(zip(last, positions, strict=True)):
            arrays.place(sequence, 1, sequence, position)
            arrays.tokens[sequence] = token
            arrays.mark(sequence)
        self._decode(len(last))
        arrays.unmark()
        return [self._likeliest(sequence) for sequence in range(len(last))]

    def _decode(self, rows: int) -> None:
        code = self._c.llama_decode(self._context.pointer, self._arrays.with_tokens(rows))
        if code:
            raise RuntimeError(f"llama_decode returned {code}")

    def _likeliest(self, row: int) -> int:
        address = self._c.llama_get_logits_ith(self._context.pointer, row)
        return int(np.frombuffer(view(address, 4 * self.vocab_size), np.float32).argmax())

    def close(self) -> None:
        self._context.close()
        self._model.close()


def _chunks(ids: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
    for start in range(0, len(ids), ROWS):
        yield start, ids[start : start + ROWS]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="shardline.model.llama_unsplit", description="Started by `shardline bench`.")
    parser.add_argument("model", type=Path)
    for name in ("threads", "sequences", "kv-tokens"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = parser.parse_args(arguments)
    model = Unsplit(given.model, threads=given.threads, sequences=given.sequences, kv_tokens=given.kv_tokens)
    print(json.dumps(model.facts()), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(model.generate(request["prompts"], request["tokens"])._asdict()), flush=True)


if __name__ == "__main__":
    main()
