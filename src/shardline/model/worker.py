"""The engine worker: the process in which a model computes (`python -m shardline.model.worker`).

Owns one backend, called by the main thread (texts by threads of their own, so that no step waits for one), and a ticker
thread that shows that the process runs, whatever the others do, and ends it when its Node is gone. Refuses to open
sockets or files of its own: what it needs comes as inherited descriptors, and nothing but frames is read from them.
Shown by tests/model/test_worker.py.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence

from shardline.errors import ShardlineError
from shardline.model import backends
from shardline.model.backend import BackendEntry, SlotSpec
from shardline.model.channel import (
    Answer,
    Batch,
    BatchDone,
    Close,
    Compile,
    Done,
    Fault,
    FrameReader,
    Keep,
    Load,
    Loaded,
    Open,
    Outcome,
    Place,
    PooledPrompt,
    Progress,
    Refused,
    Request,
    Rollback,
    Sampled,
    SharedRows,
    Skipped,
    Stop,
    Test,
    Tested,
    TextRequest,
    frame,
    places,
)
from shardline.model.generation import Generator, StepResult, fault_of
from shardline.model.worker_texts import answer_texts

TICK_S = 0.05
EXIT_LOST = 70
"""The engine declared itself unusable (EX_SOFTWARE)."""
EXIT_ORPHAN = 71
SWITCH_S = 0.0005
"""How long a thread that makes token ids of a text keeps the interpreter, when the engine's wants it: once for each
turn of that within a step. Python's own 5 ms is as long as some decode steps."""
_PR_SET_PDEATHSIG = 1
_RECEIVE_BYTES = 256 << 10


def tick(rows: SharedRows, parent: int) -> None:
    """Count in the shared header for ever; end the process when its parent is another one than at the start."""
    while True:
        rows.tick()
        if os.getppid() != parent:
            os._exit(EXIT_ORPHAN)
        time.sleep(TICK_S)


def detach(parent: int) -> None:
    """Be nobody's burden: die with the Node, be the one that the kernel takes when memory ends, leave Ctrl-C to the
    Node. The ticker watches the parent as well; the death signal also reaches a worker that holds the interpreter."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
            score.write("500")
    if os.getppid() != parent:
        os._exit(EXIT_ORPHAN)


class Worker:
    """Answers the Node's requests, one after another, each exactly once."""

    def __init__(self, channel: socket.socket, texts: Sequence[socket.socket], areas: Sequence[SharedRows]) -> None:
        self._channel = channel
        self._texts = texts
        self._areas = areas
        self._reader = FrameReader(Request)
        self._name = ""
        self._generator: Generator | None = None
        self._in_sizes: tuple[int, ...] = ()
        self._out_sizes: tuple[int, ...] = ()

    def serve(self) -> None:
        """Until `Stop`, or until the Node closes its end. Raises what makes the engine unusable."""
        for request in self._requests():
            if isinstance(request, Stop):
                return
            self._send(self._answer(request))

    def _requests(self) -> Iterator[Request]:
        received = memoryview(bytearray(_RECEIVE_BYTES))
        while count := self._channel.recv_into(received):
            yield from self._reader.feed(received[:count])

    def _send(self, message: Answer) -> None:
        self._channel.sendall(frame(message))

    def _answer(self, request: Request) -> Answer:
        try:
            if isinstance(request, Batch):
                return self._run(self._loaded(), request)
            if isinstance(request, Load):
                return self._load(request)
            return self._control(self._loaded(), request)
        except Exception as error:  # an engine's fault is an answer, whatever it is; the Node decides what follows
            fault = fault_of(error)
            if fault.code == "engine_lost":
                raise
            return Refused(Fault.of(fault))
        finally:
            if self._generator is not None:
                self._areas[0].kv_tokens = self._generator.kv_tokens

    def _loaded(self) -> Generator:
        if self._generator is None:
            raise ShardlineError("engine_error", "nothing is loaded")
        return self._generator

    def _load(self, request: Load) -> Answer:
        if self._generator is not None:
            raise ShardlineError("engine_error", "a Shard is loaded already")
        backend = backends.load(request.backend, request.spec, lambda done, total: self._send(Progress(done, total)))
        self._name = request.backend
        self._generator = Generator(backend)
        description = self._generator.description
        self._in_sizes = tuple(t.row_bytes for t in description.layout_in.tensors)
        self._out_sizes = tuple(t.row_bytes for t in description.layout_out.tensors)
        for lane in self._texts:
            threading.Thread(target=_serve_texts, args=(lane, self._generator), name="texts", daemon=True).start()
        # What loading left behind lives as long as the process: keep the collector away from it.
        gc.collect()
        gc.freeze()
        return Loaded(description, self._generator.text)

    def _control(self, generator: Generator, request: Request) -> Answer:
        match request:
            case Open():
                asked = (request.prompt_tokens, request.max_tokens, request.sampling, request.reuse, request.pooling)
                generator.open(request.slot, SlotSpec(*asked))
            case Keep():
                generator.keep(request.slot, request.tokens)
            case Close():
                generator.close(request.slot)
            case Rollback():
                generator.rollback(request.slot, request.position)
            case Test():
                return Tested(backends.self_test(self._name, generator.backend))
        return Done()

    def _run(self, generator: Generator, batch: Batch) -> BatchDone:
        shared = self._areas[batch.area]
        shared.follow(batch.in_bytes, batch.out_bytes)
        counts = tuple([rows for _, _, rows, _, _ in batch.entries])
        inputs, _ = places(counts, self._in_sizes, True)
        outputs, _ = places(counts, self._out_sizes, False)
        rows_in = shared.rows_in
        entries = [
            BackendEntry(
                slot,
                position,
                rows,
                b"" if sampled else rows_in(*place.tokens),
                tuple(rows_in(*h) for h in place.hidden),
                want_output,
            )
            for (slot, position, rows, want_output, sampled), place in zip(batch.entries, inputs, strict=True)
        ]
        started = time.perf_counter()
        results = generator.run(entries)
        compute_us = (time.perf_counter() - started) * 1e6
        return BatchDone([_outcome(r, p, shared) for r, p in zip(results, outputs, strict=True)], compute_us)


def _outcome(result: StepResult | ShardlineError, place: Place, shared: SharedRows) -> Outcome:
    if isinstance(result, ShardlineError):
        return Fault.of(result)
    for buffer, (offset, size) in zip(result.hidden, place.hidden, strict=False):
        shared.rows_out(offset, size)[:] = memoryview(buffer).cast("B")
    token = result.token
    if token is not None:
        return Sampled(token.id, token.logprob, None if token.top is None else list(token.top), token.end)
    if result.pooled is not None:
        return PooledPrompt(*result.pooled)
    return Skipped() if result.skipped else None


def _serve_texts(lane: socket.socket, generator: Generator) -> None:
    backend = generator.backend

    def tokenize(request: TextRequest) -> list[int]:
        if isinstance(request, Compile):
            generator.grammars.check(request.grammar)
            return []
        return backend.tokenize(request.text, add_special=request.add_special, parse_special=request.parse_special)

    with _ending_when_lost():
        answer_texts(lane, tokenize)


@contextlib.contextmanager
def _ending_when_lost() -> Iterator[None]:
    """What escapes makes the engine unusable: say why, and end the process, in whichever thread it was."""
    try:
        yield
        return
    except ShardlineError as error:
        print(f"engine lost: {error.message}", file=sys.stderr)
    except Exception:  # the last thing that this process does is to say why it ends
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(EXIT_LOST)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="shardline.model.worker", description="Started by a Node; not by hand.")
    for name in ("channel", "parent"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("rows", "texts"):
        parser.add_argument(f"--{name}", type=int, nargs="+", required=True)
    given = parser.parse_args(arguments)
    detach(given.parent)
    sys.setswitchinterval(SWITCH_S)
    for descriptor in (given.channel, *given.rows, *given.texts):
        os.set_inheritable(descriptor, False)
    areas = [SharedRows(descriptor) for descriptor in given.rows]
    threading.Thread(target=tick, args=(areas[0], given.parent), name="ticker", daemon=True).start()
    texts = [socket.socket(fileno=descriptor) for descriptor in given.texts]
    with _ending_when_lost():
        Worker(socket.socket(fileno=given.channel), texts, areas).serve()
    sys.stderr.flush()
    # Not sys.exit: engines have threads and exit hooks of their own, which may hang.
    os._exit(0)


if __name__ == "__main__":
    main()
