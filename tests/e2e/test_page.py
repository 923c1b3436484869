"""The chat page, used as a person uses it, in one headless Chromium.

Most tests talk to a scripted server, which can think, call tools and fail on demand; one talks to a model.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.chat_page import IDLE, NOTICE, TEXT, ask, needs_chromium, reload
from tests.e2e.chromium import CONTROL, SHIFT, Page, new_tab
from tests.e2e.page_texts import HOSTILE, MARKDOWN, NESTED
from tests.e2e.scripted import Refusal, Reply, Script, scripted
from tests.e2e.serving import serve

pytestmark = needs_chromium

WIDE = "document.documentElement.scrollWidth > innerWidth"
WRITTEN = "document.querySelector('#messages .assistant:last-child .md')?.innerText.length > 20"
DRAWN = """(async (text) => {
    const { Markdown } = await import("/static/markdown.js");
    const [grown, whole] = [0, 1].map(() => document.createElement("div"));
    const growing = new Markdown(grown);
    for (let end = 1; end < text.length; end += 1) growing.draw(text.slice(0, end), false);
    growing.draw(text, true);
    new Markdown(whole).draw(text, true);
    return [grown.innerHTML, whole.innerHTML];
})"""


async def shows_the_timeline(page: Page, url: str) -> None:
    """Of a server that has made steps within the last 30 s."""
    await page.go(url + "/trace")
    await page.js(
        "(() => { const box = document.querySelector('#window'); box.value = '30';"
        " box.dispatchEvent(new Event('change')); })()"
    )
    await page.until(
        "/^device busy [0-9.]+ %, bubbles [0-9.]+ % = /.test(document.querySelector('#sentence').innerText)"
    )
    assert await page.js("/^[0-9]+ steps of [0-9.]+ ms/.test(document.querySelector('#facts').innerText)")
    sums = await page.js("[...document.querySelectorAll('#sums th')].map((name) => name.innerText)")
    assert "device: step" in sums
    assert {name.split(":")[0] for name in sums} >= {"loop", "output", "device"}
    left, right = await page.js(
        "(() => { const canvas = document.querySelector('#canvas'), pen = canvas.getContext('2d'), names = 92;"
        " const inked = (row, from, to) => pen.getImageData(from * devicePixelRatio, row * canvas.height / 6,"
        " (to - from) * devicePixelRatio, canvas.height / 6).data.some((value, at) => at % 4 === 3 && value > 0);"
        " const lanes = [0, 1, 2, 3, 4, 5], width = canvas.clientWidth;"
        " return [lanes.map((row) => inked(row, 0, names)), lanes.map((row) => inked(row, names + 1, width))]; })()"
    )
    assert left == [True] * 6  # a name each
    assert right[:3] == [True] * 3  # loop, output, device: spans


async def test_with_a_model_chat_stop_and_reload(tab: Page, port: int, shots: Path) -> None:
    with serve("--max-model-len", "2048") as server:
        await tab.open(server.url + "/")
        await tab.click("#open-settings")
        await tab.js("document.querySelector('#temperature').select()")
        await tab.call("Input.insertText", text="0")  # the same answers in each run
        await tab.key("Escape")
        await tab.until("!document.querySelector('#settings').open")
        await tab.type("#prompt", "What is the capital of France? Answer in one sentence.")
        await tab.key("Enter")
        await tab.until(f"{IDLE} && {TEXT}.includes('Paris')")
        figures = await tab.js("document.querySelector('.figures').innerText")
        for part in ("TTFT", "tokens/s", "prompt", "cached"):
            assert part in figures
        await tab.type("#prompt", "Write a long story about a dragon.")
        await tab.click("#send")
        await tab.until(f"!{IDLE} && {WRITTEN}")
        await tab.key("Escape")
        await tab.until(IDLE)
        server.wait_idle()
        async with new_tab(port) as other:
            await shows_the_timeline(other, server.url)
            await other.screenshot(shots / "timeline.png")
            assert other.faults == []
        await reload(tab)
        await tab.until(f"{TEXT}.includes('Paris')")
        await tab.screenshot(shots / "model.png")
        await tab.type("#prompt", "word " * 3000)
        await tab.click("#send")
        await tab.until(f"({NOTICE}).includes('2048')")
        server.process.kill()
        await tab.click(".notice button")
        await tab.until(f"({NOTICE}).includes('cannot be reached')")
        await tab.until("document.querySelector('#status').dataset.state === 'down'")


async def test_markdown_as_it_streams(tab: Page, shots: Path) -> None:
    pieces = [MARKDOWN[i : i + 3] for i in range(0, len(MARKDOWN), 3)]
    async with scripted(Script([Reply(pieces, step_s=0.001)])) as script:
        await tab.open(script.url)
        await ask(tab, "Show me")
        found = await tab.js(
            "['em','p code','ol li','td[align=right]','.block pre','a[href=\"https://example.org/a\"][target=_blank]']"
            ".map((css) => document.querySelectorAll('.md ' + css).length)"
        )
        assert found == [1, 1, 2, 1, 1, 1]
        assert await tab.js("document.querySelector('.block pre').innerText") == 'def f():\n    return "<b>"'
        streamed = await tab.js("document.querySelector('.md').innerHTML")
        await reload(tab)
        await tab.until("document.querySelector('.md td')")
        assert await tab.js("document.querySelector('.md').innerHTML") == streamed
        await tab.screenshot(shots / "markdown.png")


async def test_what_grows_is_what_is_drawn_at_once(tab: Page) -> None:
    texts = [NESTED, "> " * 40 + "deep\n\n" + "".join("  " * i + "- l\n" for i in range(14)), "*a " * 60 + "*b*" * 60]
    async with scripted(Script()) as script:
        await tab.open(script.url)
        for text in texts:
            grown, whole = await tab.js(f"{DRAWN}({json.dumps(text)})")
            assert grown == whole
            if text is NESTED:
                for part in (
                    "<li><p>☑ done</p><p>more</p></li>",
                    '<ol dir="auto" start="3">',
                    '<td align="center">e</td>',
                ):
                    assert part in whole


async def test_hostile_output_is_inert_and_nothing_else_is_asked(tab: Page) -> None:
    thoughts = [{"reasoning_content": HOSTILE}]
    async with scripted(Script([Reply([*thoughts, *HOSTILE.splitlines(keepends=True)])])) as script:
        await tab.open(script.url)
        await ask(tab, HOSTILE)
        await tab.js("document.querySelectorAll('.message a:not([href^=https])').forEach((link) => link.click())")
        bad = "script, img, svg:not(.icon svg), style, iframe, form, [onerror], [onclick], [style]:not(textarea)"
        assert (
            await tab.js(
                f"[...document.querySelectorAll('.message')].flatMap((m) => [...m.querySelectorAll('{bad}')]).length"
            )
            == 0
        )
        assert (
            await tab.js(
                "[...document.querySelectorAll('.md [class]')].filter((n) => n.matches('.md .message')).length"
            )
            == 0
        )
        links = await tab.js("[...document.querySelectorAll('.message a[href]')].map((link) => link.protocol)")
        assert set(links) <= {"https:"}
        assert await tab.js("window.broken") is None
        assert "window.broken = 1" in await tab.js(TEXT)
        assert all(url.startswith((script.url, "data:", "https://example.org/spy")) for url in tab.requested)


async def test_versions_of_answers_and_questions(tab: Page) -> None:
    answers = [Reply(["first"]), Reply(["second"]), Reply(["third"])]
    async with scripted(Script(answers)) as script:
        await tab.open(script.url)
        await ask(tab, "Question")
        await tab.click("[aria-label='Another answer']")
        await tab.until(f"{IDLE} && {TEXT}.includes('second')")
        assert [m["content"] for m in script.bodies[1]["messages"]] == ["Question"]
        assert "2 / 2" in await tab.js(TEXT)
        await tab.click("[aria-label='Earlier version']")
        assert "first" in await tab.js(TEXT)

        await tab.js("document.querySelector('#prompt').focus()")
        await tab.key("ArrowUp")
        await tab.js("document.activeElement.select()")
        await tab.call("Input.insertText", text="Changed")
        await tab.key("Enter")
        await tab.until(f"{IDLE} && {TEXT}.includes('third')")
        assert [m["content"] for m in script.bodies[2]["messages"]] == ["Changed"]
        await tab.click("[aria-label='Earlier version']")
        assert "first" in await tab.js(TEXT)
        await reload(tab)
        await tab.until(f"{TEXT}.includes('first')")


async def test_thoughts_tools_and_settings(tab: Page) -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "weather", "arguments": '{"city": '}}
    rest = {"index": 0, "function": {"arguments": '"Paris"}'}}
    first = Reply(
        [{"reasoning_content": "hidden "}, "Look:", {"tool_calls": [call]}, {"tool_calls": [rest]}], "tool_calls"
    )
    async with scripted(Script([first, Reply(["21 degrees"])])) as script:
        await tab.open(script.url)
        await tab.click("#open-settings")
        values = {"system": "Be brief", "top_k": "40", "stop-strings": "END", "tools": '[{"type": "function"}]'}
        for id, value in values.items():
            await tab.type("#" + id, value)
        await tab.key("Escape")
        await tab.until("!document.querySelector('#settings').open")
        await ask(tab, "Weather?")
        assert await tab.js("document.querySelector('details.thinking').open") is False
        assert '"city": "Paris"' in await tab.js("document.querySelector('.tool pre').innerText")
        await tab.type(".tool textarea", "21 C")
        await tab.click(".tool form button")
        await tab.until(f"{IDLE} && {TEXT}.includes('21 degrees')")
        sent = script.bodies[1]
        assert [m["role"] for m in sent["messages"]] == ["system", "user", "assistant", "tool"]
        assert sent["messages"][2]["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"}'
        assert sent["messages"][3] == {"role": "tool", "content": "21 C", "tool_call_id": "c1"}
        assert (sent["top_k"], sent["stop"], sent["tools"]) == (40, ["END"], [{"type": "function"}])


async def test_errors_in_place(tab: Page, shots: Path) -> None:
    full = Refusal(429, "the queue is full", {"Retry-After": "60"})
    wrong = Refusal(400, "top_k is -7, not in [-1, 9]")
    async with scripted(Script([full, wrong, Reply(["part"], hold=True)], key="secret")) as script:
        await tab.open(script.url, "key")
        await tab.until("document.activeElement.id === 'api-key'")
        await tab.call("Input.insertText", text="secret")
        await tab.key("Enter")
        await tab.key("Escape")
        await tab.until("!document.querySelector('#settings').open")
        await tab.until("document.querySelector('#status').dataset.state === 'ready'")
        await tab.type("#prompt", "Hello")
        await tab.key("Enter")
        await tab.until(f"/the queue is full – trying again in [3-6][0-9] s/.test({NOTICE})")
        await tab.click(".notice button")
        await tab.until(f"({NOTICE}).includes('top_k is -7')")
        await tab.screenshot(shots / "error.png")
        await tab.click(".notice button")
        await tab.until(f"!{IDLE} && {TEXT}.includes('part')")
        await tab.key("Escape")
        await tab.until(f"{IDLE} && {TEXT}.includes('stopped')")
        assert len(script.bodies) == 3


async def test_a_loading_server_is_waited_for(tab: Page) -> None:
    async with scripted(Script([Reply(["Here."])], phase="loading (weights done)")) as script:
        await tab.go(script.url)
        await tab.until("document.querySelector('#loading-text')?.innerText.includes('weights done')")
        assert await tab.js("document.querySelector('#loading progress').checkVisibility()")
        await tab.type("#prompt", "Early")
        await tab.click("#send")
        await tab.until(f"({NOTICE}).includes('trying again')")
        script.phase = "ready"
        await tab.until(f"{IDLE} && {TEXT}.includes('Here.')")
        assert await tab.js("document.querySelector('#loading').hidden")


async def test_conversations_by_keyboard(tab: Page) -> None:
    async with scripted(Script([Reply(["one"]), Reply(["two"])])) as script:
        await tab.open(script.url)
        await ask(tab, "About apples")
        await tab.key("O", CONTROL | SHIFT)
        assert await tab.js("document.activeElement.id") == "prompt"
        assert await tab.js(TEXT) == ""
        await ask(tab, "About pears")
        names = "[...document.querySelectorAll('#conversations .open')].map((n) => n.innerText)"
        assert await tab.js(names) == ["About pears", "About apples"]
        await tab.type("#search", "apples")
        assert await tab.js(names) == ["About apples"]
        await tab.key("Tab")
        assert await tab.js("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        await tab.key("Enter")
        assert "one" in await tab.js(TEXT)

        await tab.click("#conversations [aria-label^=Rename]")
        await tab.call("Input.insertText", text="Fruit")
        await tab.key("Enter")
        assert await tab.js(names) == ["Fruit"]  # what is in it is searched too
        await tab.js("document.querySelector('#search').select(); document.execCommand('delete')")
        assert await tab.js(names) == ["About pears", "Fruit"]
        await tab.js(
            "window.saved = '';"
            "URL.createObjectURL = (blob) => { blob.text().then((text) => window.saved = text); return '#'; }"
        )
        await tab.click("#export")
        await tab.until("window.saved")
        assert len(json.loads(await tab.js("window.saved"))["conversations"]) == 2
        for _ in range(2):
            await tab.click("#conversations [aria-label^=Delete]")
            await tab.key("Enter")
        assert await tab.js(names) == []
        await tab.js(
            "(() => { const files = new DataTransfer(); files.items.add(new File([window.saved], 'a.json'));"
            " const field = document.querySelector('#import-file'); field.files = files.files;"
            " field.dispatchEvent(new Event('change')); })()"
        )
        await tab.until(f"({names}).length === 2")


async def test_on_a_phone_and_in_the_dark(tab: Page, shots: Path) -> None:
    wide = (
        "| " + " | ".join(f"column{i}" for i in range(20)) + " |\n" + "|--" * 20 + "|\n\n```\n" + "x" * 300 + "\n```\n"
    )
    async with scripted(Script([Reply([wide, "w" * 400])])) as script:
        await tab.size(320, 640)
        await tab.prefers("dark")
        await tab.open(script.url)
        await ask(tab, "u" * 200)
        assert not await tab.js(WIDE)
        await tab.js("document.querySelector('.md .table').scrollIntoView()")
        background = "getComputedStyle(document.body).backgroundColor"
        dark = await tab.js(background)
        await tab.screenshot(shots / "phone.png")
        await tab.click("#open-sidebar")
        assert await tab.js("document.querySelector('#frame').inert")
        await tab.key("Escape")
        assert await tab.js("document.activeElement.id") == "open-sidebar"
        await tab.click("#open-settings")
        assert not await tab.js(WIDE)
        await tab.key("Escape")
        await tab.until("!document.querySelector('#settings').open")
        await tab.click("#theme")
        assert await tab.js(background) != dark
        await reload(tab)
        await tab.until("document.querySelector('.md')")
        assert await tab.js(background) != dark


async def test_images_when_the_model_takes_them(tab: Page) -> None:
    async with scripted(Script(modalities=("text", "image"))) as script:
        await tab.open(script.url)
        await tab.until("!document.querySelector('#attach').hidden")
        await tab.js(
            "(async () => { const canvas = new OffscreenCanvas(3000, 20); canvas.getContext('2d').fillRect(0, 0, 9, 9);"
            " const file = new File([await canvas.convertToBlob()], 'a.png', {type: 'image/png'});"
            " const files = new DataTransfer(); files.items.add(file);"
            " const field = document.querySelector('#image-file'); field.files = files.files;"
            " field.dispatchEvent(new Event('change')); })()"
        )
        await tab.until("document.querySelector('#attached img')")
        await ask(tab, "What is it?")
        image, text = script.bodies[0]["messages"][0]["content"]
        assert image["image_url"]["url"].startswith("data:image/jpeg;base64,")  # made smaller than it was
        assert text == {"type": "text", "text": "What is it?"}
        await tab.until("document.querySelector('.images img').naturalWidth === 2048")
