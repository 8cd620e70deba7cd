"""What `shardline doctor` looks at on this machine: a function for each question, from facts to a finding with its fix.

Owns the questions and the bounds. It starts nothing, sends no secret, and leaves nothing behind but a probe file that
it takes back. Engines are loaded in processes of their own: one that crashes is a finding, not an end.
Shown by tests/cli/test_machine_checks.py.
"""

from __future__ import annotations

import email.utils
import http.client
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardline.cli.recognition import unproved_connection
from shardline.cli.running import RunningCluster
from shardline.errors import ShardlineError
from shardline.transport.addresses import is_loopback, reachable_address, split_url

State = Literal["ok", "note", "failed"]
LEAST_PYTHON, NO_BITTORRENT = (3, 11), (3, 14)
LEAST_MEMORY = 1 << 30
"""Bytes: below it not even the small model of the demo and its processes have room."""
FEW_FILES, MANY_FILES = 1024, 4096
"""Each session of a Node is a connection; below the first number a Gateway refuses before its queue is full."""
CLOCK_S = 60.0
"""By so much clocks of two machines of a cluster may differ."""
LOAD_S = 120.0
"""Importing an engine, from a cold disk."""
_ENGINES = {
    "llama": "from shardline.model.llama_library import library; print(library().build)",
    "torch": "import torch, transformers, safetensors, tokenizers, gguf;"
    " print(f'torch {torch.__version__}, transformers {transformers.__version__}')",
    "bt": "import libtorrent; print(f'libtorrent {libtorrent.version}')",
}
"""Extra -> program that loads what it installs, and prints what that is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One answer. `note`: fine as it is, and something cannot be done here. `fix`: what to do, of all but `ok`."""

    name: str
    state: State
    what: str
    fix: str = ""


def python_finding(version: Sequence[int], bits: int) -> Finding:
    """`version`: major, minor, micro of this Python."""
    text = f"Python {'.'.join(map(str, version[:3]))}, {bits} bit"
    if tuple(version[:2]) < LEAST_PYTHON or bits < 64:
        return Finding(name="python", state="failed", what=text, fix="Install a 64 bit Python from 3.11 on.")
    return Finding(name="python", state="ok", what=text)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What came of loading an extra: its versions, or why not. `absent`: it was never installed."""

    text: str
    works: bool
    absent: bool = False


def loaded(extra: str, environ: dict[str, str]) -> Loaded:
    """Load what an extra installs, in a process that may crash or hang."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ENGINES[extra]],
            env=environ,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=LOAD_S,
        )
    except subprocess.TimeoutExpired:
        return Loaded(f"not loaded within {LOAD_S:.0f} s", works=False)
    if done.returncode == 0:
        return Loaded(done.stdout.strip().splitlines()[-1], works=True)
    said = [line for line in done.stderr.splitlines() if line.strip()]
    last = said[-1].rpartition("Error: ")[2][:300] if said else f"the process ended with {done.returncode}"
    return Loaded(last, works=False, absent="No module named" in last or "is not installed" in last)


def engine_findings(llama: Loaded, torch: Loaded) -> list[Finding]:
    """One of the two is enough; one that is installed and does not load is a fault all the same."""
    either = llama.works or torch.works
    found = []
    for name, extra, it in (("llama.cpp", "llama", llama), ("PyTorch", "torch", torch)):
        if it.works:
            found.append(Finding(name=name, state="ok", what=it.text))
        elif it.absent:
            state: State = "note" if either else "failed"
            found.append(Finding(name=name, state=state, what="not installed", fix=_install(extra)))
        else:
            found.append(Finding(name=name, state="failed", what=f"it does not load: {it.text}", fix=_install(extra)))
    return found


def bittorrent_finding(it: Loaded, version: Sequence[int]) -> Finding:
    """Without it, pieces come over HTTP."""
    if it.works:
        return Finding(name="BitTorrent", state="ok", what=it.text)
    if it.absent:
        what = "not installed: pieces of models come over HTTP alone"
        newer = tuple(version[:2]) >= NO_BITTORRENT
        fix = "There is no libtorrent for this Python yet: use 3.11 to 3.13." if newer else _install("bt")
        return Finding(name="BitTorrent", state="note", what=what, fix=fix)
    return Finding(name="BitTorrent", state="failed", what=f"it does not load: {it.text}", fix=_install("bt"))


def _install(extra: str) -> str:
    """For this Python, and from the clone that this runs from, where it runs from one."""
    clone = Path(__file__).resolve().parents[3]
    if (clone / "pyproject.toml").is_file():
        return shlex.join((sys.executable, "-m", "pip", "install", "-e", f"{clone}[{extra}]"))
    return f"In a clone of Shardline: {shlex.join((sys.executable, '-m', 'pip', 'install', f'.[{extra}]'))}"


def memory_finding(available: int, total: int, container: int | None) -> Finding:
    """Bytes. `container`: what the container of this process may use, if there is a limit."""
    room = available if container is None else min(available, container)
    limit = "" if container is None else f", and this container may use {_size(container)}"
    what = f"{_size(available)} of {_size(total)} free{limit}"
    if room < LEAST_MEMORY:
        return Finding(
            name="memory", state="failed", what=what, fix=f"End other programs: a Node needs {_size(LEAST_MEMORY)}."
        )
    if container is not None and container < available:
        fix = f"Give Nodes --memory below {_size(container)}: the machine shows more than the container may use."
        return Finding(name="memory", state="note", what=what, fix=fix)
    return Finding(name="memory", state="ok", what=what)


def container_limit(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process's container may use; None: no limit, or none that can be seen."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (root / name).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        return int(text) if text.isdigit() and int(text) < 1 << 60 else None
    return None


def disk_finding(folder: Path, free: int, reserve: int) -> Finding:
    """Of the disk of the state folder, in bytes; `reserve` of it stay free whatever is fetched."""
    what = f"{_size(free)} free at {folder}"
    if free <= reserve:
        fix = "Free space there, or use another folder: shardline --state-dir FOLDER …"
        return Finding(name="disk", state="failed", what=f"{what}; {_size(reserve)} stay reserved", fix=fix)
    return Finding(name="disk", state="ok", what=what)


def nearest_folder(path: Path) -> Path:
    """`path`, or what is there of the way to it: looking makes no folder."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())


def writing_finding(folder: Path) -> Finding:
    """Whether files can be made in the state folder, or the folder itself where it is not there yet."""
    there = nearest_folder(folder)
    try:
        with tempfile.TemporaryFile(dir=there, prefix=".doctor-") as probe:
            probe.write(b"\0")
            probe.flush()
    except OSError as error:
        return Finding(
            name="state folder",
            state="failed",
            what=f"{there} cannot be written: {error.strerror or error}",
            fix=f"Make {there} a folder that you may write to, or use another: shardline --state-dir FOLDER …",
        )
    return Finding(name="state folder", state="ok", what=f"{folder} can be written")


def port_finding(port: int, flag: str, clusters: Sequence[RunningCluster], *, joined: bool = False) -> Finding:
    """One that a cluster of this machine has is taken as it should be. `joined`: Nodes of this machine belong to the
    cluster of another one, so that no cluster need be started here."""
    from shardline.cli.port import check_port

    name = f"port {port}"
    holder = next((c for c in clusters if port in (split_url(c.gateway).port, split_url(c.tracker).port)), None)
    if holder is not None:
        return Finding(name=name, state="ok", what=f"held by {holder}")
    try:
        check_port("127.0.0.1", port, flag, clusters)
    except ShardlineError as error:
        if joined:
            fix = f"Nothing, for the Nodes of this machine: they need it not. For a cluster of its own: {error.advice}"
            return Finding(name=name, state="note", what=error.message, fix=fix)
        return Finding(name=name, state="failed", what=error.message, fix=error.advice)
    return Finding(name=name, state="ok", what="free")


def address_finding(address: str) -> Finding:
    """`address`: by which this machine goes out."""
    if is_loopback(address):
        return Finding(
            name="address",
            state="note",
            what="this machine has none that others could reach",
            fix="Connect it to a network before other machines join; clusters of this machine alone work.",
        )
    return Finding(name="address", state="ok", what=f"others would see {address}")


def own_address() -> str:
    """By which others would see this machine."""
    return reachable_address("0.0.0.0")


def clock_finding(url: str, date: str | None, now: float) -> Finding:
    """`date`: the Tracker's, as its answer's head names it; None: none answers. `now`: Unix seconds."""
    if date is None:
        return Finding(name="clock", state="ok", what="no Tracker runs to compare it with")
    try:
        theirs = email.utils.parsedate_to_datetime(date).timestamp()
    except ValueError:
        fix = "Run the same version of Shardline on both sides."
        return Finding(name="clock", state="note", what=f"the Tracker at {url} names no time", fix=fix)
    apart = now - theirs
    what = f"{abs(apart):.0f} s {'ahead of' if apart > 0 else 'behind'} that of the Tracker at {url}"
    if abs(apart) > CLOCK_S:
        fix = "Set the clock of this machine or of that one (timedatectl set-ntp true)."
        return Finding(name="clock", state="failed", what=what, fix=fix)
    # A whole second is the finest that is told.
    return Finding(name="clock", state="ok", what=f"like that of the Tracker at {url}" if abs(apart) < 2 else what)


def clock_findings(own: str, joined: Sequence[str], now: Callable[[], float]) -> list[Finding]:
    """Against the Tracker that runs at `own`; where none does, against each that was `joined` from here."""
    date = tracker_date(own)
    if date is not None or not joined:
        return [clock_finding(own, date, now())]
    found = []
    for url in joined:
        date = tracker_date(url)
        if date is None:
            what = f"the Tracker at {url}, whose cluster was joined from here, does not answer"
            fix = "Look whether it runs, and whether this machine reaches that address: nothing was compared."
            found.append(Finding(name="clock", state="note", what=what, fix=fix))
        else:
            found.append(clock_finding(url, date, now()))
    return found


def tracker_date(url: str) -> str | None:
    """The Date of the Tracker's `/healthz`; empty where something answers and names none. Nothing secret is sent."""
    try:
        with unproved_connection(url) as connection:
            connection.request("GET", "/healthz")
            return connection.getresponse().getheader("date") or ""
    except (OSError, http.client.HTTPException):
        return None


def files_finding(soft: int, hard: int) -> Finding:
    """Limits of open files of this user; a process raises its own to the hard one."""
    most = MANY_FILES if resource.RLIM_INFINITY in (soft, hard) else max(soft, hard)
    what = f"at most {'any number' if hard == resource.RLIM_INFINITY else hard}"
    fix = (
        "Raise the limit: ulimit -Hn 65536, LimitNOFILE=65536 in a systemd unit, --ulimit nofile=65536 of a container."
    )
    state: State = "failed" if most < FEW_FILES else "note" if most < MANY_FILES else "ok"
    return Finding(name="open files", state=state, what=what, fix="" if state == "ok" else fix)


def all_findings(
    state_dir: Path,
    *,
    reserve: int,
    clusters: Sequence[RunningCluster],
    tracker: str,
    joined: Sequence[str],
    environ: dict[str, str],
) -> list[Finding]:
    """Ask everything. Takes as long as the slowest engine needs to load. `tracker`: of a cluster of this machine;
    `joined`: those of others, which something of this machine has joined."""
    import shutil
    from concurrent.futures import ThreadPoolExecutor

    import psutil

    version, bits = sys.version_info[:3], 64 if sys.maxsize > 1 << 32 else 32
    with ThreadPoolExecutor(len(_ENGINES)) as loading:
        engines = {extra: loading.submit(loaded, extra, environ) for extra in _ENGINES}
        memory = psutil.virtual_memory()
        quick = [
            memory_finding(memory.available, memory.total, container_limit()),
            disk_finding(state_dir, shutil.disk_usage(nearest_folder(state_dir)).free, reserve),
            writing_finding(state_dir),
            port_finding(8080, "--port", clusters, joined=bool(joined)),
            port_finding(7070, "--tracker-port", clusters, joined=bool(joined)),
            address_finding(own_address()),
            *clock_findings(tracker, joined, time.time),
            files_finding(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        ]
        llama, torch, torrent = (engines[extra].result() for extra in ("llama", "torch", "bt"))
    engine = engine_findings(llama, torch)
    return [python_finding(version, bits), *engine, bittorrent_finding(torrent, version), *quick]


def _size(count: int) -> str:
    from shardline.cli.listings import size

    return size(count)
