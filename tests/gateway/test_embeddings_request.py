"""What `POST /v1/embeddings` takes, refuses and makes of a pooled vector."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import pytest

from shardline.errors import ShardlineError
from shardline.gateway.embeddings_request import (
    INPUTS,
    EmbeddingsRequest,
    check_ids,
    embeddings_request,
    shaped,
    written,
)

VECTOR = struct.pack("<4f", 3.0, 0.0, -4.0, 12.0)


def read(**fields: Any) -> EmbeddingsRequest:
    return embeddings_request(json.dumps({"model": "m", "input": "text", **fields}).encode())


@pytest.mark.parametrize(
    ("sent", "inputs"),
    [
        ("text", ["text"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["x"] * INPUTS, ["x"] * INPUTS),
    ],
    ids=["string", "strings", "ids", "lists of ids", "as many as there may be"],
)
def test_inputs_of_every_shape(sent: Any, inputs: list[Any]) -> None:
    assert read(input=sent).inputs == inputs


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"input": ""}, "invalid_value", "input"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": ["a", ""]}, "invalid_value", "input"),
        ({"input": [[]]}, "invalid_value", "input"),
        ({"input": ["a", 1]}, "invalid_value", "input"),
        ({"input": ["a", [1]]}, "invalid_value", "input"),
        ({"input": [1, [1]]}, "invalid_value", "input"),
        ({"input": [1.5]}, "invalid_value", "input"),
        ({"input": [True]}, "invalid_value", "input"),
        ({"input": None}, "invalid_value", "input"),
        ({"input": {"text": "a"}}, "invalid_value", "input"),
        ({"input": ["a"] * (INPUTS + 1)}, "invalid_value", "input"),
        ({"encoding_format": "int8"}, "invalid_value", "encoding_format"),
        ({"dimensions": 0}, "invalid_value", "dimensions"),
        ({"dimensions": -1}, "invalid_value", "dimensions"),
        ({"dimensions": 2.5}, "invalid_value", "dimensions"),
        ({"pooling": "cls"}, "invalid_value", "pooling"),
        ({"embd_normalize": 3}, "invalid_value", "embd_normalize"),
        ({"user": 7}, "invalid_value", "user"),
        ({"model": None}, "invalid_value", "model"),
        ({"truncate": True}, "unsupported_parameter", "truncate"),
        ({"input_type": "query"}, "unsupported_parameter", "input_type"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_meant_is_refused_by_name(fields: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(ShardlineError) as refused:
        read(**fields)
    assert (refused.value.code, refused.value.param) == (code, param)


def test_null_is_as_if_absent() -> None:
    names = ("encoding_format", "dimensions", "pooling", "embd_normalize", "user")
    assert read(**dict.fromkeys(names)) == read()


def test_ids_are_those_of_the_model() -> None:
    check_ids(["text", [0, 9]], 10)
    for wrong in ([10], [-1], [3, 1 << 40]):
        with pytest.raises(ShardlineError) as refused:
            check_ids(["text", wrong], 10)
        assert refused.value.param == "input"
        assert "input 1" in refused.value.message


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, [3 / 13, 0, -4 / 13, 12 / 13]),
        ({"embd_normalize": -1}, [3, 0, -4, 12]),
        ({"embd_normalize": 1}, [3 / 19, 0, -4 / 19, 12 / 19]),
        ({"embd_normalize": 0}, [3 * 2730, 0, -4 * 2730, 32760]),
        ({"dimensions": 3}, [0.6, 0, -0.8]),
        ({"dimensions": 1}, [1]),
        ({"dimensions": 4}, [3 / 13, 0, -4 / 13, 12 / 13]),
        ({"dimensions": 2, "embd_normalize": -1}, [3, 0]),
    ],
    ids=str,
)
def test_vectors_are_cut_then_normalised(fields: dict[str, Any], wanted: list[float]) -> None:
    request = read(**fields)
    values = shaped(VECTOR, request)
    assert list(values) == pytest.approx(wanted, rel=1e-6)
    numbers = json.loads(bytes(written(values, base64=False)))
    packed = json.loads(bytes(written(values, base64=True)))
    assert base64.b64decode(packed) == struct.pack(f"<{len(wanted)}f", *values)
    assert struct.pack(f"<{len(wanted)}f", *numbers) == base64.b64decode(packed), "numbers are these float32 exactly"


def test_zeros_stay_zeros() -> None:
    for norm in (-1, 0, 1, 2):
        assert list(shaped(bytes(16), read(embd_normalize=norm))) == [0, 0, 0, 0]


def test_more_dimensions_than_there_are_are_refused() -> None:
    with pytest.raises(ShardlineError) as refused:
        shaped(VECTOR, read(dimensions=5))
    assert (refused.value.code, refused.value.param) == ("invalid_value", "dimensions")
    assert "have 4" in refused.value.message
