"""What the tests of the chat page read on it and do with it."""

from __future__ import annotations

import json

import pytest

from tests.e2e.chromium import Page, browser

needs_chromium = pytest.mark.skipif(
    browser() is None, reason="no Chromium on PATH (.ci/run installs Debian's chromium)"
)

IDLE = "document.querySelector('#stop').hidden"
TEXT = "document.querySelector('#messages').textContent"  # whether it is in view, and laid out, or not
NOTICE = "document.querySelector('.notice')?.innerText ?? ''"
ANSWERED = f"{IDLE} && document.querySelector('#messages .assistant:last-child')"
# A transaction that comes behind all that the page began.
KEPT = """new Promise((done) => { indexedDB.open("aengine").onsuccess = ({ target: { result: database } }) => {
    const behind = database.transaction("conversations");
    behind.objectStore("conversations").count();
    behind.oncomplete = () => { database.close(); done(); };
}; })"""


async def say(page: Page, text: str) -> None:
    await page.type("#prompt", text)
    await page.key("Enter")


async def ask(page: Page, text: str) -> None:
    await say(page, text)
    await page.until(f"{ANSWERED} && {TEXT}.includes({json.dumps(text.strip())})")


async def reload(page: Page) -> None:
    """Loads the page again once the browser has kept what the old document gave it to keep."""
    await page.js(KEPT)
    await page.reload()
