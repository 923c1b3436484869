"""The chat page, used as a person uses it, in headless Chromium."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.chromium import browser, open_page
from tests.e2e.serving import Server, serve

pytestmark = pytest.mark.skipif(browser() is None, reason="no Chromium on PATH (.ci/run installs Debian's chromium)")

STATE = "document.querySelector('#status').dataset.state"
IDLE = "document.querySelector('#stop').hidden"
TEXT = "document.querySelector('#messages').innerText"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve("--max-model-len", "2048") as running:
        yield running


@pytest.fixture
def shots(tmp_path: Path) -> Path:
    """Screenshots go where a developer asked for them, else they are thrown away."""
    return Path(os.environ.get("SCREENSHOTS", tmp_path))


async def test_chat_stop_and_reload(server: Server, shots: Path) -> None:
    async with open_page(server.url + "/") as page:
        await page.until("document.querySelector('#prompt') !== null")
        await page.until("document.querySelector('#model').options.length > 0")
        await page.type("#prompt", "What is the capital of France? Answer in one sentence.")
        await page.key("Enter", 13)
        await page.until("!document.querySelector('#stop').hidden")
        await page.until(f"{IDLE} && {TEXT}.includes('Paris')")
        stats = await page.js(TEXT + " + document.querySelector('#stats').innerText")
        assert "TTFT" in stats
        assert "tok" in stats
        await page.screenshot(shots / "chat.png")

        await page.type("#prompt", "Count from 1 to 500, one number a line.")
        await page.click("#send")
        await page.until("!document.querySelector('#stop').hidden")
        await page.until(f"{TEXT}.length > 200")
        await page.click("#stop")
        await page.until(IDLE, 10)
        server.wait_idle(10)

        await page.call("Page.reload")
        await page.until(f"document.querySelector('#messages') && {TEXT}.includes('Paris')")
        await page.screenshot(shots / "reload.png")


async def test_an_error_is_shown_in_words(server: Server, shots: Path) -> None:
    async with open_page(server.url + "/") as page:
        await page.until("document.querySelector('#model') && document.querySelector('#model').options.length > 0")
        await page.type("#prompt", "word " * 3000)
        await page.click("#send")
        await page.until(f"{TEXT}.includes('2048')", 30)
        await page.screenshot(shots / "error.png")


async def test_the_page_sees_that_the_server_has_gone(shots: Path) -> None:
    with serve("--device", "sim", "--max-model-len", "2048") as gone:
        async with open_page(gone.url + "/") as page:
            await page.until(f"document.querySelector('#status') && {STATE} === 'ready'")
            gone.process.kill()
            await page.until(f"{STATE} === 'down'", 30)
            await page.screenshot(shots / "gone.png")
