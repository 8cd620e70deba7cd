"""Control messages: what protocol 1 has sent must always be read, and what is required of it never grows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardline.settings import PROTOCOL
from shardline.wire import artifacts, composite, joining, messages, sampling, stream

CORPUS = Path(__file__).with_name("corpus_v1.json")
"""One encoding of each message as protocol 1 sent it first. Grows with new messages; an entry never changes, unless
the protocol's number does."""


def corpus() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(CORPUS.read_text())
    return found


def kinds() -> dict[str, type[msgspec.Struct]]:
    return {
        name: kind
        for module in (messages, stream, composite, sampling, joining, artifacts)
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__
    }


def test_the_corpus_belongs_to_this_protocol_and_has_every_message() -> None:
    assert PROTOCOL == 1, "a new protocol number needs a corpus of its own"
    assert set(corpus()) == set(kinds())


@pytest.mark.parametrize("name", sorted(kinds()))
def test_old_encodings_are_read(name: str) -> None:
    """Every field of the old encoding has its old value; no field that was not there is required."""
    old = corpus()[name]
    message = msgspec.json.decode(json.dumps(old), type=kinds()[name])
    assert holds(json.loads(msgspec.json.encode(message)), old)


def holds(new: Any, old: Any) -> bool:
    """Whether everything of `old` is in `new`; defaults may be left out."""
    if isinstance(old, dict):
        return isinstance(new, dict) and all(key not in new or holds(new[key], value) for key, value in old.items())
    if isinstance(old, list):
        return isinstance(new, list) and len(new) == len(old) and all(map(holds, new, old))
    return bool(new == old)


@pytest.mark.parametrize("name", sorted(kinds()))
def test_fields_that_a_newer_version_adds_are_passed_over(name: str) -> None:
    kind = kinds()[name]
    newer = {**corpus()[name], "field_of_tomorrow": [1, {"a": None}]}
    if kind.__struct_config__.forbid_unknown_fields:
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(json.dumps(newer), type=kind)
    else:
        msgspec.json.decode(json.dumps(newer), type=kind)


def test_stream_events_tell_themselves_apart() -> None:
    for name in ("Opened", "Beat", "Progress", "Token", "Taken", "Text", "Answered", "Finished", "Failed", "Closed"):
        event = msgspec.json.decode(json.dumps(corpus()[name]), type=messages.StreamEvent)
        assert type(event).__name__ == name
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"event":"unheard"}', type=messages.StreamEvent)
