"""Pages of other origins: none may read an answer, but for those that the operator names."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from shardline.errors import ShardlineError
from shardline.gateway.cross_origin import check_origins, origins_of
from shardline.gateway.template import Templates
from shardline.settings import Settings
from tests.support.gateway_stand import MODEL, Stand, standing

PAGE = "http://localhost:3000"
OTHER = "https://evil.example"
KEY = "sk-test-key-0123456789abcdef"
PATH = "/v1/completions"


async def preflight(stand: Stand, origin: str, path: str = PATH, **fields: str) -> httpx.Response:
    asked = {"access-control-request-method": "POST", **{k.replace("_", "-"): v for k, v in fields.items()}}
    return await stand.http.options(stand.url + path, headers={"origin": origin, **asked})


def cors_fields(answer: httpx.Response) -> list[str]:
    return sorted(name for name in answer.headers if name.startswith("access-control"))


async def test_off_by_default(tmp_path: Path, shared_templates: Templates) -> None:
    async with standing(tmp_path, templates=shared_templates) as stand:
        answer = await preflight(stand, PAGE)
        assert (answer.status_code, cors_fields(answer)) == (405, [])
        answer = await stand.post(PATH, {"model": MODEL, "prompt": "Hi"}, origin=PAGE)
        assert (answer.status_code, cors_fields(answer)) == (200, [])


async def test_a_named_origin_may_ask_and_read(tmp_path: Path, shared_templates: Templates) -> None:
    stand = Stand(settings=Settings(cors_origins=f"{PAGE}, app://notes"))
    async with standing(tmp_path, stand=stand, templates=shared_templates):
        headers = "authorization,content-type,x-stainless-lang"
        answer = await preflight(stand, PAGE, access_control_request_headers=headers)
        assert (answer.status_code, answer.content) == (204, b"")
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["access-control-allow-headers"] == headers
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert answer.headers["vary"] == "Origin"
        assert "access-control-allow-credentials" not in answer.headers
        assert "access-control-allow-private-network" not in answer.headers
        private = await preflight(stand, "app://notes", access_control_request_private_network="true")
        assert private.headers["access-control-allow-private-network"] == "true"

        body = {"model": MODEL, "prompt": "Hi"}
        for path, sent, status in ((PATH, body, 200), (PATH, {**body, "model": "x"}, 404), ("/v1/nothing", body, 404)):
            answer = await stand.post(path, sent, origin=PAGE)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, PAGE)
            assert "shardline-route-session" in answer.headers["access-control-expose-headers"]
        streamed = await stand.post(PATH, {**body, "stream": True}, origin=PAGE)
        assert streamed.headers["access-control-allow-origin"] == PAGE
        assert b"[DONE]" in streamed.content


@pytest.mark.parametrize("origin", [OTHER, "null", "http://localhost", PAGE + ".evil.example", PAGE.upper(), ""])
async def test_another_origin_gets_no_leave(tmp_path: Path, shared_templates: Templates, origin: str) -> None:
    stand = Stand(settings=Settings(cors_origins=PAGE))
    async with standing(tmp_path, stand=stand, templates=shared_templates):
        answer = await preflight(stand, origin)
        assert (answer.status_code, cors_fields(answer)) == (405, [])
        answer = await stand.get("/v1/models", origin=origin)
        assert cors_fields(answer) == []


async def test_all_origins_where_keys_are_asked_for(tmp_path: Path, shared_templates: Templates) -> None:
    stand = Stand(settings=Settings(cors_origins="*"))
    async with standing(tmp_path, stand=stand, templates=shared_templates, keys=[KEY]):
        assert (await preflight(stand, OTHER)).status_code == 204
        answer = await stand.get("/v1/models", origin=OTHER)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (401, OTHER)
        answer = await stand.get("/v1/models", origin=OTHER, authorization=f"Bearer {KEY}")
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, OTHER)


async def test_all_origins_are_none_without_keys(tmp_path: Path, shared_templates: Templates) -> None:
    """A Gateway does not start so; keys may also be revoked while it runs."""
    stand = Stand(settings=Settings(cors_origins="*"))
    async with standing(tmp_path, stand=stand, templates=shared_templates):
        assert cors_fields(await preflight(stand, OTHER)) == []
        assert cors_fields(await stand.get("/v1/models", origin=OTHER)) == []
    with pytest.raises(ShardlineError) as refused:
        check_origins("*", keys=False)
    assert (refused.value.code, refused.value.param) == ("setting_invalid", "cors_origins")
    assert check_origins("*", keys=True) == {"*"}


async def test_header_names_that_are_none_are_not_repeated(tmp_path: Path, shared_templates: Templates) -> None:
    stand = Stand(settings=Settings(cors_origins=PAGE))
    async with standing(tmp_path, stand=stand, templates=shared_templates):
        for names in ("a b", "x;y", "a" * 3000, "a,,b"):
            answer = await preflight(stand, PAGE, access_control_request_headers=names)
            assert "access-control-allow-headers" not in answer.headers


def test_what_an_origin_is() -> None:
    assert origins_of("") == frozenset()
    assert origins_of(" http://localhost:3000 ,https://a.example,app://obsidian.md,http://[::1]:8000,") == {
        "http://localhost:3000",
        "https://a.example",
        "app://obsidian.md",
        "http://[::1]:8000",
    }
    for wrong in (
        "http://localhost:3000/",
        "localhost:3000",
        "https://A.example",
        "null",
        "*, https://a.example",
        "https://*.example",
        "https://a.example/path",
        "https://u@a.example",
        "https://a.example\r\nx: y",
    ):
        with pytest.raises(ShardlineError) as refused:
            origins_of(wrong)
        assert refused.value.code == "setting_invalid"
