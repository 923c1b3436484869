"""A headless Chromium driven over its DevTools protocol: enough to use a page as a person does."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
    "--window-size=1000,800",
)


def browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._next = 0

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._next += 1
        await self._socket.send_json({"id": self._next, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(timeout=60)
            if message.get("id") == self._next:
                assert "error" not in message, message
                return dict(message["result"])

    async def js(self, expression: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str, seconds: float = 60) -> Any:
        """Wait until a JavaScript expression is truthy."""
        async with asyncio.timeout(seconds):
            while not (value := await self.js(expression)):
                await asyncio.sleep(0.05)
        return value

    async def type(self, selector: str, text: str) -> None:
        await self.js(f"document.querySelector({json.dumps(selector)}).focus()")
        await self.call("Input.insertText", text=text)

    async def click(self, selector: str) -> None:
        await self.js(f"document.querySelector({json.dumps(selector)}).click()")

    async def key(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            text = "\r" if key == "Enter" and kind == "keyDown" else ""
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, text=text)

    async def screenshot(self, path: Path) -> None:
        answer = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(answer["data"]))


@contextlib.asynccontextmanager
async def open_page(url: str) -> AsyncIterator[Page]:
    program = browser()
    assert program is not None, "no Chromium: install Debian's chromium (.ci/run does)"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            program, *FLAGS, f"--user-data-dir={profile}", "about:blank", stderr=asyncio.subprocess.DEVNULL
        )
        try:
            port = await _port(Path(profile) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as response:
                    targets = await response.json()
                target = next(t for t in targets if t["type"] == "page")
                async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    await page.call("Page.enable")
                    await page.call("Page.navigate", url=url)
                    yield page
        finally:
            process.terminate()
            await process.wait()


async def _port(file: Path) -> int:
    async with asyncio.timeout(60):
        while not file.exists() or "\n" not in file.read_text():
            await asyncio.sleep(0.05)
    return int(file.read_text().splitlines()[0])
