"""Builds the documentation as a site, strictly, and looks whether its pages load anything from elsewhere.

`python scripts/site.py [FOLDER]`: into build/site unless another folder is named. It needs MkDocs (the dependency group
`docs`; `make site` installs it). What the pages themselves say is held by tests/docs, without MkDocs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOADING = {"src", "srcset", "poster", "data"}
"""Attributes by which a browser loads something without being asked; of `link` also `href`."""


class Loaded(HTMLParser):
    """What a page loads from other hosts."""

    def __init__(self) -> None:
        super().__init__()
        self.elsewhere: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        kinds = dict(attrs).get("rel") or ""
        for name, value in attrs:
            loads = name in LOADING or (tag == "link" and name == "href" and "canonical" not in kinds)
            if loads and value and value.strip().lower().startswith(("http:", "https:", "//")):
                self.elsewhere.append(f"<{tag}> {value}")


def elsewhere(html: str) -> list[str]:
    """Everything in the page that another host would be asked for."""
    page = Loaded()
    page.feed(html)
    return page.elsewhere


def without_worker(search: Path) -> None:
    """Make the index a script: pages that were opened as files may load scripts, but start no worker and read no JSON.
    scripts/site_theme/search/main.js loads it. `search`: that folder of the site."""
    index = search / "search_index.json"
    content = json.loads(index.read_text(encoding="utf-8"))
    (search / "search_index.js").write_text(f"window.searchIndex = {json.dumps(content)};\n", encoding="utf-8")
    index.unlink()
    (search / "worker.js").unlink()


def build(folder: Path) -> int:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)], cwd=ROOT
    )
    if done.returncode:
        return done.returncode
    without_worker(folder / "search")
    faults = [
        f"{path.relative_to(folder)}: {found}"
        for path in sorted(folder.rglob("*.html"))
        for found in elsewhere(path.read_text(encoding="utf-8"))
    ]
    for fault in faults:
        print(f"loaded from elsewhere: {fault}")
    if not faults:
        print(f"{folder / 'index.html'}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT / "build" / "site"))
