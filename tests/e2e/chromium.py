"""A headless Chromium driven over its DevTools protocol: enough to use a page as a person does.

Invariants: after `go`, `open` and `reload` expressions are evaluated in the new document, never in the one before.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
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
    "--window-size=1100,800",
)
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), "ArrowUp": (38, ""), "End": (35, ""), "O": (79, "")}
CONTROL, SHIFT = 2, 8


def browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab. `requested`: the addresses it asked for; `faults`: what it logged as errors or threw."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, target: str = "", context: str = "") -> None:
        self._socket = socket
        self.context = context
        self._target = target  # also the id of its main frame
        self._next = 0
        self.requested: list[str] = []
        self.faults: list[str] = []
        self._loaded: set[str] = set()  # the tab's documents (their loaders' ids) that came to their load event

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._next += 1
        await self._socket.send_json({"id": self._next, "method": method, "params": params})
        while True:
            message = await self._next_message()
            if message.get("id") == self._next:
                assert "error" not in message, message
                return dict(message["result"])

    async def _next_message(self) -> dict[str, Any]:
        message: dict[str, Any] = await self._socket.receive_json(timeout=120)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.faults.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.faults.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["source"] == "security":
            self.faults.append(params["entry"]["text"])
        elif method == "Page.lifecycleEvent" and (params["frameId"], params["name"]) == (self._target, "load"):
            self._loaded.add(params["loaderId"])

    async def js(self, expression: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str, seconds: float = 60) -> None:
        """Wait until a JavaScript expression is truthy."""
        async with asyncio.timeout(seconds):
            while not await self.js(f"Boolean({expression})"):
                await asyncio.sleep(0.02)

    async def go(self, url: str) -> None:
        """Another document, loaded."""
        loader = (await self.call("Page.navigate", url=url))["loaderId"]
        while loader not in self._loaded:
            await self._next_message()

    async def reload(self) -> None:
        """The same address again, loaded. A condition that holds in the old document says nothing of the new one."""
        old = (await self.call("Page.getFrameTree"))["frameTree"]["frame"]["loaderId"]
        seen = self._loaded | {old}
        await self.call("Page.reload")
        while self._loaded <= seen:
            await self._next_message()

    async def open(self, url: str, state: str = "ready") -> None:
        """The chat page, once it shows that state of the server."""
        await self.go(url)
        await self.until(f"document.querySelector('#status')?.dataset.state === '{state}'")

    async def type(self, selector: str, text: str) -> None:
        await self.js(f"document.querySelector({json.dumps(selector)}).focus()")
        await self.call("Input.insertText", text=text)

    async def click(self, selector: str) -> None:
        await self.js(f"document.querySelector({json.dumps(selector)}).click()")

    async def key(self, key: str, modifiers: int = 0) -> None:
        code, text = KEYS[key]
        for kind in ("keyDown", "keyUp"):
            fields = {"key": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
            await self.call("Input.dispatchKeyEvent", type=kind, text=text if kind == "keyDown" else "", **fields)

    async def size(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **size)

    async def prefers(self, scheme: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self.call("Emulation.setEmulatedMedia", features=[feature])

    async def screenshot(self, path: Path) -> None:
        answer = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(answer["data"]))


@contextlib.contextmanager
def running_browser() -> Iterator[int]:
    """A browser; gives the port that its tabs are driven through."""
    program = browser()
    assert program is not None, "no Chromium: install Debian's chromium (.ci/run does)"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"], stderr=subprocess.DEVNULL
        )
        try:
            yield _port(Path(profile) / "DevToolsActivePort")
        finally:
            process.terminate()
            process.wait()


@contextlib.asynccontextmanager
async def new_tab(port: int, beside: Page | None = None) -> AsyncIterator[Page]:
    """A tab with storage of its own, or with that of the tab `beside`, which is then the later to go."""
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{port}/json/version") as response:
            address = (await response.json())["webSocketDebuggerUrl"]
        async with session.ws_connect(address, max_msg_size=0) as socket:
            whole = Page(socket)
            if beside is None:
                context = (await whole.call("Target.createBrowserContext"))["browserContextId"]
            else:
                context = beside.context
            created = await whole.call("Target.createTarget", url="about:blank", browserContextId=context)
            tab = f"ws://127.0.0.1:{port}/devtools/page/{created['targetId']}"
            async with session.ws_connect(tab, max_msg_size=0) as tab_socket:
                page = Page(tab_socket, created["targetId"], context)
                for domain in ("Page", "Network", "Runtime", "Log"):
                    await page.call(f"{domain}.enable")
                await page.call("Page.setLifecycleEventsEnabled", enabled=True)
                yield page
            if beside is None:
                await whole.call("Target.disposeBrowserContext", browserContextId=context)


def _port(file: Path) -> int:
    deadline = time.monotonic() + 120
    while not file.exists() or "\n" not in file.read_text():
        assert time.monotonic() < deadline, "the browser did not start"
        time.sleep(0.05)
    return int(file.read_text().splitlines()[0])
