"""Options are whole from birth and show no secret."""

from __future__ import annotations

from pathlib import Path

from shardline.options import GatewayOptions, NodeOptions, TrackerOptions
from shardline.settings import Settings

SECRET = "credential-0123456789"


def test_no_repr_shows_a_secret() -> None:
    common = {"settings": Settings(), "host": "127.0.0.1", "port": 0, "credential": SECRET, "state_dir": Path("/s")}
    every = (
        TrackerOptions(**common),
        GatewayOptions(**common, tracker_url="http://127.0.0.1:1", api_keys=("sk-secret-key",)),
        NodeOptions(
            **common,
            tracker_url="http://127.0.0.1:1",
            model="m",
            engine="torch",
            environment={"TOKEN": "sk-secret-key"},
        ),
    )
    for options in every:
        assert SECRET not in repr(options)
        assert "sk-secret-key" not in repr(options)
        assert options.announce("ready") is None
