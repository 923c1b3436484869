"""gradio's load_chat, used in a headless Chromium as a person uses it: two questions, each answered."""

from __future__ import annotations

import os
import sys

import gradio
from common import BASE, MODEL, check, get, run_checks

sys.path.insert(0, os.environ["AENGINE_ROOT"])
from tests.e2e.chromium import new_tab, running_browser

LAST = "[...document.querySelectorAll('.bot.message')].at(-1)?.innerText.trim() ?? ''"


def finished():
    """Requests that the server has ended with a stop token."""
    lines = [line for line in get("/metrics").splitlines() if line.startswith("vllm:request_success_total")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


@check
async def two_questions_in_the_page():
    app = gradio.load_chat(BASE, model=MODEL, token="any", file_types=None)
    _, url, _ = app.launch(prevent_thread_lock=True, quiet=True, server_name="127.0.0.1")
    with running_browser() as port:
        async with new_tab(port) as page:
            await page.go(url)
            await page.until("document.querySelector('textarea')", 60)
            for i, question in enumerate(("Say hello.", "And goodbye."), start=1):
                await page.type("textarea", question)
                await page.key("Enter")
                if i == 1:  # the model may say nothing to the second
                    await page.until(f"({LAST}).length > 2", 90)
                for _ in range(400):
                    if finished() >= i:
                        break
                    await page.js("new Promise(done => setTimeout(done, 250))")
                assert finished() == i, (i, finished(), await page.js("document.body.innerText"))
                await page.js("new Promise(done => setTimeout(done, 2000))")  # the page takes a question again
            shown = await page.js("document.body.innerText")
    app.close()
    assert "Say hello." in shown
    assert "And goodbye." in shown
    assert "Error" not in shown, shown


run_checks()
