"""The line for joining, and what never leaves before the Tracker has proved itself."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from starlette.types import Receive, Scope, Send

from shardline.errors import ShardlineError
from shardline.settings import Settings
from shardline.transport.authority import Authority
from shardline.transport.bodies import read_body, send_json
from shardline.transport.join import JoinLine, join_line, joined
from shardline.wire.joining import AuthorityAnswer, JoinAnswer, JoinRequest
from shardline.wire.tickets import node_id_of
from tests.support.certificates import authority, party
from tests.transport.loopback import serving

TOKEN = "tokentokentokentoken22"


def line_to(port: int, pin: str) -> JoinLine:
    return join_line(f"https://127.0.0.1:{port}/#{TOKEN}.{pin}")


def test_a_line() -> None:
    pin = "p" * 43
    line = join_line(f" https://10.0.0.1:7070/#{TOKEN}.{pin}\n")
    assert (line.tracker, line.token, line.pin) == ("https://10.0.0.1:7070", TOKEN, pin)
    assert join_line(f"https://[fd00::1]:7070#{TOKEN}.{pin}").tracker == "https://[fd00::1]:7070"
    assert join_line("https://tracker.lan:7070/")[1:] == (None, None)
    assert TOKEN not in repr(line)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "https://10.0.0.1:7070/#",
        f"https://10.0.0.1:7070/#{TOKEN}",
        f"https://10.0.0.1:7070/#{TOKEN}.short",
        f"http://10.0.0.1:7070/#{TOKEN}.{'p' * 43}",
        f"https://10.0.0.1:7070/path#{TOKEN}.{'p' * 43}",
        f"https://tracker@10.0.0.1:7070/#{TOKEN}.{'p' * 43}",
        f"https://10.0.0.1:7070/#{TOKEN}.{'p' * 43}#",
    ],
)
def test_what_is_no_line(text: str) -> None:
    with pytest.raises(ShardlineError) as caught:
        join_line(text)
    assert (caught.value.code, caught.value.param) == ("setting_invalid", "join")
    assert TOKEN not in caught.value.message


class Impostor:
    """Answers for a Tracker with whatever authority it was told to, and notes every byte that it was sent."""

    def __init__(self, shown: Authority) -> None:
        self.shown = shown
        self.heard: list[tuple[str, bytes]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.heard.append((scope["path"], await read_body(receive, scope, 1 << 20)))
        if scope["path"] == "/v1/cluster/ca":
            await send_json(send, AuthorityAnswer(certificate=self.shown.certificate_pem.decode()))
        else:
            await send_json(send, {})

    @property
    def knows_token(self) -> bool:
        return any(TOKEN.encode() in body or re.search(TOKEN, path) for path, body in self.heard)


async def attempt(line: JoinLine, folder: Path) -> ShardlineError:
    with pytest.raises(ShardlineError) as caught:
        async with joined(line, state_dir=folder, settings=Settings()):
            pass
    assert TOKEN not in caught.value.message
    # Nothing is left of a line that led nowhere.
    assert list((folder / "joined").glob("*")) == []
    return caught.value


async def test_a_wrong_pin_keeps_the_token_here(tmp_path: Path) -> None:
    own, other = authority(tmp_path), authority(tmp_path, "other")
    impostor = Impostor(other)
    async with serving(impostor, tls=party(other, "tracker").server(strangers=True)) as server:
        error = await attempt(line_to(server.port, own.pin), tmp_path)
    assert error.code == "join_mismatch"
    assert [path for path, _ in impostor.heard] == ["/v1/cluster/ca"]
    assert not impostor.knows_token


async def test_a_true_authority_shown_by_somebody_else_keeps_the_token_here(tmp_path: Path) -> None:
    """The certificate of the authority is no secret: whoever shows it must also hold a Tracker's own."""
    own, other = authority(tmp_path), authority(tmp_path, "other")
    for false in (party(other, "tracker"), party(own, "n-0123456789abcdef"), party(own, "tracker", ended_s=60)):
        impostor = Impostor(own)
        async with serving(impostor, tls=false.server(strangers=True)) as server:
            error = await attempt(line_to(server.port, own.pin), tmp_path)
        assert error.code == "tracker_unreachable"
        assert [path for path, _ in impostor.heard] == ["/v1/cluster/ca"]
        assert not impostor.knows_token


async def test_an_answer_for_another_node_is_refused(tmp_path: Path) -> None:
    own = authority(tmp_path)

    async def confused(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/v1/cluster/ca":
            await send_json(send, AuthorityAnswer(certificate=own.certificate_pem.decode()))
            return
        await read_body(receive, scope, 1 << 20)
        await send_json(send, {"node": "n-another", "certificate": "", "authority": "", "credential": ""})

    async with serving(confused, tls=party(own, "tracker").server(strangers=True)) as server:
        assert (await attempt(line_to(server.port, own.pin), tmp_path)).code == "join_mismatch"


async def test_the_authority_that_is_kept_is_the_one_of_the_line(tmp_path: Path) -> None:
    """Whoever holds a Tracker's certificate for a day must not become the authority for ever."""
    own, other = authority(tmp_path), authority(tmp_path, "other")

    async def greedy(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/v1/cluster/ca":
            await send_json(send, AuthorityAnswer(certificate=own.certificate_pem.decode()))
            return
        asked = msgspec.json.decode(await read_body(receive, scope, 1 << 20), type=JoinRequest)
        answer = JoinAnswer(
            node=node_id_of(bytes.fromhex(asked.public_key)),
            certificate="",
            authority=other.certificate_pem.decode(),
            credential="credential-" + "x" * 20,
        )
        await send_json(send, answer)

    async with serving(greedy, tls=party(own, "tracker").server(strangers=True)) as server:
        assert (await attempt(line_to(server.port, own.pin), tmp_path)).code == "join_mismatch"


async def test_nobody_there_and_nobody_known(tmp_path: Path) -> None:
    assert (await attempt(line_to(9, "p" * 43), tmp_path)).code == "tracker_unreachable"
    error = await attempt(join_line("https://127.0.0.1:9/"), tmp_path)
    assert error.code == "join_refused" and "needs its token" in error.message


async def test_plain_http_behind_a_line(tmp_path: Path) -> None:
    async with serving(Impostor(authority(tmp_path))) as server:
        assert (await attempt(line_to(server.port, "p" * 43), tmp_path)).code == "tracker_unreachable"
