"""One life of one engine worker, seen from the Node: started, spoken to, watched, buried.

Owns the child process, its sockets, the shared rows and its last words; texts have worker_texts.py. Everything runs on
the event loop without tasks: readers and callbacks. Refuses to restart anything (worker_engine.py). Shown by
tests/model/test_worker.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from shardline.errors import ShardlineError
from shardline.model.backend import BackendEntry, ShardDescription
from shardline.model.channel import (
    AREAS,
    Answer,
    Batch,
    FrameReader,
    Place,
    Progress,
    Refused,
    Request,
    SharedRows,
    Stop,
    frame,
    places,
)
from shardline.model.limits import over_limit
from shardline.model.worker_texts import LANES, TextLanes
from shardline.settings import Settings

log = structlog.get_logger(__name__)

_INHERITED = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH",
    "TZ",
    "GLIBC_TUNABLES",
)
_INHERITED_PREFIXES = ("CUDA_", "NVIDIA_", "HIP_", "ROCR_", "HSA_", "PYTORCH_", "TORCH_", "GGML_")
_READ_BYTES = 256 << 10
_LINE_CHARS = 2000
_LAST_LINES = 40
_WORDS_CHARS = 600
_STACK_LINES = ("File ", "Thread ", "Current thread ", "Extension modules", "Traceback ", "~", "^")
_NATIVE_WORDS = re.compile(r"\.(?:c|cc|cpp|cu|h|m|metal):\d+: |^terminate called|^what\(\)")
"""How a library says why it ends the process: an assertion with its place, an exception of C++ that nobody took."""
_DIRECTORIES = re.compile(r"(?:/[\w.@+~-]+)+/")
_REAP_S = 5.0


def worker_environment(inherited: Mapping[str, str], threads: int) -> dict[str, str]:
    """The whole environment of a worker: what engines need of `inherited`, and how their threads behave.

    Secrets of the Node's environment do not reach it. Idle OpenMP threads sleep at once: those of a worker that waits
    for its neighbour would else spin on the cores that the neighbour computes on. Two workers of two threads in turn,
    on two busy cores, ms a step, p50: 35 to 192 as it comes; 22 to 25 with OMP_WAIT_POLICY=PASSIVE, the same with
    GOMP_SPINCOUNT=0 (either does for GNU OpenMP, which torch brings; KMP_BLOCKTIME is for builds with Intel's).
    Who sets GLIBC_TUNABLES means it for engines, too (large pages, docs/benchmark.md).
    """
    kept = {k: v for k, v in inherited.items() if k in _INHERITED or k.startswith(_INHERITED_PREFIXES)}
    count = str(threads or _usable_cores())
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "GGML_NO_BACKTRACE": "1",
    }


def last_words(lines: Iterable[str]) -> str:
    """What of a dying worker's output names the cause, in one line: this goes to clients, so without the stack and
    without the directories of this machine. The log has all lines."""
    telling = [line for line in lines if not line.startswith(_STACK_LINES)]
    fatal = [line for line in telling if line.startswith("Fatal Python error")]
    native = [line for line in telling if _NATIVE_WORDS.search(line)]
    words = " | ".join(native[-2:] + fatal[-1:] or telling[-3:])
    return _DIRECTORIES.sub("", words)[-_WORDS_CHARS:]


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


Answered = Callable[[Answer], None]
Failed = Callable[[ShardlineError], None]


@dataclass(slots=True)
class _Pending:
    """A request that was sent and not yet answered. The worker takes them in order, so the first is the running one."""

    answered: Answered
    failed: Failed
    limit: str
    limit_s: float
    """Runs from the moment that the worker can begin with it."""
    batch: bool = False
    started: float = field(default_factory=time.monotonic)


class WorkerProcess:
    """`on_ended` is called once, when the worker is of no more use for whatever reason. The owner then awaits `bury`,
    which kills, reaps and frees, and returns the error that says why; `fail_pending` tells it to all that wait."""

    def __init__(self, settings: Settings, environment: Mapping[str, str]) -> None:
        """Start the process. Raises `engine_lost` where the system refuses to."""
        self.on_ended: Callable[[], None] = lambda: None
        self.on_progress: Callable[[int, int], None] = lambda done, total: None
        self._serving = False
        self._in_sizes: tuple[int, ...] = ()
        self._out_sizes: tuple[int, ...] = ()
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(Answer)
        self._received = memoryview(bytearray(_READ_BYTES))
        self._pending: deque[_Pending] = deque()
        self._unsent = bytearray()
        self._words: deque[str] = deque(maxlen=_LAST_LINES)
        self._line = b""
        self._why: ShardlineError | None = None
        self._ended = False
        self._freed = False
        self._last_ticks = 0
        self._last_tick_at = time.monotonic()
        with contextlib.ExitStack() as opened:
            try:
                self.areas = tuple(opened.enter_context(contextlib.closing(SharedRows.make())) for _ in range(AREAS))
                self._spawn(environment)
            except OSError as error:
                raise _not_started(error) from error
            opened.pop_all()
        self._loop.add_reader(self._channel.fileno(), self._readable)
        self._loop.add_reader(self._log_fd, self._log_readable)
        self._interval_s = settings.worker_silent_s / 6
        self._watch_due = self._loop.time() + self._interval_s
        self._watch: asyncio.TimerHandle = self._loop.call_at(self._watch_due, self._look)

    def _spawn(self, environment: Mapping[str, str]) -> None:
        with contextlib.ExitStack() as opened:
            ours, theirs = socket.socketpair()
            opened.callback(theirs.close)
            kept = contextlib.ExitStack()
            kept.callback(ours.close)
            opened.push(lambda kind, error, trace: kept.close() if kind is not None else None)
            text_ends: list[socket.socket] = []
            worker_ends: list[int] = []
            for _ in range(LANES):
                end, worker_end = socket.socketpair()
                kept.callback(end.close)
                opened.callback(worker_end.close)
                text_ends.append(end)
                worker_ends.append(worker_end.fileno())
            log_fd, log_end = os.pipe()
            opened.callback(os.close, log_end)
            kept.callback(os.close, log_fd)
            command = [sys.executable, "-P", "-X", "faulthandler", "-m", "shardline.model.worker"]
            areas = [rows.fd for rows in self.areas]
            command += ["--channel", str(theirs.fileno()), "--parent", str(os.getpid())]
            command += ["--rows", *map(str, areas), "--texts", *map(str, worker_ends)]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log_end,
                stderr=log_end,
                pass_fds=(theirs.fileno(), *areas, *worker_ends),
                env=dict(environment),
                start_new_session=True,  # Ctrl-C in the Node's terminal is the Node's
            )
        ours.setblocking(False)
        os.set_blocking(log_fd, False)
        self._channel = ours
        self._log_fd = log_fd
        self.texts = TextLanes(text_ends, self._settings, self._end)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running_step_age_s(self) -> float | None:
        head = self._pending[0] if self._pending else None
        return time.monotonic() - head.started if head is not None and head.batch else None

    def serve(self, description: ShardDescription) -> None:
        """The Shard is loaded. From now on silence is judged: before, imports of large libraries hold the
        interpreter for seconds."""
        self._in_sizes = tuple(t.row_bytes for t in description.layout_in.tensors)
        self._out_sizes = tuple(t.row_bytes for t in description.layout_out.tensors)
        self._last_tick_at = time.monotonic()
        self._serving = True

    # ---- requests ----------------------------------------------------------------------------------------------

    def request(self, request: Request, answered: Answered, failed: Failed, limit: tuple[str, float]) -> None:
        """Send a request; exactly one of the two is called, on the loop. `limit`: name and seconds."""
        self._request(frame(request), _Pending(answered, failed, *limit))

    async def ask(self, request: Request, limit: tuple[str, float]) -> Answer:
        """Send a request and wait. Raises what the worker refused with, or why it was lost."""
        future: asyncio.Future[Answer] = self._loop.create_future()

        def answered(answer: Answer) -> None:
            if future.done():
                return  # the caller gave up waiting
            if isinstance(answer, Refused):
                future.set_exception(answer.fault.error())
            else:
                future.set_result(answer)

        def failed(error: ShardlineError) -> None:
            if not future.done():
                future.set_exception(error)

        self.request(request, answered, failed, limit)
        return await future

    def submit(
        self,
        entries: Sequence[BackendEntry],
        area: int,
        answered: Answered,
        failed: Failed,
        limit: tuple[str, float],
    ) -> tuple[Place, ...]:
        """Put the rows into shared memory and send the batch; returns where the rows out will lie, in `areas[area]`,
        which no batch uses that is not answered. `engine_out_of_memory` where the rows find no room: nothing was sent
        then."""
        shared = self.areas[area]
        counts = tuple([entry.rows for entry in entries])
        inputs, in_bytes = places(counts, self._in_sizes, True)
        outputs, out_bytes = places(counts, self._out_sizes, False)
        shared.grow(in_bytes, out_bytes)
        for entry, place in zip(entries, inputs, strict=True):
            if entry.tokens:
                shared.rows_in(*place.tokens)[:] = memoryview(entry.tokens).cast("B")
            for buffer, at in zip(entry.hidden, place.hidden, strict=True):
                shared.rows_in(*at)[:] = memoryview(buffer).cast("B")
        listed = [(e.slot, e.position, e.rows, e.want_output, not e.tokens) for e in entries]
        batch = Batch(area, listed, shared.in_bytes, shared.out_bytes)
        self._request(frame(batch), _Pending(answered, failed, *limit, batch=True))
        return outputs

    def _request(self, data: bytes, pending: _Pending) -> None:
        self._pending.append(pending)
        if self._ended:
            return  # `bury` tells it why
        if not self._unsent:
            try:
                data = data[self._channel.send(data) :]
            except BlockingIOError:
                pass
            except OSError:
                self._end(None)
                return
            if not data:
                return
            self._loop.add_writer(self._channel.fileno(), self._writable)
        self._unsent += data

    def _writable(self) -> None:
        try:
            del self._unsent[: self._channel.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self._end(None)
            return
        if not self._unsent:
            self._loop.remove_writer(self._channel.fileno())

    # ---- answers -----------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        try:
            count = self._channel.recv_into(self._received)
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            self._end(None)
            return
        try:
            messages = self._reader.feed(self._received[:count])
        except ValueError as error:
            self._end(ShardlineError("engine_lost", f"the engine worker sent what cannot be read: {error}"))
            return
        # The first at once, it is what the Node waits for. What a receiver raises must not swallow the rest.
        for message in messages[1:]:
            self._loop.call_soon(self._take, message)
        if messages:
            self._take(messages[0])

    def _take(self, message: Answer) -> None:
        if isinstance(message, Progress):
            self.on_progress(message.done, message.total)
            return
        if not self._pending:
            self._end(ShardlineError("engine_lost", "the engine worker gave an answer that nobody asked for"))
            return
        pending = self._pending.popleft()
        if self._pending:
            self._pending[0].started = time.monotonic()
        pending.answered(message)

    def _log_readable(self) -> None:
        try:
            data = os.read(self._log_fd, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._log_fd)
        *lines, self._line = (self._line + data).split(b"\n")
        if len(self._line) > _LINE_CHARS or not data:
            lines.append(self._line)
            self._line = b""
        for line in lines:
            text = line.decode(errors="replace").strip()[:_LINE_CHARS]
            if text:
                self._words.append(text)
                log.info("worker_said", pid=self.pid, line=text)

    # ---- the watch ---------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Is it alive, and does the running request keep its limit? Judged only by a loop that was not late itself:
        a Node that was stopped reads what waits first and judges in the next round."""
        now = self._loop.time()
        late = now - self._watch_due > self._settings.late_timer_s
        self._watch_due = now + self._interval_s
        self._watch = self._loop.call_at(self._watch_due, self._look)
        ticks = self.areas[0].ticks
        if ticks != self._last_ticks or late:
            self._last_ticks, self._last_tick_at = ticks, time.monotonic()
        if late:
            return
        silent_s = time.monotonic() - self._last_tick_at
        if self._serving and silent_s > self._settings.worker_silent_s:
            self._end(ShardlineError("engine_lost", f"the engine worker showed no life for {silent_s:.1f} s"))
        elif self._pending and time.monotonic() - self._pending[0].started > self._pending[0].limit_s:
            self._end(over_limit(self._pending[0].limit, self._pending[0].limit_s))
        elif hung := self.texts.hung(time.monotonic()):
            self._end(hung)

    @property
    def fresh(self) -> bool:
        """Whether it runs and showed life lately."""
        silent_s = time.monotonic() - self._last_tick_at
        return not self._ended and silent_s <= self._settings.worker_silent_s + self._interval_s

    def discard(self, why: ShardlineError) -> None:
        """The owner found it of no use."""
        self._end(why)

    def _end(self, why: ShardlineError | None) -> None:
        """The worker is of no more use. None: it ended by itself, and how it ended says why."""
        if self._ended:
            return
        self._ended = True
        self._why = why
        self._watch.cancel()
        self._loop.remove_reader(self._channel.fileno())
        self._loop.remove_writer(self._channel.fileno())
        self.on_ended()

    async def bury(self) -> ShardlineError:
        """Kill and reap the process and free everything; returns why it was lost."""
        if self._why is not None:
            self._kill()
        status = await self._reap(_REAP_S if self._why is not None else 0.2)
        if status is None:
            self._kill()
            status = await self._reap(_REAP_S)
        error = self._why if self._why is not None else self._how_it_ended(status)
        self._free()
        return error

    def fail_pending(self, error: ShardlineError) -> None:
        """Tell all that wait; batches are told by their `failed` like the rest."""
        while self._pending:
            self._pending.popleft().failed(error)
        self.texts.fail(error)

    def _kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()

    async def _reap(self, within_s: float) -> int | None:
        deadline = time.monotonic() + within_s
        pause_s = 0.0005
        while (status := self._process.poll()) is None and time.monotonic() < deadline:
            await asyncio.sleep(pause_s)
            pause_s = min(0.02, pause_s * 2)
        return status

    def _how_it_ended(self, status: int | None) -> ShardlineError:
        self._log_readable()
        words = last_words(self._words)
        said = f"; it said: {words}" if words else ""
        if status is None:
            return ShardlineError("engine_lost", f"the engine worker closed its socket and does not end{said}")
        if status >= 0:
            return ShardlineError("engine_lost", f"the engine worker ended with exit code {status}{said}", exit=status)
        name = signal.Signals(-status).name if -status in signal.valid_signals() else str(-status)
        hint = " (the kernel does this when memory ends)" if name == "SIGKILL" else ""
        return ShardlineError("engine_lost", f"the engine worker was ended by {name}{hint}{said}", signal=name)

    def _free(self) -> None:
        if self._freed:
            return
        self._freed = True
        self._watch.cancel()
        self._loop.remove_reader(self._channel.fileno())
        self._loop.remove_writer(self._channel.fileno())
        self._loop.remove_reader(self._log_fd)
        self._channel.close()
        self.texts.close()
        os.close(self._log_fd)
        for rows in self.areas:
            rows.close()

    async def stop(self, error: ShardlineError) -> None:
        """End the worker in good order where it is idle, by force where it is not; what waits fails with `error`."""
        if not self._ended:
            idle = not self._pending
            self._ended = True
            self._watch.cancel()
            self._loop.remove_reader(self._channel.fileno())
            if idle:
                with contextlib.suppress(OSError):
                    self._channel.send(frame(Stop()))
                await self._reap(self._settings.worker_stop_s)
        self._kill()
        await self._reap(_REAP_S)
        self._free()
        self.fail_pending(error)


def _not_started(error: OSError) -> ShardlineError:
    """No memory, no file descriptor, no process: the system says no, and may say yes later."""
    return ShardlineError("engine_lost", f"no worker process can be started: {error.strerror}")
