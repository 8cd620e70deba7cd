"""The files of the page: what is served, with which headers, and that they need nobody else."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from starlette.routing import Route, Router

import shardline
from shardline.gateway.app import Endpoint
from shardline.gateway.page import HEADERS, Page
from shardline.transport.boundary import ErrorBoundary

FOLDER = Path(shardline.__file__).parent / "dashboard"


@pytest.fixture
def client() -> httpx.AsyncClient:
    page = Endpoint(Page())
    app = ErrorBoundary(Router([Route("/", page), Route("/page/{name:path}", page)]))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://page")


async def test_the_index_names_files_that_are_there(client: httpx.AsyncClient) -> None:
    answer = await client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    named = re.findall(r'(?:href|src)="(page/[^"]+)"', answer.text)
    assert "page/app.js" in named
    for name in named:
        assert (await client.get(f"/{name}")).status_code == 200, name


async def test_every_answer_forbids_other_origins(client: httpx.AsyncClient) -> None:
    for path in ("/", "/page/app.js", "/page/uplot/uPlot.esm.js", "/page/style.css"):
        headers = (await client.get(path)).headers
        for name, value in HEADERS:
            assert headers[name.decode()] == value.decode(), path
        sources = re.findall(r"(?:default|script|style|img|connect)-src ([^;]+)", headers["content-security-policy"])
        assert set(sources) == {"'none'", "'self'"}


async def test_what_has_not_changed_is_not_sent_again(client: httpx.AsyncClient) -> None:
    first = await client.get("/page/app.js")
    again = await client.get("/page/app.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = await client.get("/page/app.js", headers={"if-none-match": '"of an older version"'})
    assert other.content == first.content


@pytest.mark.parametrize("name", ["none.js", "../gateway/page.py", "..%2fgateway%2fpage.py", "uplot/LICENSE", ""])
async def test_nothing_else_is_served(client: httpx.AsyncClient, name: str) -> None:
    answer = await client.get(f"/page/{name}")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


def test_all_imports_lead_to_files_of_the_page() -> None:
    for script in FOLDER.glob("*.js"):
        for name in re.findall(r'from "([^"]+)"', script.read_text(encoding="utf-8")):
            assert (script.parent / name).is_file(), f"{script.name}: {name}"


def test_nothing_is_made_of_strings_or_asked_of_others() -> None:
    for path in [*FOLDER.glob("*.js"), *FOLDER.glob("*.html"), *FOLDER.glob("*.css")]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path
        )
        addresses = set(re.findall(r"\bhttps?://[\w.]+", text)) - {"http://www.w3.org", "http://www.w"}
        assert not addresses, path


def test_what_others_wrote_comes_with_its_licence() -> None:
    assert "MIT" in (FOLDER / "uplot" / "LICENSE").read_text(encoding="utf-8")
    assert (
        (FOLDER / "uplot" / "uPlot.esm.js")
        .read_text(encoding="utf-8")
        .startswith("/**\n* Copyright (c) 2025, Leon Sorokin")
    )
