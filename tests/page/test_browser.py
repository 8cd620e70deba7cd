"""The page in a real browser, at real processes: what a person sees, does, and hears of failures."""

from __future__ import annotations

import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import browser as browsers
from tests.support.browser import PALE, Visit, chromium, visit
from tests.support.cluster import Cluster, scripted_cluster, until
from tests.support.upstreams import stub_cluster

pytestmark = [
    pytest.mark.skipif(not browsers.is_there(), reason=browsers.WHY_NOT),
    pytest.mark.timeout(180),
]
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
SCRIPT = {
    "n_layers": 30,
    "answer": [" one", " two", " three", " four", " five."],
    "answers": [
        {"contains": "code", "pieces": ["Look:\n\n", "```python\n", "x = 1\n", "```\n", "so."]},
        {"contains": "hostile", "pieces": [HOSTILE]},
        {"contains": "endless", "pieces": [f" w{i}" for i in range(3000)]},
    ],
    "decode_ms": 10,
    "prefill_ms_per_row": 0.5,
}
LAYERS = ("0:10", "10:20", "20:30")
KEYS = ("first-key-0123456789", "second-key-0123456789")


@pytest.fixture(scope="module")
async def browser(anyio_backend: str) -> AsyncIterator[Any]:
    async with chromium() as started:
        yield started


@pytest.fixture(scope="module")
async def cluster(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("page")
    async with scripted_cluster(folder, layers=LAYERS, script=SCRIPT, settings={"prefill_chunk_max": 32}) as running:
        yield running


async def picture(tab: Visit, folder: Path, name: str) -> None:
    await tab.page.screenshot(path=folder / f"{name}.png")


async def test_a_chat_to_its_last_token(browser: Any, cluster: Cluster, tmp_path: Path) -> None:
    async with visit(browser, cluster.gateway.url) as tab:
        await tab.open()
        await tab.page.wait_for_selector(".route.planned .hop >> nth=2")
        await tab.ask("Count to five. " + "This is what comes before. " * 10)
        await tab.phase("completed")
        assert (await tab.text(".message.assistant .prose")).strip() == "one two three four five."
        assert await tab.page.input_value("#prompt") == ""
        hops = tab.page.locator(".hop")
        assert [await hops.nth(i).locator(".layer-words").inner_text() for i in range(3)] == [
            *("layers 0:10", "layers 10:20", "layers 20:30")
        ]
        assert await tab.page.locator(".cells.lit").count() == 3
        assert "Longest piece: " in await tab.text(".longest-words")
        assert await tab.text("#announcer") == "The answer: one two three four five."
        await picture(tab, tmp_path, "chat")
        await tab.page.reload()
        await tab.page.wait_for_selector(".message.assistant")
        assert (await tab.text(".message.assistant .prose")).strip() == "one two three four five."
        assert tab.faults == []


async def test_prefill_is_seen_hop_by_hop(browser: Any, cluster: Cluster, tmp_path: Path) -> None:
    async with visit(browser, cluster.gateway.url, scheme="dark") as tab:
        await tab.open()
        await tab.ask("Read. " + "A long text that takes its time, word by word. " * 60)
        await tab.phase("prefill")
        await tab.page.wait_for_selector(".hop .cells.passing")
        await picture(tab, tmp_path, "prefill")
        await tab.phase("completed", 60)
        done = await tab.page.locator(".chunks").first.get_attribute("aria-valuenow")
        assert done == await tab.page.locator(".chunks").first.get_attribute("aria-valuemax")
        assert tab.faults == []


@pytest.mark.parametrize("by", ["button", "escape"])
async def test_stop(browser: Any, cluster: Cluster, tmp_path: Path, by: str) -> None:
    async with visit(browser, cluster.gateway.url) as tab:
        await tab.open()
        await tab.ask(f"endless, ended by {by}")
        await tab.phase("decode")
        await tab.page.wait_for_selector(".message.assistant .prose")
        if by == "button":
            await tab.page.click("#stop")
        else:
            await tab.page.keyboard.press("Escape")
        await tab.page.wait_for_selector("#send", timeout=1000)
        await tab.phase("cancelled", 5)
        await cluster.until_free()
        assert await tab.text(".message .ended") == "Stopped."
        assert await tab.page.evaluate("document.activeElement.id") == "prompt"
        await picture(tab, tmp_path, f"stopped-{by}")
        assert tab.faults == []


async def test_what_a_model_writes_is_text(browser: Any, cluster: Cluster) -> None:
    async with visit(browser, cluster.gateway.url) as tab:
        await tab.open()
        await tab.ask("Be hostile.")
        await tab.phase("completed")
        assert await tab.text(".message.assistant .prose") == HOSTILE
        assert await tab.page.locator("main img, main script").count() == 0
        assert await tab.page.title() == "Chat – Shardline"
        await tab.ask("Now code.")
        await tab.page.wait_for_selector("figure.code")
        await tab.phase("completed")
        assert await tab.text("figure.code pre") == "x = 1"
        assert tab.faults == []


async def test_no_string_can_become_markup(browser: Any, cluster: Cluster) -> None:
    async with visit(browser, cluster.gateway.url) as tab:
        await tab.open()
        refused = await tab.page.evaluate(
            "() => { try { document.body.innerHTML = '<b>x</b>' } catch (error) { return error.name } }"
        )
        assert refused == "TypeError"


async def test_one_connection_shows_all(browser: Any, cluster: Cluster) -> None:
    async with visit(browser, cluster.gateway.url) as tab:
        await tab.open()
        await tab.live()
        for view in ("cluster", "sessions", "join", "chat"):
            await tab.page.click(f"#tabs a[href='#/{view}']")
            await tab.page.wait_for_selector(f"main.view-{view}")
        asked = [url for url in tab.asked if "/v1/" in url]
        assert asked == [f"{cluster.gateway.url}/v1/live"]
        assert tab.faults == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_view_is_readable_and_named(browser: Any, cluster: Cluster, tmp_path: Path, scheme: str) -> None:
    async with visit(browser, cluster.gateway.url, scheme=scheme, reduced_motion="reduce") as tab:
        await tab.open()
        await tab.ask("Count to five.")
        await tab.phase("completed")
        for view in ("chat", "cluster", "sessions", "join"):
            await tab.open(view)
            if view == "cluster":
                await tab.page.wait_for_selector(".layer-map")
                await tab.page.locator(".log-head button").first.click()
                await tab.page.wait_for_selector(".log-lines")
            if view == "join":
                await tab.page.wait_for_selector(".outlook .figure")
            if view == "sessions":
                await tab.page.locator(".session-head button").first.click()
                await tab.page.wait_for_selector(".details table")
            assert await tab.page.evaluate(PALE) == [], view
            assert await tab.page.locator("h1").count() == 1
            named = "button, a, input, select, textarea, [role=img], [role=region], [role=progressbar]"
            assert (
                await tab.page.evaluate(
                    """(named) => [...document.querySelectorAll(named)].filter((element) => element.checkVisibility()
                     && !(element.ariaLabel || element.labels?.length || element.textContent.trim()))
                     .map((element) => element.outerHTML.slice(0, 80))""",
                    named,
                )
                == []
            ), view
            await picture(tab, tmp_path, f"{view}-{scheme}")
        assert tab.faults == []


async def test_by_keyboard_alone(browser: Any, cluster: Cluster) -> None:
    async with visit(browser, cluster.gateway.url) as tab:
        await tab.open()
        await tab.live()
        await tab.page.keyboard.press("Tab")
        assert await tab.page.evaluate("document.activeElement.id") == "skip"
        await tab.page.keyboard.press("Enter")
        assert await tab.page.evaluate("document.activeElement.id") == "main"
        for _ in range(12):
            await tab.page.keyboard.press("Tab")
            if await tab.page.evaluate("document.activeElement.id") == "prompt":
                break
        await tab.page.keyboard.type("Count to five.")
        await tab.page.keyboard.press("Enter")
        await tab.phase("completed")
        assert await tab.page.evaluate("document.activeElement.id") == "prompt"
        assert tab.faults == []


async def test_the_width_of_a_phone(browser: Any, cluster: Cluster, tmp_path: Path) -> None:
    async with visit(browser, cluster.gateway.url, width=375, has_touch=True) as tab:
        await tab.open()
        await tab.ask("Count to five.")
        await tab.phase("completed")
        for view in ("chat", "cluster", "sessions", "join"):
            await tab.page.click(f"#tabs a[href='#/{view}']")
            await tab.page.wait_for_selector(f"main.view-{view}")
            if view == "cluster":
                await tab.page.wait_for_selector(".layer-map")
            widths = "[document.documentElement.scrollWidth, document.getElementById('main').scrollWidth]"
            assert await tab.page.evaluate(widths) == [375, 375], view
            await picture(tab, tmp_path, f"phone-{view}")
        await tab.open()
        await tab.ask("endless")
        await tab.phase("decode")
        await tab.page.wait_for_selector(".message.streaming .prose")
        # The route above has grown meanwhile: the answer is in view all the same.
        in_view = "document.querySelector('.message.streaming .prose').getBoundingClientRect().top < innerHeight - 150"
        await tab.page.wait_for_function(in_view, timeout=3000)
        await picture(tab, tmp_path, "phone-answer")
        await tab.page.click("#stop")
        assert tab.faults == []


async def test_a_node_killed_in_mid_answer(browser: Any, tmp_path: Path) -> None:
    settings = {"tracker_expiry_s": 2}
    async with scripted_cluster(tmp_path, layers=LAYERS, script=SCRIPT, settings=settings) as cluster:
        node = cluster.nodes[1].facts["node"]
        async with visit(browser, cluster.gateway.url, scheme="dark") as tab:
            await tab.open()
            await tab.ask("endless")
            await tab.phase("decode")
            await tab.page.wait_for_selector(".message.assistant .prose")
            cluster.nodes[1].signal(signal.SIGKILL)
            await tab.page.wait_for_selector(".failure")
            words = await tab.text(".failure")
            assert "A Node was lost" in words and node in words and "layers 10:20" in words.lower()
            assert "What to do:" in words and "node_lost" in words
            await tab.page.wait_for_selector(".hop.lost")
            assert (await tab.text(".hop.lost .hop-name")).startswith(node[:8])
            assert await tab.page.locator(".actions button").first.inner_text() == "Send again"
            await picture(tab, tmp_path, "node-lost")
            await tab.page.click("#tabs a[href='#/cluster']")
            await tab.page.wait_for_selector(".block.gap")
            assert await tab.text(".block.gap") == "10:20"
            await tab.page.wait_for_selector(".card.bad")
            assert node in await tab.text(".card.bad")
            await picture(tab, tmp_path, "cluster-with-a-gap")
            await tab.page.click("#tabs a[href='#/join']")
            assert "lacks layers 10:20" in await tab.text(".notice.bad")
            assert tab.faults == []


async def test_the_gateway_ends_and_is_back(browser: Any, tmp_path: Path) -> None:
    async with scripted_cluster(tmp_path, layers=("0:6",)) as cluster:
        port = cluster.gateway.url.rsplit(":", 1)[1]
        async with visit(browser, cluster.gateway.url) as tab:
            await tab.open("cluster")
            await tab.live()
            assert await cluster.gateway.end() == 0
            await tab.page.wait_for_selector(".notice.bad")
            await tab.page.wait_for_selector(".old")
            await cluster.start_gateway("--port", port)
            await tab.live()
            await tab.page.wait_for_selector(".old", state="detached")


async def test_an_api_key_is_asked_for_and_sees_its_own(browser: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("\n".join(KEYS))
    async with scripted_cluster(tmp_path, layers=("0:6",), gateway_arguments=["--api-keys", str(keys)]) as cluster:
        url = cluster.gateway.url
        async with visit(browser, url) as tab:
            await tab.open()
            await tab.page.fill("#key", "no key of this Gateway")
            await tab.page.keyboard.press("Enter")
            await tab.page.wait_for_selector(".key-form [role=alert]")
            await tab.page.fill("#key", KEYS[0])
            await tab.page.keyboard.press("Enter")
            await tab.live()
            await tab.ask("hello")
            await tab.phase("completed")
            await tab.open("sessions")
            await tab.page.wait_for_selector(".session")
            assert not [url for url in tab.asked if KEYS[0] in url]
        async with visit(browser, url) as other:
            await other.open("sessions")
            await other.page.fill("#key", KEYS[1])
            await other.page.keyboard.press("Enter")
            await other.live()
            await other.page.wait_for_selector(".empty >> nth=1")
            assert await other.page.locator(".session").count() == 0


async def test_nobody_looks_and_nobody_asks(browser: Any, tmp_path: Path) -> None:
    """The Tracker hears of the Gateway's looks while the page is open, and no more when it is closed."""
    async with scripted_cluster(tmp_path, layers=("0:6",)) as cluster:
        async with visit(browser, cluster.gateway.url) as tab:
            await tab.open("cluster")
            await tab.page.wait_for_selector(".layer-map")

        async def none_open() -> bool:
            import psutil

            ours = [c for c in psutil.Process(cluster.gateway.pid).net_connections() if c.status == "ESTABLISHED"]
            return not [c for c in ours if c.laddr and c.laddr.port == int(cluster.gateway.url.rsplit(":", 1)[1])]

        await until(none_open, 10)


async def test_the_log_of_a_node_stays_when_it_is_killed(browser: Any, tmp_path: Path) -> None:
    settings = {"tracker_expiry_s": 2}
    async with scripted_cluster(tmp_path, layers=LAYERS, script=SCRIPT, settings=settings) as cluster:
        node = cluster.nodes[1].facts["node"]
        card = f".card:has(code[title='{node}'])"
        async with visit(browser, cluster.gateway.url) as tab:
            await tab.open("cluster")
            await tab.page.click(f"{card} .log-head button")
            await tab.page.wait_for_selector(f"{card} .log-lines")
            assert "shard_state state=ready" in await tab.text(f"{card} .log-lines")
            before = await tab.text(f"{card} .log-lines")
            at_end = "(list) => list.scrollHeight - list.scrollTop - list.clientHeight < 2"
            assert await tab.page.locator(f"{card} .log-lines").evaluate(at_end)
            cluster.nodes[1].signal(signal.SIGKILL)
            await tab.page.wait_for_selector(f"{card}.bad")
            await picture(tab, tmp_path, "log-of-a-dead-node")
            assert before in await tab.text(f"{card} .log-lines")
            await tab.page.reload()
            await tab.page.click(f"{card} .log-head button")
            assert before in await tab.text(f"{card} .log-lines")
            assert tab.faults == []


async def test_a_log_is_text_also_of_a_node_that_nobody_lists(browser: Any, cluster: Cluster) -> None:
    async with visit(browser, cluster.gateway.url) as tab:
        await tab.open("cluster")
        await tab.page.wait_for_selector(".layer-map")
        lines = [{"n": n, "time": 1.0, "level": "error", "text": f"{n} {HOSTILE}"} for n in range(1, 251)]
        told = {"node": "n-gone", "lines": lines}
        await tab.page.evaluate("(told) => import('/page/store.js').then((store) => store.take('log', told))", told)
        card = ".gone .card"
        await tab.page.click(f"{card} .log-head button")
        await tab.page.wait_for_selector(f"{card} .log-lines li:last-child")  # it is drawn with the next frame
        assert await tab.page.locator(f"{card} .log-lines li").count() == 200
        assert await tab.text(f"{card} .log-lines li:last-child .words") == f"250 {HOSTILE}"
        assert "no longer listed" in await tab.text(card) and "200 warnings" in await tab.text(card)
        assert await tab.page.locator("main img, main script").count() == 0
        assert await tab.page.title() == "Cluster – Shardline"
        tell = "(told) => import('/page/store.js').then(({ state, take }) => (take('log', told), state.logs.size))"
        sizes = [await tab.page.evaluate(tell, {"node": f"n-{i}", "lines": lines[:1]}) for i in range(130)]
        assert max(sizes) == 128, "a page forgets those that were longest unheard"
        assert tab.faults == []


async def test_what_the_next_machine_would_change(browser: Any, cluster: Cluster) -> None:
    """The view's arithmetic with given numbers, and its words with those of the cluster."""
    async with visit(browser, cluster.gateway.url) as tab:
        await tab.open("join")
        await tab.page.wait_for_selector(".outlook .figure")
        words = await tab.text(".outlook")
        assert "does not make one answer faster" in words and "a copy of layers" in words
        assert "With memory for all 30 layers" in words
        ask = "(group) => import('/page/expected.js').then((module) => module.expected(group))"

        async def expected(**more: Any) -> Any:
            return await tab.page.evaluate(ask, {**GROUP, **more})

        found = await expected()
        assert (found["kind"], found["range"], found["now"], found["one"]) == ("copy", [5, 10], 20, 20)
        assert found["all"] == pytest.approx([1000 / 30, 1000 / 30 + 1000 / 20]) and found["whole"] == 25
        unlinked = {**GROUP["routes"][0], "edges": [{"ms": 5, "measured": True}, {"ms": 5, "measured": False}]}
        assert (await expected(routes=[unlinked]))["now"] is None
        guessed = [{**shard, "measured": False} for shard in GROUP["shards"]]
        assert await expected(shards=guessed) == {**found, "now": None, "one": None, "all": None, "whole": None}
        gap = await expected(shards=GROUP["shards"][:1], missing=[[5, 10]])
        # 10 ms measured, 10 ms assumed at 2 ms a layer, two hops of 5 ms.
        assert (gap["kind"], gap["range"], gap["one"], gap["whole"]) == ("gap", [5, 10], 1000 / 30, 50)
        assert (await expected(shards=GROUP["shards"][:1], missing=[[5, 10]], routes=[]))["one"] is None
        assert tab.faults == []


GROUP: dict[str, Any] = {
    "n_layers": 10,
    "missing": [],
    "shards": [
        {"node": "a", "layers": [0, 5], "usable": True, "measured": True, "decode_ms": 10},
        {"node": "b", "layers": [5, 10], "usable": True, "measured": True, "decode_ms": 30},
        {"node": "c", "layers": [0, 5], "usable": False, "measured": True, "decode_ms": 1},
    ],
    "routes": [
        {"nodes": ["a", "b"], "taken": True, "estimate_ms": 50, "edges": [{"ms": 5, "measured": True}] * 2},
    ],
}


async def test_of_a_model_behind_another_server_nothing_is_made_up(browser: Any, tmp_path: Path) -> None:
    """No layers, no time of a step, no gap that a Node could fill; also once that server is gone."""
    async with stub_cluster(tmp_path) as (cluster, stub), visit(browser, cluster.url) as tab:
        await tab.open()
        await tab.page.wait_for_selector(".route.planned .hop")
        await tab.ask("Hi")
        await tab.phase("completed")
        assert await tab.text(".layer-words") == "all layers"
        said = []
        for view in ("chat", "cluster", "sessions", "join"):
            await tab.open(view)
            if view == "cluster":
                await tab.page.wait_for_selector(".layer-map")
            if view == "sessions":
                await tab.page.locator(".session-head button").first.click()
                await tab.page.wait_for_selector(".details table")
            said.append(await tab.text("main"))
        await stub.die()
        await tab.open("join")
        await tab.page.wait_for_selector("text=has no Node that passes requests on to its server")
        said.append(await tab.text("main"))
        for text in said:
            assert not re.search(r"0:1\b|1 layer\b|0 threads|layers null|NaN|The Tracker gives them", text), text
        assert tab.faults == []
