"""The artifact plane: hashing, fetching over loopback, headers with large vocabularies, Shard files; each against the
plain program that does the nearest thing (sha256sum, curl, head), of the same file, by turns.

Fetching is between two processes as Nodes are (`bench.piece_party`), and includes all that makes a piece held: every
piece hashed, written, read back, synced. What stands against it takes the same bytes from the same process, and does
none of that. A way to fetch over HTTP is one entry of `ways`; BitTorrent is `bench.torrent`'s, where it is installed.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil

from bench import torrent
from bench.figures import median, table
from bench.piece_party import CREDENTIAL, FETCHER, SEEDER, write_keys
from bench.random_model import Shape, write_random_model
from shardline.artifact.creation import Description, create_bundle
from shardline.artifact.hashing import hash_once
from shardline.artifact.shard_files import ShardFiles
from shardline.artifact.torrent import piece_length_for
from shardline.formats.gguf import Array, parse_header
from shardline.formats.gguf_files import read_model
from shardline.formats.gguf_writer import Stored, array_of, encode_header, text
from shardline.formats.shard_gguf import plan_shard
from shardline.settings import PROTOCOL

SHAPE = Shape(layers=14)
"""About 400 MB."""
SHARD = (2, 10)
TOKENS = 150_000
_END_S = 30.0
_CONTENT_ID = "mac1-" + "0" * 64


@dataclass(frozen=True, slots=True)
class Way:
    """One way for pieces to travel, and what it is held against."""

    name: str
    scheme: str
    curl: tuple[str, ...] = ()
    """Options by which curl may have the same."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What some work took. CPU-seconds of the process that does it, and of the one that gives."""

    nbytes: int
    seconds: float
    cpu_s: float
    giver_cpu_s: float = 0.0

    @property
    def mb_per_s(self) -> float:
        return self.nbytes / self.seconds / 1e6


def ways(folder: Path) -> tuple[Way, ...]:
    keys = folder / "keys"
    certificate = ("-k", "--cert", str(keys / f"{FETCHER}.crt"), "--key", str(keys / f"{FETCHER}.key"))
    return Way("HTTP", "http"), Way("HTTPS, both ends with keys", "https", certificate)


class Stand:
    """The model, its bundle, keys, and the process that gives, in `folder`; close it by leaving the context."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        folder.mkdir()
        self.folder = folder
        self.model = write_random_model(folder / "model.gguf", shape)
        self.size = self.model.stat().st_size
        create_bundle(self.model, folder / "bundle", Description(created="2026-01-31T12:00:00Z"))
        write_keys(folder / "keys")
        self.shard_bytes = plan_shard(read_model(self.model), *SHARD, content_id=_CONTENT_ID).nbytes
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.piece_party", "seed", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("nobody gives: run `python -m bench.piece_party seed FOLDER` to see why")
        self.told: dict[str, str] = json.loads(line)
        self._giver = psutil.Process(self._process.pid)

    def __enter__(self) -> Stand:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(_END_S)
        self._process.stdout.close()

    def systems(self) -> dict[str, Callable[[], Taken]]:
        """What is measured, in the order of a round."""
        found: dict[str, Callable[[], Taken]] = {
            "sha256sum": lambda: _ran(["sha256sum", str(self.model)], self.size)[0],
            "SHA-256 and tree": lambda: _own(self._hash),
            "head, sync": self._copy,
            "Shard file": lambda: _own(self._shard),
        }
        for way in ways(self.folder):
            found[f"curl, {way.name}"] = partial(self._given, partial(self._curl, way))
            found[f"fetch, {way.name}"] = partial(self._given, partial(self._fetch, way))
        if torrent.why_not() is None:
            found["fetch, BitTorrent"] = partial(self._torrent, tls=False)
            found["fetch, BitTorrent with keys"] = partial(self._torrent, tls=True)
        return found

    def _torrent(self, *, tls: bool) -> Taken:
        fetched = torrent.measure(self.folder, tls=tls)
        return Taken(fetched.nbytes, fetched.seconds, fetched.cpu_s)

    def _given(self, work: Callable[[], Taken]) -> Taken:
        before = self._giver.cpu_times()
        taken = work()
        after = self._giver.cpu_times()
        return replace(taken, giver_cpu_s=after.user + after.system - before.user - before.system)

    def _hash(self) -> int:
        return hash_once(self.model, piece_length_for(self.size), lambda done: None).tree.size

    def _shard(self) -> int:
        folder = self.folder / "shards"
        path = ShardFiles(folder).shard(read_model(self.model), _CONTENT_ID, *SHARD)
        size = path.stat().st_size
        shutil.rmtree(folder)
        return size

    def _copy(self) -> Taken:
        """As many bytes as the Shard file has, written plainly and synced."""
        target = self.folder / "copied"
        script = 'head -c "$1" "$2" > "$3" && sync "$3"'
        command = ["sh", "-c", script, "sh", str(self.shard_bytes), str(self.model), str(target)]
        taken, _ = _ran(command, self.shard_bytes)
        target.unlink()
        return taken

    def _curl(self, way: Way) -> Taken:
        target = self.folder / "curled"
        target.unlink(missing_ok=True)
        url = self.told[way.scheme].replace(f"{SEEDER}@", "") + self.told["path"]
        fields = (f"authorization: Bearer {CREDENTIAL}", f"shardline-protocol: {PROTOCOL}", "range: bytes=0-")
        headers = [word for field in fields for word in ("-H", field)]
        command = ["curl", "-sf", "-o", str(target), "-w", "%{time_total}", *headers, *way.curl, url]
        taken, seconds = _ran(command, self.size)
        if target.stat().st_size != self.size:
            raise SystemExit(f"curl got {target.stat().st_size} of {self.size} bytes")
        # Without the start of the program, as for a fetch.
        return replace(taken, seconds=float(seconds))

    def _fetch(self, way: Way) -> Taken:
        command = [sys.executable, "-m", "bench.piece_party", "fetch", str(self.folder), self.told[way.scheme]]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        found = json.loads(done.stdout)
        return Taken(found["nbytes"], found["seconds"], found["cpu_s"])


def measure(folder: Path, rounds: int, shape: Shape = SHAPE) -> dict[str, list[Taken]]:
    """What each system took, by round; the first round, which warms everything up, is not in it."""
    found: dict[str, list[Taken]] = {}
    with Stand(folder, shape) as stand:
        for number in range(rounds + 1):
            for name, system in stand.systems().items():
                # What an earlier one has left to write must not be counted for this one.
                os.sync()
                taken = system()
                if number:
                    found.setdefault(name, []).append(taken)
            print(f"  round {number} of {rounds}" + ("" if number else " (warm-up)"), flush=True)
    return found


def _ran(command: list[str], nbytes: int) -> tuple[Taken, bytes]:
    """A program of its own, and what it wrote to stdout."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    written = process.stdout.read()
    process.stdout.close()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command[0]} ended with code {process.returncode}")
    return Taken(nbytes, time.perf_counter() - began, usage.ru_utime + usage.ru_stime), written


def _own(work: Callable[[], int]) -> Taken:
    """Work of this process, which says how many bytes it was."""
    began, cpu = time.perf_counter(), time.process_time()
    nbytes = work()
    return Taken(nbytes, time.perf_counter() - began, time.process_time() - cpu)


def header_seconds(rounds: int) -> float:
    """Median of reading a header with a vocabulary of `TOKENS` tokens and as many merges."""
    words = [f"t{number:x}".encode() for number in range(TOKENS)]
    merges = [b"%b %b" % (word[: len(word) // 2], word[len(word) // 2 :]) for word in words]
    keys = {
        "general.architecture": text("llama"),
        "tokenizer.ggml.model": text("gpt2"),
        "tokenizer.ggml.tokens": _strings(words),
        "tokenizer.ggml.merges": _strings(merges),
        "tokenizer.ggml.scores": array_of("f32", [0.0] * TOKENS),
        "tokenizer.ggml.token_type": array_of("i32", [1] * TOKENS),
    }
    raw = encode_header(keys, [])
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        parse_header(raw, len(raw))
        times.append(time.perf_counter() - began)
    return median(times)


def _strings(values: list[bytes]) -> Stored:
    return Stored("array", Array("string", len(values), b"".join(struct.pack("<Q", len(v)) + v for v in values)))


AGAINST = {
    "SHA-256 and tree": "sha256sum",
    "Shard file": "head, sync",
    "fetch, HTTP": "curl, HTTP",
    "fetch, HTTPS, both ends with keys": "curl, HTTPS, both ends with keys",
    "fetch, BitTorrent": "curl, HTTP",
    "fetch, BitTorrent with keys": "curl, HTTPS, both ends with keys",
}


def report(found: dict[str, list[Taken]], header_s: float) -> str:
    """One line a system: rate, CPU-seconds per GB, and the ratio to what it is held against, round by round."""
    rows = []
    for name, rounds in found.items():
        against = found.get(AGAINST.get(name, ""), [])
        ratios = [taken.mb_per_s / other.mb_per_s for taken, other in zip(rounds, against, strict=False)]
        giga = [taken.nbytes / 1e9 for taken in rounds]
        rows.append(
            (
                name,
                f"{median([taken.mb_per_s for taken in rounds]):.0f}",
                f"{median([taken.cpu_s / gb for taken, gb in zip(rounds, giga, strict=True)]):.2f}",
                f"{median([taken.giver_cpu_s / gb for taken, gb in zip(rounds, giga, strict=True)]):.2f}",
                f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})" if ratios else "-",
            )
        )
    lines = table(("system", "MB/s", "CPU-s/GB", "of the giver", "of the plain one"), rows)
    lacks = torrent.why_not()
    without = f"\nBitTorrent was not measured: {lacks}" if lacks else ""
    return f"{lines}{without}\nHeader with {TOKENS} tokens and as many merges: {header_s:.3f} s"
