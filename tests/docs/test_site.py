"""The documentation as a whole: every link leads somewhere, every page is on the site, nothing comes from elsewhere.

Needs no MkDocs: the site itself is built by `make site`.
"""

from __future__ import annotations

import re
import unicodedata
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

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
