"""How long the chat page keeps the browser from drawing while an answer streams into it.

    python bench/page_frames.py --tokens 6000

Owns: answers of several shapes, the longest gap between two frames and the longest task of the page's thread.
Does not know: models; a scripted server streams pieces of four characters, one event each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.e2e.chromium import Page, new_tab, running_browser
from tests.e2e.scripted import Reply, Script, scripted

PIECE = 4  # characters, about what a token has
TEXT = "some plain words with *emphasis*, `code` and a [link](https://example.org/a), as models write them"
WORDS = TEXT.split()
WATCH = """
window.seen = {frames: [], tasks: []};
new PerformanceObserver((list) => list.getEntries().forEach(({ duration }) => seen.tasks.push(duration)))
    .observe({type: "longtask"});
let last = performance.now();
const tick = () => {
    const now = performance.now();
    seen.frames.push(now - last);
    last = now;
    requestAnimationFrame(tick);
};
requestAnimationFrame(tick);
"""
ENDED = "document.querySelector('#stop').hidden && document.querySelector('.figures')"


def line(number: int, words: int = 12) -> str:
    return f"{number}: " + " ".join(WORDS[(number + i) % len(WORDS)] for i in range(words))


def section(number: int) -> str:
    rows = "\n".join(f"| {i} | {line(i, 4)} |" for i in range(4))
    items = "\n".join(f"- {line(i)}" for i in range(5))
    code = "\n".join(f"    value_{i} = compute({i})  # {line(i, 5)}" for i in range(8))
    table = f"| a | b |\n|--|--|\n{rows}"
    return f"## Section {number}\n\n{line(number, 50)}\n\n{items}\n\n{table}\n\n```python\n{code}\n```\n\n"


def loose(number: int) -> str:
    return f"{number + 1}. {line(number)}\n\n   - {line(number)}\n\n   ```python\n   value = {number}\n   ```\n\n"


SHAPES: dict[str, Callable[[int], str]] = {
    "mixed": section,
    "list": lambda number: f"- {line(number)}\n",
    "loose list": loose,
    "table": lambda number: ("" if number else "| a | b |\n|--|--|\n") + f"| {number} | {line(number)} |\n",
    "code": lambda number: ("" if number else "```python\n") + f"{line(number)}\n",
    "paragraph": lambda number: line(number) + " ",
    "lines": lambda number: line(number) + "\n",
    "quote": lambda number: f"> {line(number)}\n",
}


def answer(shape: str, characters: int) -> str:
    text, number = "", 0
    while len(text) < characters:
        text += SHAPES[shape](number)
        number += 1
    return text[:characters]


async def watched(page: Page, text: str, pause_s: float) -> dict[str, list[float]]:
    pieces = [text[i : i + PIECE] for i in range(0, len(text), PIECE)]
    async with scripted(Script([Reply(pieces, step_s=pause_s)])) as script:
        await page.open(script.url)
        await page.js(WATCH)
        await page.type("#prompt", "Write")
        await page.key("Enter")
        await asyncio.sleep(len(pieces) * pause_s)  # asking costs the page's thread time too
        await page.until(ENDED, 120)
        await page.js("new Promise((done) => setTimeout(done, 300))")
        return dict(await page.js("window.seen"))


async def measured(args: argparse.Namespace) -> None:
    with running_browser() as port:
        for shape in args.shapes:
            async with new_tab(port) as page:
                text = answer(shape, args.tokens * PIECE)
                seen = await watched(page, text, args.pause_ms / 1e3)
            frames = sorted(seen["frames"])
            row = {
                "shape": shape,
                "tokens": args.tokens,
                "frames": len(frames),
                "median_ms": round(statistics.median(frames), 1),
                "p99_ms": round(frames[int(0.99 * len(frames))], 1),
                "longest_frame_ms": round(frames[-1], 1),
                "tasks_over_50_ms": len(seen["tasks"]),
                "longest_task_ms": round(max(seen["tasks"], default=0.0), 1),
            }
            print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--pause-ms", type=float, default=1.0, help="between two pieces")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    args = parser.parse_args()
    print(f"# {os.cpu_count()} cores", flush=True)
    asyncio.run(measured(args))


if __name__ == "__main__":
    main()
