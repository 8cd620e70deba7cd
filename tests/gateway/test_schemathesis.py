"""Schemathesis over `/openapi.json`: whatever it asks, there is an answer, and one that the document has."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.support.loose_api import Findings, Loose, loose

GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings")


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loose]:
    with loose(tmp_path_factory.mktemp("loose")) as made:
        yield made


def check(findings: Findings, cases: int) -> None:
    assert not findings.faults, "\n\n".join(findings.faults[:5])
    assert findings.cases >= cases, findings.answers


def test_some_cases(gateway: Loose) -> None:
    check(gateway.run(5, boundaries=False), 90)
    findings = gateway.run(5, boundaries=False, takes=True)
    check(findings, 40)
    assert findings.streams >= 3
    for path in GENERATING:
        assert findings.taken(f"POST {path}") >= 5


@pytest.mark.parametrize("shape", ["ChatCompletion", "ChatChunk"])
def test_an_answer_that_the_document_does_not_have_would_be_found(gateway: Loose, shape: str) -> None:
    document = copy.deepcopy(gateway.document)
    document["components"]["schemas"][shape]["required"].append("no_such_member")
    wrong = replace(gateway, document=document)
    findings = wrong.run(10, boundaries=False, takes=True, only="/v1/chat/completions")
    assert findings.faults and all(fault.startswith("response_schema_conformance") for fault in findings.faults)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_thousand_cases(gateway: Loose) -> None:
    check(gateway.run(40, boundaries=True, seed=2), 2000)
    findings = gateway.run(60, boundaries=False, takes=True, seed=3)
    check(findings, 400)
    assert findings.streams >= 50
    for path in GENERATING:
        assert findings.taken(f"POST {path}") >= 50
