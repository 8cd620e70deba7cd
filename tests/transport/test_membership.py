from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from shardline.errors import ShardlineError
from shardline.settings import Settings
from shardline.transport.authority import Authority, key_pem, lifetime, new_key, requested_key
from shardline.transport.membership import (
    Kept,
    Membership,
    OwnMembership,
    held,
    joined_folders,
    keep_in,
    kept_in,
    kept_membership,
)
from tests.support.certificates import authority

NODE = "n-0123456789abcdef"
TRACKER = "https://10.0.0.1:7070"


def kept(signer: Authority, *, now: float | None = None, tracker: str = TRACKER) -> Kept:
    key = new_key()
    pem = signer.issue(key.public_key(), NODE, [], now=time.time() if now is None else now, seconds=100)
    return Kept(
        tracker=tracker,
        node=NODE,
        authority=signer.certificate_pem.decode(),
        certificate=pem.decode(),
        key=key_pem(key).decode(),
        credential="credential-" + "x" * 20,
    )


def test_a_certificate_is_renewed_in_the_second_half_of_its_life(tmp_path: Path) -> None:
    signer = authority(tmp_path)
    folder = tmp_path / "node"
    first = kept(signer)
    keep_in(folder, first)
    membership = kept_membership(folder, first)
    start, end = lifetime(first.certificate.encode())
    assert membership.renewal(start + 49) is None
    request = membership.renewal(start + 51)
    assert request is not None
    # Asked again before the answer has come: for the same key, so that either answer fits.
    again = membership.renewal(start + 52)
    assert again is not None and requested_key(again) == requested_key(request)
    pem = signer.issue(requested_key(request), NODE, [], now=start + 52, seconds=100).decode()
    membership.renewed(pem)
    assert membership.until == pytest.approx(end + 52, abs=1)
    assert membership.renewal(start + 53) is None
    after = kept_in(folder)
    assert after is not None and after.certificate == pem and after.key != first.key
    assert after.credential == first.credential
    kept_membership(folder, after)  # the pair on the disk is one


def test_an_answer_that_nobody_asked_for_changes_nothing(tmp_path: Path) -> None:
    signer = authority(tmp_path)
    own = kept(signer)
    membership = Membership(
        authority=own.authority.encode(), certificate=own.certificate.encode(), key=own.key.encode()
    )
    until = membership.until
    membership.renewed(kept(signer, now=time.time() + 50).certificate)
    assert membership.until == until


def test_folders_of_one_tracker_the_latest_first(tmp_path: Path) -> None:
    signer = authority(tmp_path)
    for name, age, tracker in (("a", 60, TRACKER), ("b", 20, TRACKER), ("c", 0, "https://10.0.0.2:7070")):
        keep_in(tmp_path / "joined" / name, kept(signer, now=time.time() - age, tracker=tracker))
    (tmp_path / "joined" / "d").mkdir()
    damaged = tmp_path / "joined" / "e" / "membership.json"
    damaged.parent.mkdir()
    damaged.write_text("{")
    damaged.chmod(0o600)
    assert [folder.name for folder in joined_folders(tmp_path, TRACKER)] == ["b", "a"]
    assert joined_folders(tmp_path / "nowhere", TRACKER) == []


def test_one_process_at_a_time(tmp_path: Path) -> None:
    first = held(tmp_path / "x")
    assert first is not None
    assert held(tmp_path / "x") is None
    first.close()
    second = held(tmp_path / "x")
    assert second is not None
    second.close()


def test_what_is_kept_is_for_its_owner(tmp_path: Path) -> None:
    keep_in(tmp_path, kept(authority(tmp_path)))
    path = tmp_path / "membership.json"
    assert path.stat().st_mode & 0o777 == 0o600
    os.chmod(path, 0o640)
    with pytest.raises(ShardlineError, match="others may read it"):
        kept_in(tmp_path)
    assert kept_in(tmp_path / "empty") is None


async def test_the_trackers_machine_renews_by_itself(tmp_path: Path) -> None:
    own = OwnMembership(authority(tmp_path), "tracker", Settings(certificate_s=0.4), [])
    end = own._life[1]
    renewing = asyncio.create_task(own.renew())
    async with asyncio.timeout(5):
        while own._life[1] <= end:
            await asyncio.sleep(0.02)
    renewing.cancel()
    await asyncio.wait({renewing})


async def test_a_party_without_heartbeats_renews_by_asking(tmp_path: Path) -> None:
    own = authority(tmp_path)
    asked: list[float] = []

    def certificate(seconds: float) -> tuple[bytes, bytes]:
        key = new_key()
        pem = own.issue(key.public_key(), "gateway-1", [], now=time.time(), seconds=seconds)
        return pem, key_pem(key)

    pem, key = certificate(1.0)
    membership = Membership(authority=own.certificate_pem, certificate=pem, key=key)

    async def revive() -> None:
        asked.append(time.time())
        if len(asked) == 1:
            raise ShardlineError("tracker_unreachable", "it is away")
        if len(asked) == 3:
            raise ShardlineError("join_refused", "no more")
        pem, key = certificate(1.0)
        membership.replaced(pem.decode(), key)

    membership.revive = revive
    async with asyncio.timeout(10):
        with pytest.raises(ShardlineError, match="no more"):
            await membership.renew()
    assert len(asked) == 3


def test_what_is_no_certificate_changes_nothing(tmp_path: Path) -> None:
    own, key = authority(tmp_path), new_key()
    pem = own.issue(key.public_key(), "n-0123456789abcdef", [], now=time.time(), seconds=60)
    membership = Membership(authority=own.certificate_pem, certificate=pem, key=key_pem(key))
    until = membership.until
    with pytest.raises(ShardlineError) as caught:
        membership.replaced("junk", key_pem(key))
    assert caught.value.code == "internal" and membership.until == until
