"""gradio's load_chat, used in a headless Chromium as a person uses it: two questions, each answered in the page."""

from __future__ import annotations

import json
import os
import sys

import gradio
from aiohttp import ClientSession, web
from common import BASE, MODEL, check, run_checks

sys.path.insert(0, os.environ["AENGINE_ROOT"])
from tests.e2e.chromium import new_tab, running_browser

LAST = "[...document.querySelectorAll('.bot.message')].at(-1)?.innerText.trim() ?? ''"
QUESTIONS = ("Say hello.", "What is the capital of France?")


class Recorder:
    """Stands between gradio and the server: passes all on, keeps what each stream said, makes sampling greedy."""

    def __init__(self):
        self.answers = []  # one per stream that ended with [DONE]

    async def passed(self, request):
        data = await request.read()
        if data:
            data = json.dumps({**json.loads(data), "temperature": 0}).encode()
        headers = {"Content-Type": request.content_type, "Authorization": request.headers.get("Authorization", "")}
        url = BASE.removesuffix("/v1") + request.path
        async with (
            ClientSession() as session,
            session.request(request.method, url, data=data, headers=headers) as answer,
        ):
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            whole = b""
            async for piece in answer.content.iter_any():
                whole += piece
                await response.write(piece)
        lines = [line[6:] for line in whole.decode().splitlines() if line.startswith("data: ")]
        if lines and lines[-1] == "[DONE]":
            choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
            assert len(choices) > 3, "streamed in one piece"
            self.answers.append("".join(choice["delta"].get("content") or "" for choice in choices))
        return response


def letters(text):
    """What Markdown leaves of a text when it is drawn."""
    return "".join(filter(str.isalpha, text))


@check
async def the_page_shows_what_was_streamed():
    recorder = Recorder()
    between = web.Application()
    between.router.add_route("*", "/{path:.*}", recorder.passed)
    runner = web.AppRunner(between)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    base = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    app = gradio.load_chat(base, model=MODEL, token="any", file_types=None)
    _, url, _ = app.launch(prevent_thread_lock=True, quiet=True, server_name="127.0.0.1")
    with running_browser() as port:
        async with new_tab(port) as page:
            await page.go(url)
            await page.until("document.querySelector('textarea')", 60)
            for i, question in enumerate(QUESTIONS, start=1):
                await page.type("textarea", question)
                await page.key("Enter")
                for _ in range(400):
                    if len(recorder.answers) >= i:
                        break
                    await page.js("new Promise(done => setTimeout(done, 250))")
                assert len(recorder.answers) == i, await page.js("document.body.innerText")
                wanted = letters(recorder.answers[-1])
                assert len(wanted) > 5, recorder.answers
                await page.until(f"({LAST}).replace(/[^\\p{{L}}]/gu, '') === {json.dumps(wanted)}", 30)
                await page.js("new Promise(done => setTimeout(done, 2000))")  # the page takes a question again
            shown = await page.js("document.body.innerText")
    app.close()
    await runner.cleanup()
    assert "Paris" in recorder.answers[1]
    assert all(question in shown for question in QUESTIONS)
    assert "Error" not in shown, shown


run_checks()
