"""A real browser for tests: Debian's Chromium through Playwright, and what every page that it opens must keep to."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
WHY_NOT = f"no Chromium at {CHROMIUM} (Debian: apt install chromium)"
# All text whose contrast with what is behind it is below 4.5 to 1, as [words, contrast].
PALE = """() => {
  const rgb = (text) => {
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = 1;
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.fillStyle = text;
    context.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const light = (colour) => {
    const [r, g, b] = colour.map((v) => v / 255).map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = rgb(getComputedStyle(at).backgroundColor);
      if (colour[3] > 0.99) return colour;
    }
    return [255, 255, 255, 1];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const shown = walker.currentNode.data.trim() && element.checkVisibility();
    if (!shown || element.closest(".unseen, noscript, .skip")) continue;
    const [text, back] = [light(rgb(getComputedStyle(element).color)), light(behind(element))];
    const contrast = (Math.max(text, back) + 0.05) / (Math.min(text, back) + 0.05);
    if (contrast < 4.5) found.push([walker.currentNode.data.trim().slice(0, 40), Number(contrast.toFixed(2))]);
  }
  return found;
}"""


def is_there() -> bool:
    """Whether a browser can be started here."""
    try:
        import playwright.async_api  # noqa: F401
    except ImportError:
        return False
    return Path(CHROMIUM).exists()


@asynccontextmanager
async def chromium() -> AsyncIterator[Any]:
    """A running browser, without a window."""
    from playwright.async_api import async_playwright

    async with async_playwright() as started:
        # As root, as in containers, its own sandbox cannot start. It loads nothing but the page under test.
        browser = await started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            await browser.close()


class Visit:
    """One tab at a Gateway's page. `faults`: what it wrote as errors, and what it asked of others than its origin."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.url = url
        self.faults: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda message: self._said(message.type, message.text))
        page.on("pageerror", lambda error: self.faults.append(f"exception: {error}"))
        page.on("request", lambda request: self._requested(request.url))

    def _said(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.faults.append(f"{kind}: {text}")

    def _requested(self, url: str) -> None:
        self.asked.append(url)
        if not url.startswith(f"{self.url}/"):
            self.faults.append(f"asked of another origin: {url}")

    async def open(self, view: str = "chat") -> None:
        await self.page.goto(f"{self.url}/#/{view}")
        await self.page.wait_for_selector(f"main.view-{view}")

    async def live(self) -> None:
        await self.page.wait_for_selector(".link .pill.good")

    async def ask(self, text: str) -> None:
        """Write it, and send it by the keyboard, once the model is known."""
        await self.page.wait_for_selector("select")
        await self.page.fill("#prompt", text)
        await self.page.keyboard.press("Enter")

    async def phase(self, name: str, within_s: float = 20.0) -> None:
        await self.page.wait_for_selector(f".phase.phase-{name}", timeout=within_s * 1000)

    async def text(self, selector: str) -> str:
        return str(await self.page.inner_text(selector))


@asynccontextmanager
async def visit(
    browser: Any, url: str, *, scheme: str = "light", width: int = 1280, **more: Any
) -> AsyncIterator[Visit]:
    """A tab of its own, with nothing kept from others."""
    size = {"width": width, "height": 860 if width > 500 else 720}
    context = await browser.new_context(viewport=size, color_scheme=scheme, **more)
    try:
        yield Visit(await context.new_page(), url)
    finally:
        await context.close()
