"""`make fuzz SECONDS=60`: what strangers send, into every reader that meets it first, led by coverage (atheris).

A reader may refuse with a `ShardlineError`, or read; whatever else it raises ends the run, and the input is kept in the
folder that the run names. Time and memory of one input are bounded, too. Each target runs in a process of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from shardline.errors import ShardlineError

if TYPE_CHECKING:
    from shardline.wire.steps import SeamLayout

Target = Callable[[bytes], object]

TARGETS = ("gguf", "safetensors", "bencode", "manifest", "signature", "steps")
LONGEST = 64 << 10
"""Bytes of one input."""
INPUT_S = 5
MEMORY_MIB = 1024


@cache
def layout() -> SeamLayout:
    """Of the step documents."""
    from shardline.wire.steps import LayoutTensor, SeamLayout

    return SeamLayout((LayoutTensor("hidden", "F32", (4,)),))


def target_of(name: str) -> Target:
    """The reader of `name`, as those call it that have bytes of strangers."""
    from shardline.artifact import signing
    from shardline.formats import bencode, gguf, safetensors
    from shardline.wire import manifest, steps

    if name == "gguf":
        return lambda data: gguf.parse_header(data, len(data))
    if name == "safetensors":
        return lambda data: safetensors.parse_header(data, len(data))
    if name == "bencode":
        return bencode.decode
    if name == "manifest":
        return manifest.decode_manifest
    if name == "signature":
        keys = [signing.new_key().public_key()]
        return lambda data: signing.verify(data, keys)
    return lambda data: steps.decode(data, layout())


def seeds(name: str, folder: Path, corpus: Path) -> None:
    """Something to begin with that is read, or nearly: what a publisher makes of a small model."""
    from shardline.artifact.creation import Description, create_bundle
    from shardline.wire import steps
    from tests.support.artifacts import publisher, safetensors_folder, split_gguf

    corpus.mkdir(parents=True)
    models = folder / "models"
    models.mkdir()
    parts, weights = split_gguf(models), safetensors_folder(models / "safetensors")
    bundle = folder / "bundle"
    create_bundle(weights, bundle, Description(created="2026-01-31T12:00:00Z"), key=publisher())
    entry = steps.Entry(key=bytes(16), seq=0, position=0, rows=1, hop=1, lane=0, flags=0)
    step = steps.Step(entry, bytes(4), (bytes(16),))
    found = {
        "gguf": [path.read_bytes()[:LONGEST] for path in parts],
        "safetensors": [path.read_bytes()[:LONGEST] for path in sorted(weights.glob("*.safetensors"))],
        "bencode": [(bundle / "model.torrent").read_bytes()],
        "manifest": [(bundle / "manifest.json").read_bytes()],
        "signature": [(bundle / "artifact.sig").read_bytes()],
        "steps": [b"".join(steps.encode([step], layout()))],
    }
    for number, seed in enumerate(found[name]):
        (corpus / f"seed-{number}").write_bytes(seed)


def hunt(name: str, seconds: int, folder: Path) -> None:
    """In this process, until it ends it: libFuzzer does not return."""
    import atheris

    with atheris.instrument_imports(include=["shardline"]):
        read = target_of(name)

    def once(data: bytes) -> None:
        try:
            read(data)
        except ShardlineError:
            return

    corpus = folder / "seen"
    seeds(name, folder, corpus)
    limits = [f"-max_total_time={seconds}", f"-timeout={INPUT_S}", f"-rss_limit_mb={MEMORY_MIB}", f"-max_len={LONGEST}"]
    atheris.Setup(
        [name, str(corpus), f"-artifact_prefix={folder}/", "-print_final_stats=1", "-verbosity=0", *limits], once
    )
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="of each target")
    parser.add_argument("--target", choices=TARGETS, action="append", help="repeatable [default: all]")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    names = given.target or TARGETS
    if given.here is not None:
        hunt(names[0], given.seconds, given.here)
        return
    failed = []
    for name in names:
        folder = Path(tempfile.mkdtemp(prefix=f"shardline-fuzz-{name}-"))
        print(f"== {name}: {given.seconds} s", flush=True)
        command = [sys.executable, "-m", "tests.fuzz", "--target", name, "--seconds", str(given.seconds)]
        if subprocess.run([*command, "--here", str(folder)], check=False).returncode:
            failed.append(f"{name}: the input is in {folder}")
    print("\n".join(failed) or "no reader raised anything but its own refusals")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
