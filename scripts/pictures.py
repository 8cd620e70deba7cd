"""Takes the pictures of the page that the docs show: a real cluster on the scripted engine, a real browser.

`python scripts/pictures.py [FOLDER]`; the folder is docs/pictures unless another one is named. It needs Chromium and
Playwright, as tests/page does.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.browser import Visit, chromium, visit
from tests.support.cluster import Cluster, scripted_cluster

ROOT = Path(__file__).resolve().parent.parent
QUESTION = "Explain in a few sentences what happens to a token on its way through this cluster."
CONTEXT = (
    "\n\nNotes: the model has 30 layers. Three Nodes hold ten layers each, one of these ranges is held twice. The "
    "prompt is read in chunks; each chunk passes the Nodes in order, and each Node keeps what it computed."
)
ANSWER = (
    "The Gateway sends the token to the first Node, which looks up its row and computes layers 0 to 9. What comes out "
    "is one hidden row; it crosses to the second Node, which adds layers 10 to 19 from its own cache, and then to the "
    "third with the rest. There the row becomes a distribution over the vocabulary, and a new token is drawn.\n\n"
    "Two things go back: the token goes to the Gateway, which turns it into the text that you read here, and its id "
    "goes to the first Node, so that the next round can begin. No Node ever sees the whole model, and none of them "
    "computes the prompt twice."
)
SCRIPT = {
    "model": "Example-30L",
    "n_layers": 30,
    "answer": [f" {word}" for word in ANSWER.split(" ")],
    "decode_ms": 18,
    "prefill_ms_per_row": 8,
}


async def take(tab: Visit, path: Path) -> None:
    await tab.page.screenshot(path=path)
    print(path)


async def pictures(cluster: Cluster, browser: Any, folder: Path) -> None:
    url = cluster.gateway.url
    async with visit(browser, url, scheme="dark", device_scale_factor=1.5) as tab:
        await tab.open()
        await tab.ask(QUESTION + CONTEXT)
        await tab.phase("prefill")
        await tab.page.wait_for_selector(".hop:nth-child(3) .cells.passing")
        await take(tab, folder / "prefill.png")
        await tab.phase("decode")
        await tab.page.wait_for_timeout(4500)
        await take(tab, folder / "chat.png")
        await tab.phase("completed", 60)
    async with visit(browser, url, scheme="light", device_scale_factor=1.5) as tab:
        await tab.open("cluster")
        await tab.page.wait_for_selector(".why table")
        await take(tab, folder / "cluster.png")
        await tab.open("join")
        await tab.page.wait_for_selector(".outlook .figure")
        await take(tab, folder / "join.png")
    async with visit(browser, url, scheme="light", width=375, device_scale_factor=2) as tab:
        await tab.open()
        await tab.ask(QUESTION)
        await tab.phase("decode")
        await tab.page.wait_for_timeout(2500)
        await tab.page.evaluate("document.getElementById('main').scrollTo(0, 0)")
        await take(tab, folder / "phone.png")
        await tab.page.click("#stop")
    async with visit(browser, url, scheme="dark", device_scale_factor=1.5) as tab:
        await tab.open()
        await tab.ask(QUESTION)
        await tab.phase("decode")
        await tab.page.wait_for_timeout(2000)
        cluster.nodes[2].signal(signal.SIGKILL)
        await tab.page.wait_for_selector(".failure")
        await tab.page.wait_for_selector(".hop.lost")
        await tab.page.wait_for_timeout(700)  # colours change slowly
        await take(tab, folder / "node-lost.png")
        await tab.page.click("#tabs a[href='#/cluster']")
        log = tab.page.locator(".card.bad .log-head button").first
        await log.click()
        await tab.page.locator(".card.bad").screenshot(path=folder / "log.png")
        print(folder / "log.png")


async def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as state:
        layers = ("0:10", "10:20", "20:30", "10:20")
        settings = {"prefill_chunk_max": 64, "tracker_expiry_s": 2}
        async with (
            scripted_cluster(Path(state), layers=layers, script=SCRIPT, settings=settings) as cluster,
            chromium() as browser,
        ):
            await pictures(cluster, browser, folder)


if __name__ == "__main__":
    to = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "pictures"
    to.mkdir(parents=True, exist_ok=True)
    asyncio.run(main(to))
