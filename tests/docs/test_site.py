"""The documentation as a whole: every link leads somewhere, every page is on the site, nothing comes from elsewhere.

Needs no MkDocs: the site itself is built by `make site`. Its search runs in a real browser, from files.
"""

from __future__ import annotations

import json
import re
import unicodedata
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from tests.support import browser as browsers

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(([^()\s]*(?:\([^()\s]*\)[^()\s]*)*)(?:\s+\"[^\"]*\")?\)")


def text_of(page: Path) -> str:
    """Without what stands in code."""
    text = re.sub(r"^(```|~~~).*?^\1", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", lambda code: " " * len(code[0]), text)


def anchors(page: Path) -> set[str]:
    """Of headings, as both GitHub and MkDocs name them: an anchor that only one of them has is none."""
    body = re.sub(r"^(```|~~~).*?^\1", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} (.+)$", body, re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "").strip()
        github = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        plain = unicodedata.normalize("NFKD", words).encode("ascii", "ignore").decode()
        mkdocs = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
        found |= {github} & {mkdocs}
    return found


def broken(page: Path) -> list[str]:
    faults = []
    for target in LINK.findall(text_of(page)):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z][a-z+.-]*:", path):
            continue
        found = (page.parent / path).resolve() if path else page
        on_site = page.is_relative_to(DOCS)
        if not found.exists() or (on_site and not found.is_relative_to(DOCS)):
            faults.append(f"{target}: {'is not on the site' if found.exists() else 'is not there'}")
        elif anchor and (found.suffix != ".md" or anchor not in anchors(found)):
            faults.append(f"{target}: no such heading")
    return faults


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One, two\n\n[a](gone.md) [b](#one-two) [c](#three) `[d](code.md)` ![e](gone.png) [f](https://x.org/y)\n"
        "```text\n[g](fenced.md)\n```\n"
    )
    assert broken(page) == ["gone.md: is not there", "#three: no such heading", "gone.png: is not there"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_anchors_begin_with_a_letter(page: Path) -> None:
    """The script of the theme that follows the reader takes no others, and fails with the whole page's scripts."""
    assert not [anchor for anchor in anchors(page) if not anchor[:1].isalpha()]


def test_every_page_is_on_the_site_and_every_entry_is_a_page() -> None:
    named = re.findall(r": ([\w./-]+\.(?:md|json))$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(named) == len(set(named))
    absent = [name for name in named if not (DOCS / name).is_file()]
    assert not absent
    pages = {path.relative_to(DOCS).as_posix() for path in (*DOCS.glob("*.md"), *(DOCS / "reference").glob("*.md"))}
    assert not sorted(pages - set(named)), "give them a place in the nav of mkdocs.yml"


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.svg")), ids=lambda path: path.name)
def test_pictures_load_nothing_and_say_what_they_show(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "<title" in text and "<desc" in text
    assert not re.findall(r"<script|@import|url\((?!#)|href=", text)


def site() -> Any:
    spec = spec_from_file_location("site_script", ROOT / "scripts" / "site.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_a_page_would_load_from_elsewhere_is_found() -> None:
    html = """<link rel="canonical" href="https://a.org/"><link rel="stylesheet" href="css/own.css"><a href="https://b.org">
    <script src="//c.org/x.js"></script><img src="pictures/own.png"><link href='https://d.org/f.css' rel=stylesheet>"""
    assert site().elsewhere(html) == ["<script> //c.org/x.js", "<link> https://d.org/f.css"]


SEARCHED = {
    "config": {"separator": "[\\s-]+"},
    "docs": [
        {"location": "start.html#here", "title": "Begin <b>here</b>", "text": "The first five minutes."},
        {"location": "api.html", "title": "The API", "text": "What is honoured."},
    ],
}
# As much of lunr as the search calls.
LUNR = """
function lunr(build) {
  const pages = [];
  build.call({ ref() {}, field() {}, add(page) { pages.push(page); } });
  const has = (page, word) => (page.title + page.text).toLowerCase().includes(word);
  return { search: (words) => pages.filter((page) => has(page, words.trim())).map((page) => ({ ref: page.location })) };
}
lunr.tokenizer = {};
"""
PAGE = """<!doctype html><script>var base_url = ".";</script><script src="main.js"></script>
<form><input id="mkdocs-search-query"></form><div id="mkdocs-search-results" data-no-results-text="Nothing."></div>"""


@pytest.mark.skipif(not browsers.is_there(), reason=browsers.WHY_NOT)
async def test_the_search_works_in_pages_that_are_opened_as_files(tmp_path: Path) -> None:
    search = tmp_path / "search"
    search.mkdir()
    (search / "search_index.json").write_text(json.dumps(SEARCHED))
    (search / "worker.js").write_text("")
    site().without_worker(search)
    assert [path.name for path in search.iterdir()] == ["search_index.js"]
    theme = ROOT / "scripts" / "site_theme"
    (tmp_path / "main.js").write_bytes((theme / "search" / "main.js").read_bytes())
    (tmp_path / "index.html").write_text(PAGE)
    results = "#mkdocs-search-results"
    async with browsers.chromium() as browser:
        page = await browser.new_page()
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        await page.goto((tmp_path / "index.html").as_uri())
        await page.fill("#mkdocs-search-query", "minutes")
        await page.wait_for_selector(f"{results} >> text=The search does not work: search/lunr.js was not loaded")
        (search / "lunr.js").write_text(LUNR)
        await page.fill("#mkdocs-search-query", "minutes:")
        await page.wait_for_selector(f"{results} h3")
        link = page.locator(f"{results} a")
        assert (await link.inner_text(), await link.get_attribute("href")) == (
            "Begin <b>here</b>",
            "./start.html#here",
        )
        await page.fill("#mkdocs-search-query", "nowhere")
        await page.wait_for_selector(f"{results} >> text=Nothing.")
        assert faults == []


def test_what_the_theme_switches_is_there() -> None:
    """Its script for dark pages fails where one of these is not."""
    assert "custom_dir: scripts/site_theme" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    page = (ROOT / "scripts" / "site_theme" / "main.html").read_text(encoding="utf-8")
    assert all(f'<style id="hljs-{mode}">' in page for mode in ("light", "dark"))
