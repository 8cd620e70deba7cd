"""The Tracker as a role: it announces its URL, serves, and leaves nothing when it is cancelled."""

from __future__ import annotations

import asyncio
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from shardline.errors import ShardlineError
from shardline.options import StartPhase, TrackerOptions
from shardline.settings import Settings
from shardline.tracker.run import run
from shardline.transport.http_client import ConnectFailed, HttpClient
from shardline.transport.tracker_client import TrackerClient
from shardline.wire.messages import ModelList
from tests.support.stores import described, layered_model

SETTINGS = Settings(drain_s=1.0)


def options(state_dir: Path) -> TrackerOptions:
    return TrackerOptions(settings=SETTINGS, host="127.0.0.1", port=0, credential="secret", state_dir=state_dir)


async def test_it_serves_until_it_is_cancelled(tmp_path: Path) -> None:
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    phases: list[str] = []

    def announce(phase: StartPhase, /, **facts: str | int) -> None:
        phases.append(phase)
        if phase == "listening":
            listening.set_result(str(facts["url"]))

    client = HttpClient(SETTINGS, credential="secret")
    async with asyncio.TaskGroup() as group:
        role = group.create_task(run(replace(options(tmp_path), announce=announce)))
        url = await listening
        assert (await client.json("GET", f"{url}/v1/models", ModelList)).models == []
        role.cancel()
    assert phases == ["listening", "ready", "draining"]
    with pytest.raises(ConnectFailed):
        await client.json("GET", f"{url}/v1/models", ModelList)
    await client.aclose()
    assert stat.S_IMODE((tmp_path / "tracker.key").stat().st_mode) == 0o600


async def test_a_port_that_is_taken_ends_it_at_once(tmp_path: Path) -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(ShardlineError) as error:
        await run(replace(options(tmp_path), port=port))
    assert error.value.code == "address_in_use"
    server.close()
    await server.wait_closed()


async def test_a_damaged_key_ends_it_and_frees_the_port(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("nonsense")
    key.chmod(0o600)
    with pytest.raises(ShardlineError) as error:
        await run(replace(options(tmp_path), key_path=key))
    assert error.value.code == "setting_invalid"


async def test_beyond_loopback_it_wants_to_be_told(tmp_path: Path) -> None:
    with pytest.raises(ShardlineError) as error:
        await run(replace(options(tmp_path), host="0.0.0.0"))
    assert error.value.code == "insecure_listener"


async def test_it_offers_only_what_its_operator_trusts(tmp_path: Path) -> None:
    bundle = described(layered_model(tmp_path / "model", layers=2, layer_bytes=1 << 10), tmp_path / "bundle")
    offering = replace(options(tmp_path), artifacts=(bundle.folder,))
    with pytest.raises(ShardlineError) as error:
        await run(offering)
    assert error.value.code == "artifact_untrusted"
    assert str(bundle.folder) in error.value.message
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def announce(phase: StartPhase, /, **facts: str | int) -> None:
        if phase == "listening":
            listening.set_result(str(facts["url"]))

    client = HttpClient(SETTINGS, credential="secret")
    async with asyncio.TaskGroup() as group:
        role = group.create_task(run(replace(offering, allow_unsigned=True, announce=announce)))
        (offered,) = (await TrackerClient(client, await listening).artifacts()).artifacts
        assert (offered.content_id, offered.publisher) == (bundle.manifest.content_id, None)
        role.cancel()
    await client.aclose()
