"""The chat page where things go wrong: pages left, other tabs, broken streams and storage, texts made to stall it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.e2e.chat_page import ANSWERED, IDLE, NOTICE, TEXT, ask, needs_chromium, reload, say
from tests.e2e.chromium import CONTROL, SHIFT, Page, new_tab
from tests.e2e.scripted import Refusal, Reply, Script, scripted

pytestmark = needs_chromium

LAST = "[...document.querySelectorAll('#messages .assistant:last-child button')]"
BUTTONS = f"{LAST}.map((button) => button.getAttribute('aria-label') ?? button.innerText)"
FOCUSED = "document.activeElement.getAttribute('aria-label') ?? document.activeElement.innerText"
NAMES = "[...document.querySelectorAll('#conversations .open')].map((name) => name.innerText)"
BELOW = "(({ scrollHeight, scrollTop, clientHeight }) => scrollHeight - scrollTop - clientHeight)"
SCROLLED = f"{BELOW}(document.querySelector('#scroll'))"
# Records that no version of the page wrote.
SPOIL = """new Promise((done) => { indexedDB.open("aengine").onsuccess = ({ target: { result: database } }) => {
    const spoiling = database.transaction("conversations", "readwrite"), store = spoiling.objectStore("conversations");
    const loop = [{id: "a", parent: "a", role: "user", content: "x"}];
    for (const value of [{id: "1"}, {id: 2, nodes: []}, {id: "3", nodes: [null]}, {id: "4", nodes: loop}])
        store.put(value);
    spoiling.oncomplete = () => { database.close(); done(); };
}; })"""
DRAWN = """(async (text) => {
    const { Markdown } = await import("/static/markdown.js");
    const box = document.createElement("div"), markdown = new Markdown(box);
    markdown.draw(text.slice(0, -3), false);
    markdown.draw(text, true);
    let depth = 0;
    for (let at = box; at; at = at.lastElementChild) depth += 1;
    return [depth, box.textContent.length];
})"""
STALLING = {
    "deletion that may begin anywhere": "~a~~" * 20_000,
    "a list in a list": "\n".join("  " * i + "- l" for i in range(300)),
    "a quotation in a quotation": "> " * 1000 + "deep",
    "quotations and lists": "> - " * 500 + "deep",
}


async def press(page: Page, name: str) -> None:
    await page.js(f"{LAST}.find((button) => button.innerText === {json.dumps(name)}).click()")


async def test_an_answer_whose_page_was_left_goes_on(tab: Page) -> None:
    begun = [f"word{i} " for i in range(30)]
    async with scripted(Script([Reply(begun, hold=True), Reply(["rest"]), Reply([], hold=True)])) as script:
        await tab.open(script.url)
        await say(tab, "First")
        await tab.until(f"{TEXT}.includes('word29')")
        await tab.reload()  # within the two seconds after which the page keeps what came
        await tab.until(f"{TEXT}.includes('word29') && {TEXT}.includes('not finished')")
        await press(tab, "Go on")
        await tab.until(f"{IDLE} && {TEXT}.includes('word29 rest')")
        assert script.bodies[1]["continue_final_message"]
        await say(tab, "Second")
        await tab.until(f"!({IDLE})")
        await reload(tab)
        await tab.until(f"({NOTICE}).includes('not finished')")
        assert await tab.js(BUTTONS) == ["Ask again"]


async def test_what_was_thought_or_called_before_a_break_is_not_kept_twice(tab: Page) -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "weather", "arguments": '{"city": 1}'}}
    half = {"index": 0, "id": "c1", "function": {"name": "weather", "arguments": '{"ci'}}
    thought, broken = {"reasoning_content": "first "}, Reply([{"tool_calls": [half]}], cut=True)
    again = Reply([{"reasoning_content": "second "}, {"tool_calls": [call]}], "tool_calls")
    async with scripted(Script([Reply([thought], hold=True), broken, again])) as script:
        await tab.open(script.url)
        await say(tab, "Weather?")
        await tab.until("document.querySelector('.thinking')")
        await tab.key("Escape")
        await tab.until(f"({NOTICE}).includes('Stopped before the first word of the answer')")
        await press(tab, "Ask again")
        await tab.until(f"({NOTICE}).includes('ended before the answer was complete')")
        assert await tab.js("document.querySelector('.tool form, .thinking')") is None  # half a call asks for nothing
        await press(tab, "Retry")
        await tab.until(f"{IDLE} && document.querySelector('.tool form')")
        assert await tab.js("document.querySelector('.thinking .inner').textContent") == "second "
        assert json.loads(await tab.js("document.querySelector('.tool pre').textContent")) == {"city": 1}
        assert script.bodies[2]["messages"] == [{"role": "user", "content": "Weather?"}]


async def test_two_tabs_keep_what_either_wrote(tab: Page, port: int) -> None:
    answers = [Reply(["zero"]), Reply(["one"], hold=True), Reply(["two"])]
    async with scripted(Script(answers)) as script, new_tab(port, beside=tab) as other:
        await tab.open(script.url)
        await other.open(script.url)
        await tab.call("Page.bringToFront")  # a tab behind another draws nothing
        await ask(tab, "Question")
        await other.until(f"({NAMES}).length")
        await other.click("#conversations .open")
        await say(tab, "here")
        await tab.until(f"{TEXT}.includes('one')")
        await other.call("Page.bringToFront")
        await other.until(f"{TEXT}.includes('here')")
        await ask(other, "there")
        await tab.call("Page.bringToFront")
        await tab.key("Escape")
        await tab.until(IDLE)
        for page in (tab, other):
            await page.call("Page.bringToFront")
            await reload(page)
            await page.until(f"{TEXT}.includes('there') && {TEXT}.includes('two')")
            assert "one" in await page.js(TEXT)
        await tab.call("Page.bringToFront")
        await tab.click("#conversations [aria-label^=Delete]")
        await tab.key("Enter")
        await other.until(f"{TEXT} === '' && ({NAMES}).length === 0")
        assert other.faults == []


async def test_focus_and_what_is_being_written_stay(tab: Page) -> None:
    slow = Reply(["word "] * 5, step_s=0.05)
    full = Refusal(429, "full", {"Retry-After": "9"})
    async with scripted(Script([Reply(["one"]), slow, slow, full, Reply(["end"])])) as script:
        await tab.open(script.url)
        await ask(tab, "First")
        await tab.click("[aria-label^='Edit']")
        await say(tab, "Second")
        await tab.until(f"!({IDLE})")
        assert await tab.js("document.querySelector('.editor .primary').disabled")
        await tab.click("#conversations [aria-label^=Rename]")
        await tab.call("Input.insertText", text="half")
        await tab.until(f"{IDLE} && document.querySelector('#conversations input').value === 'half'")
        await tab.key("Enter")
        assert await tab.js(NAMES) == ["half"]
        assert await tab.js("document.querySelector('.editor textarea').value") == "First"

        await say(tab, "Third")
        await tab.js("document.querySelector('[aria-label=\"Copy the answer\"]').focus()")
        await tab.until(f"{IDLE} && {TEXT}.includes('Third')")
        assert await tab.js(FOCUSED) == "Copy the answer"
        await say(tab, "Fourth")
        await tab.until(f"({NOTICE}).includes('again in 9 s')")
        await tab.js("document.querySelector('.notice button').focus()")
        await tab.until(f"({NOTICE}).includes('again in 8 s')")
        assert await tab.js(FOCUSED) == "Try now"
        await tab.key("Enter")
        await tab.until(f"{IDLE} && {TEXT}.includes('end')")


async def test_broken_streams_are_said_plainly(tab: Page) -> None:
    odd = "something that is not part of an answer"
    cases: list[tuple[Reply, str]] = [
        (Reply(["part", b'data: {"choices": [\n\n']), odd),
        (Reply(["part", b"data: null\n\n"]), odd),
        (Reply([{"tool_calls": {"a": 1}}]), odd),
        (Reply(["part", b'data: {"error": {"code": "x"}}\n\n']), "broke the answer off"),
        (Reply(["part", b'data: {"error": {"message": "the worker died", "status": 500}}\n\n']), "the worker died"),
        (Reply([b"<html>502</html>\n"], cut=True), "ended before the answer was complete"),
        (Reply([]), "The answer is empty."),
    ]
    async with scripted(Script([reply for reply, _ in cases])) as script:
        await tab.open(script.url)
        for i, (reply, said) in enumerate(cases):
            await ask(tab, f"Question {i}")
            shown = await tab.js(
                "[...document.querySelectorAll('.assistant:last-child .notice')].map((n) => n.innerText)"
            )
            assert [said in text for text in shown] == [True], (reply, shown)
            await tab.click("#new-chat")


async def test_refusals_leave_a_way_on(tab: Page) -> None:
    now = Refusal(429, "full", {"Retry-After": "-5"})
    gone = Refusal(404, "there is no model small-model")
    async with scripted(Script([now, gone, Reply(["Here."])], key="secret")) as script:
        await tab.open(script.url, "key")
        for key, said in (
            ("wrong", "the API key is wrong"),
            ("schlüssel", "the API key is wrong"),
            ("secret", "ready"),
        ):
            await tab.js("document.querySelector('#api-key').select()")
            await tab.call("Input.insertText", text=key)
            await tab.js("document.querySelector('#api-key').blur()")
            await tab.until(f"document.querySelector('#status').innerText === {json.dumps(said)}")
        await tab.key("Escape")
        await say(tab, "Hello")
        await tab.until(f"({NOTICE}).includes('trying again in 2 s')")  # not at once, again and again
        assert len(script.bodies) == 1
        await press(tab, "Try now")
        await tab.until(f"({NOTICE}).includes('no model')")
        await press(tab, "Retry")
        await tab.until(f"{IDLE} && {TEXT}.includes('Here.')")


async def test_spoilt_and_missing_storage(tab: Page) -> None:
    none = (
        "for (const area of ['localStorage', 'sessionStorage', 'indexedDB'])"
        " Object.defineProperty(window, area, {get() { throw new DOMException('denied', 'SecurityError'); }});"
    )
    async with scripted(Script()) as script:
        await tab.open(script.url)
        await ask(tab, "Kept")
        await tab.js(SPOIL)
        await tab.js("""localStorage.setItem("aengine.settings", '{"temperature": 5, "stop": 7, "system": {}}')""")
        await tab.js("sessionStorage.clear()")
        await reload(tab)
        await tab.until(f"({NAMES}).length")
        assert await tab.js(NAMES) == ["Kept"]
        await ask(tab, "Asked")
        assert not await tab.js("document.querySelector('#unkept').checkVisibility()")
        await tab.call("Page.addScriptToEvaluateOnNewDocument", source=none)
        await tab.open(script.url)
        await ask(tab, "Unkept")
        await tab.until("document.querySelector('#unkept').innerText.includes('does not keep')")


async def test_the_view_follows_until_the_reader_scrolls_up(tab: Page) -> None:
    async with scripted(Script([Reply([f"line {i}\n\n" for i in range(3000)], step_s=0.005)])) as script:
        await tab.open(script.url)
        await say(tab, "Write")
        await tab.until(f"{TEXT}.includes('line 60')")
        assert await tab.js(SCROLLED) < 2
        await tab.js("document.querySelector('#scroll').focus()")
        await tab.key("ArrowUp")
        await tab.until(f"{SCROLLED} > 2000 && document.querySelector('#latest').checkVisibility()")
        await tab.key("End")
        await tab.until(f"{SCROLLED} < 2 && !document.querySelector('#latest').checkVisibility()")
        seen = await tab.js(f"{TEXT}.length")
        await tab.until(f"{TEXT}.length > {seen + 100}")
        assert await tab.js(SCROLLED) < 2


async def test_no_text_stalls_the_page(tab: Page) -> None:
    async with scripted(Script()) as script:
        await tab.open(script.url)
        for name, text in STALLING.items():
            async with asyncio.timeout(8):  # seconds; without bounds the first two took more
                depth, length = await tab.js(f"{DRAWN}({json.dumps(text)})")
            assert (depth < 80, length > 1000) == (True, True), name


async def test_keys_and_the_back_button(tab: Page) -> None:
    async with scripted(Script([Reply(["one"]), Reply(["two"])])) as script:
        await tab.open(script.url)
        await tab.js("document.querySelector('#prompt').focus()")
        await tab.call("Input.imeSetComposition", text="にほん", selectionStart=3, selectionEnd=3)
        ended: dict[str, Any] = {"key": "Enter", "windowsVirtualKeyCode": 229}  # ends the composition, sends nothing
        await tab.call("Input.dispatchKeyEvent", type="rawKeyDown", **ended)
        await tab.call("Input.insertText", text="日本")
        assert (await tab.js("document.querySelector('#prompt').value"), script.bodies) == ("日本", [])
        await tab.key("Enter")
        await tab.until(f"{ANSWERED} && {TEXT}.includes('one')")
        for _ in range(2):
            await tab.key("O", CONTROL | SHIFT)
        await ask(tab, "About pears")
        await tab.js("void history.back()")
        await tab.until(f"{TEXT}.includes('日本')")
        await tab.js("void history.forward()")
        await tab.until(f"{TEXT}.includes('pears')")


async def test_numbers_out_of_range_are_said_and_not_sent(tab: Page) -> None:
    async with scripted(Script()) as script:
        await tab.open(script.url)
        await tab.click("#open-settings")
        for id, value in {"temperature": "-3", "top_k": "1.5", "max_tokens": "64"}.items():
            await tab.js(f"document.querySelector('#{id}').select()")
            await tab.type("#" + id, value)
        fault = await tab.js("document.querySelector('#numbers-fault').innerText")
        assert [name in fault for name in ("Temperature", "Top k", "Max tokens")] == [True, True, False]
        await tab.key("Escape")
        await tab.until("!document.querySelector('#settings').open")
        await ask(tab, "Hello")
        sent = script.bodies[0]
        assert (sent["max_tokens"], sent["temperature"], sent.get("top_k")) == (64, 0.7, None)
