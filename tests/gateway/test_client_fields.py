"""No field of OpenAI's and Anthropic's clients is ignored: each does what it says, or is refused by its name."""

from __future__ import annotations

import importlib.metadata
import json

import pytest

from tests.support.client_fields import ENDPOINTS, HONOURED, NEUTRAL, NO_EFFECT, RECORD, REFUSED, Endpoint, outcomes

RECORDED = json.loads(RECORD.read_text(encoding="utf-8"))


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.path)
def test_every_field_is_honoured_or_refused_by_name(endpoint: Endpoint) -> None:
    """The walk itself fails at a field that is taken without being ours, or refused without being named."""
    now, recorded = outcomes(endpoint), RECORDED["fields"][endpoint.path]
    assert set(now.values()) <= {HONOURED, NO_EFFECT, NEUTRAL, REFUSED}
    same = importlib.metadata.version(endpoint.client) == RECORDED["clients"][endpoint.client]
    compared = set(now) | set(recorded) if same else set(now) & set(recorded)
    differing = {name for name in compared if now.get(name) != recorded.get(name)}
    assert not differing, "run python -m tests.support.client_fields, then make docs"
    new = set(now) - set(recorded)
    assert all(now[name] == REFUSED for name in new), "a field that a newer client has, and we had before it"


def test_what_everybody_sends_is_honoured() -> None:
    chat = RECORDED["fields"]["/v1/chat/completions"]
    for name in ("messages", "temperature", "stop", "tools", "response_format", "stream_options.include_usage"):
        assert chat[name] == HONOURED
    assert chat["messages[user].content[image_url]"] == REFUSED
    assert RECORDED["fields"]["/v1/messages"]["messages[assistant].content[tool_use].input"] == HONOURED
    assert len(chat) > 60
