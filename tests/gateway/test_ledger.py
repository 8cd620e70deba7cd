"""Usage of keys: added up over restarts and Gateways, bounded, for its owner alone."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest

from shardline.errors import ShardlineError
from shardline.gateway.ledger import NAMES_LIMIT, USAGE_FILE, KeyUsage, Ledger, kept_usage


def test_sums_stay_over_restarts_and_of_several_gateways(tmp_path: Path) -> None:
    path = tmp_path / USAGE_FILE
    assert kept_usage(path) == {}

    def gateway() -> None:
        ledger = Ledger(path)
        for _ in range(5):
            ledger.add("a", KeyUsage(requests=1, prompt_tokens=10, completion_tokens=3, last_used=7.0))
            ledger.write(ledger.take())
        assert not ledger.due

    gateways = [threading.Thread(target=gateway) for _ in range(4)]
    for running in gateways:
        running.start()
    for running in gateways:
        running.join()
    wanted = KeyUsage(requests=20, prompt_tokens=200, completion_tokens=60, last_used=7.0)
    assert kept_usage(path) == {"a": wanted}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_names_that_were_used_longest_ago_make_way(tmp_path: Path) -> None:
    path = tmp_path / USAGE_FILE
    ledger = Ledger(path)
    big = 10**14
    for n in range(NAMES_LIMIT + 1):
        ledger.add(
            f"{n:064}",
            KeyUsage(requests=big, refused=big, prompt_tokens=big, completion_tokens=big, last_used=1764460000.123 + n),
        )
    ledger.write(ledger.take())
    kept = kept_usage(path)
    assert len(kept) == NAMES_LIMIT and f"{0:064}" not in kept


def test_a_damaged_file_is_named_and_what_was_taken_can_be_given_back(tmp_path: Path) -> None:
    path = tmp_path / USAGE_FILE
    path.write_bytes(b"{")
    path.chmod(0o600)
    ledger = Ledger(path)
    ledger.add("a", KeyUsage(requests=1))
    with pytest.raises(ShardlineError) as caught:
        ledger.write(ledger.take())
    assert caught.value.code == "setting_invalid"


def test_without_a_folder_nothing_is_kept() -> None:
    ledger = Ledger(None)
    ledger.add("a", KeyUsage(requests=1))
    assert not ledger.due
