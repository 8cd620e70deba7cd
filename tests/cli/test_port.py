"""A port that is taken: who is there, and what to do."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from shardline.cli.main import cli
from shardline.cli.port import check_port
from shardline.cli.running import RunningCluster
from shardline.errors import ShardlineError


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


def refusal(port: int, flag: str = "--port", clusters: tuple[RunningCluster, ...] = (), **more: bool) -> ShardlineError:
    with pytest.raises(ShardlineError) as refused:
        check_port("127.0.0.1", port, flag, clusters, **more)
    assert refused.value.code == "address_in_use"
    return refused.value


def test_a_free_port_stays_free() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for number in (port, port, 0):
        check_port("127.0.0.1", number, "--port", ())


def test_a_foreign_program_is_named_and_another_port_offered(taken: int) -> None:
    error = refusal(taken, "--tracker-port")
    assert f"port {taken} on 127.0.0.1 is taken by process {os.getpid()}" in error.message
    flag, port = error.advice.split()[-2:]
    assert flag == "--tracker-port" and int(port) > taken
    check_port("127.0.0.1", int(port), flag, ())


def test_a_cluster_of_this_machine_is_named_as_such(taken: int) -> None:
    one = RunningCluster(
        pid=7, gateway=f"http://127.0.0.1:{taken}", tracker="http://127.0.0.1:9", what="demo smol.gguf"
    )
    error = refusal(taken, clusters=(one,))
    assert "a cluster that runs already" in error.message and "demo smol.gguf, process 7" in error.message
    assert f"shardline chat --gateway http://127.0.0.1:{taken}" in error.advice


def test_who_typed_make_is_told_what_to_type(taken: int) -> None:
    assert "make demo PORT=" in refusal(taken, by_make=True).advice


def test_two_parts_want_two_ports() -> None:
    done = CliRunner().invoke(cli, ["serve", "--port", "7777", "--tracker-port", "7777"])
    assert isinstance(done.exception, ShardlineError)
    assert "--port and --tracker-port are both 7777" in done.exception.message
