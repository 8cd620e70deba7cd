"""Machines with addresses of their own: network namespaces on one bridge (iproute2), and links between them to cut.

Each host has `eth0` with 10.77.0.N/24 and nothing else that leads anywhere. Needs root and a kernel that lets it;
`why_not()` says what is missing. A cut link is silent, as a pulled cable: frames go to a station that is not there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import threading
from types import TracebackType

_CLONE_NEWNET = 0x40000000
_NOBODY = "02:00:00:00:00:ff"
_NET = "10.77.0"


def why_not() -> str | None:
    """Why there can be no namespaces here; None where there can."""
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    name = f"sl{os.getpid()}probe"
    made = _ip("netns", "add", name, check=False)
    if made.returncode:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    try:
        for words in (("netns", "exec", name, "true"), ("-n", name, "link", "add", "b0", "type", "bridge")):
            tried = _ip(*words, check=False)
            if tried.returncode:
                return f"network namespaces cannot be used here: {tried.stderr.strip()}"
    finally:
        _ip("netns", "del", name, check=False)
    return None


def _ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=10)
    if check and done.returncode:
        raise AssertionError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done


class Host:
    """One machine."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.namespace = f"sl{os.getpid()}h{number}"
        self.address = f"{_NET}.{number}"

    @property
    def prefix(self) -> tuple[str, ...]:
        """Words in front of a command that is to run on this machine."""
        return ("ip", "netns", "exec", self.namespace)

    def ip(self, *words: str) -> str:
        return _ip("-n", self.namespace, *words).stdout

    def cut(self, other: Host) -> None:
        """No frame passes between the two any more, in either direction; all other links stay."""
        for here, there in ((self, other), (other, self)):
            here.ip("neigh", "replace", there.address, "lladdr", _NOBODY, "dev", "eth0", "nud", "permanent")

    def mend(self, other: Host) -> None:
        for here, there in ((self, other), (other, self)):
            here.ip("neigh", "del", there.address, "dev", "eth0")

    def down(self) -> None:
        """The interface is switched off."""
        self.ip("link", "set", "eth0", "down")

    def up(self) -> None:
        self.ip("link", "set", "eth0", "up")


class Network:
    """`with Network(3) as net`: `net.hosts[0]` is 10.77.0.1, and so on."""

    def __init__(self, count: int) -> None:
        self._hub = f"sl{os.getpid()}hub"
        self.hosts = [Host(number + 1) for number in range(count)]
        self._doors: list[Door] = []

    def __enter__(self) -> Network:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for door in self._doors:
            door.close()
        self._remove()

    def _make(self) -> None:
        _ip("netns", "add", self._hub)
        _ip("-n", self._hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._hub, "link", "set", "bridge", "up")
        for host in self.hosts:
            port = f"port{host.number}"
            _ip("netns", "add", host.namespace)
            _ip("-n", self._hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            _ip("-n", self._hub, "link", "set", port, "master", "bridge", "up")
            host.ip("address", "add", f"{host.address}/24", "dev", "eth0")
            host.ip("link", "set", "lo", "up")
            host.ip("link", "set", "eth0", "up")

    def _remove(self) -> None:
        for name in (*(host.namespace for host in self.hosts), self._hub):
            _ip("netns", "del", name, check=False)

    def door(self, host: Host, port: int) -> Door:
        """A way from the test into `host`, as if a client ran there."""
        door = Door(host, port)
        self._doors.append(door)
        return door


class Door:
    """Leads from a port of the test's own network to 127.0.0.1:port on a host."""

    def __init__(self, host: Host, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._host = host
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._serve, daemon=True)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
        for sock in (self._listener, *self._sockets):
            sock.close()

    def _serve(self) -> None:
        _enter(self._host.namespace)  # this thread alone; what it opens stays there
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target, timeout=5)
            except OSError:
                return
            far.settimeout(None)
            self._sockets += [near, far]
            for source, sink in ((near, far), (far, near)):
                thread = threading.Thread(target=_copy, args=(source, sink), daemon=True)
                self._threads.append(thread)
                thread.start()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            sink.sendall(data)
    except OSError:
        pass
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def _enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
