"""What a split costs on this machine before anything of ours: a model in two processes with a socket pair between them.

`python -m bench.floor MODEL.gguf`. The same Shard files and engine as a route of two Nodes, one thread each, no server,
no protocol, no Gateway; against the unsplit model in one process, turn by turn. No route can be faster than that.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from bench.figures import table
from shardline.artifact.identity import content_id
from shardline.artifact.shard_files import ShardFiles
from shardline.cli.engine_choice import shared_out
from shardline.formats.gguf_files import read_model
from shardline.model.backend import BackendEntry, ShardSpec
from shardline.model.llama_backend import LlamaBackend
from shardline.model.llama_shard import load
from shardline.model.llama_unsplit import Unsplit

KV_TOKENS = 2048
PROMPT = list(range(1, 9))
PLACES: dict[str, tuple[int, int] | None] = {
    "where the system puts them": None,
    "on one core": (0, 0),
    "on two cores": (0, 1),
}
"""Of the cores that this process may use."""
_MESSAGE = 1 << 20


class Part:
    """One Shard of one session."""

    def __init__(self, model: Path, file: Path, content: str, first: int, last: int) -> None:
        options = {"shard_file": str(file), "content_id": content, "kv_tokens": KV_TOKENS}
        self._backend: LlamaBackend = load(ShardSpec(str(model), first, last, threads=1, options=options))
        self._backend.open(0)

    def step(self, token: int, position: int, rows: bytes | None) -> bytes:
        """The residual, or of the tail the likeliest token as int32. Position 0 begins anew."""
        if position == 0:
            self._backend.close(0)
            self._backend.open(0)
        hidden = () if rows is None else (rows,)
        (output,) = self._backend.run([BackendEntry(0, position, 1, token.to_bytes(4, "little"), hidden, True)])
        if isinstance(output, Exception):
            raise output
        if len(output.hidden) > 1:
            raise SystemExit("several tensors cross the Seams of this model: only one is measured here")
        if output.logits is None:
            return bytes(output.hidden[0])
        return int(np.asarray(output.logits).argmax()).to_bytes(4, "little")


class Tail:
    """The second part, in a process of its own."""

    def __init__(self, arguments: list[str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "bench.floor", "--tail", str(theirs.fileno()), *arguments]
        self.process = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
        theirs.close()
        self._answer()

    def step(self, token: int, position: int, rows: bytes) -> int:
        self._socket.send(token.to_bytes(4, "little") + position.to_bytes(4, "little") + rows)
        return int.from_bytes(self._answer(), "little")

    def _answer(self) -> bytes:
        data = self._socket.recv(_MESSAGE)
        if not data:
            raise SystemExit("the second process has ended; what it said stands above")
        return data

    def close(self) -> None:
        self._socket.close()
        self.process.wait(30)


def serve(descriptor: int, part: Part) -> None:
    with socket.socket(fileno=descriptor) as channel:
        channel.send(b"ready")
        while data := channel.recv(_MESSAGE):
            token, position = (int.from_bytes(data[at : at + 4], "little") for at in (0, 4))
            channel.send(part.step(token, position, data[8:]))


def split_ms(head: Part, tail: Tail, tokens: int) -> float:
    """Milliseconds a step."""
    token, started = PROMPT[0], 0.0
    for position in range(len(PROMPT) + tokens):
        if position == len(PROMPT):
            started = time.perf_counter()
        found = tail.step(token, position, head.step(token, position, None))
        token = PROMPT[position + 1] if position + 1 < len(PROMPT) else found
    return 1e3 * (time.perf_counter() - started) / tokens


def unsplit_ms(model: Unsplit, tokens: int) -> float:
    rates = model.generate([PROMPT], tokens + 1)
    return 1e3 * rates.decode_s / rates.steps


def measure(model: Path, rounds: int, tokens: int) -> str:
    """A table: the two processes at each place against the unsplit model next to them."""
    read = read_model(model)
    with tempfile.TemporaryDirectory(prefix="shardline-floor-") as name, ExitStack() as stack:
        content = content_id(model, cache_dir=Path(name))
        (first, cut), (_, last) = shared_out(model, "llama", 2)
        files = ShardFiles(Path(name))
        halves = [files.shard(read, content, *layers) for layers in ((first, cut), (cut, last))]
        tail = Tail([str(model), str(halves[1]), content, str(cut), str(last)])
        stack.callback(tail.close)
        head = Part(model, halves[0], content, first, cut)
        whole = Unsplit(model, threads=1, sequences=1, kv_tokens=KV_TOKENS)
        stack.callback(whole.close)
        everywhere = os.sched_getaffinity(0)
        usable = sorted(everywhere)
        found: dict[str, list[tuple[float, float]]] = {place: [] for place in PLACES}
        for number in range(rounds + 1):
            for place, cores in PLACES.items():
                plain = unsplit_ms(whole, tokens)
                ours, theirs = [{usable[core]} for core in cores] if cores else (everywhere, everywhere)
                os.sched_setaffinity(0, ours)
                os.sched_setaffinity(tail.process.pid, theirs)
                taken = split_ms(head, tail, tokens)
                os.sched_setaffinity(0, everywhere)
                if number:  # The first round warms everything up.
                    found[place].append((taken, plain))
    rows = []
    for place, pairs in found.items():
        ratios = sorted(plain / taken for taken, plain in pairs)
        middle = [f"{statistics.median(values):.2f}" for values in zip(*pairs, strict=True)]
        rows.append((place, *middle, f"{statistics.median(ratios):.3f} ({ratios[0]:.2f}–{ratios[-1]:.2f})"))
    return f"layers {first}:{cut} and {cut}:{last}\n\n" + table(
        ("two processes", "ms a step", "unsplit", "ratio"), rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.floor", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("part", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--tail", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.tail is not None:
        file, content, first, last = given.part
        serve(given.tail, Part(given.model, Path(file), content, int(first), int(last)))
        return
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("this needs two cores")
    print(measure(given.model, given.rounds, given.tokens))


if __name__ == "__main__":
    main()
