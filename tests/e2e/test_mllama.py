"""Llama 3.2 Vision in the running engine: tokens equal transformers', whatever is done about images and their pages."""

from __future__ import annotations

import asyncio
import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from aengine import AsyncEngine, RequestOutput, SamplingParams
from aengine.errors import InvalidRequest, RequestTooLarge, StepFailed
from aengine.types import MediaInput
from tests.e2e.conftest import config, last, run_all
from tests.e2e.serving import serve
from tests.e2e.tiny_mllama import IMAGE_TOKEN, TILE_TOKENS, Reference, make_model, picture

TOKENS = 16
TIE = 1e-4  # a divergence counts as equal only where the reference's own best two logits are closer than this
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
BOS = 256
LONG = "The quick brown fox jumps over the lazy dog, and the lazy dog does not mind it at all. "

Prompt = tuple[list[int], list[Image.Image]]


def prompt(*parts: str | Image.Image, first: bool = False) -> Prompt:
    """Ids and images; the beginning-of-text id stands before them, or (`first`) behind the first placeholder."""
    ids, images = [], []
    for part in parts:
        if isinstance(part, str):
            ids += list(part.encode())
        else:
            ids.append(IMAGE_TOKEN)
            images.append(part)
    ids.insert(1 if first else 0, BOS)
    return ids, images


SMALL, WIDE, TALL, BIG = picture(1), picture(2, 80, 30), picture(3, 20, 90), picture(4, 56, 56)
# No token before the first image: here transformers and the original implementation mean the same.
IMAGE_FIRST: list[Prompt] = [
    prompt(SMALL, "What is this?", first=True),
    prompt(WIDE, LONG, "Describe it.", first=True),
    prompt(BIG, "one", TALL, "two", SMALL, "three", first=True),
    prompt(WIDE, SMALL, BIG, LONG, TALL, TALL, "Compare them.", first=True),
]
TEXT_FIRST: list[Prompt] = [
    prompt("Look: ", BIG, " and tell."),
    prompt(LONG, LONG, WIDE),
    prompt("A", SMALL, "B", WIDE, TALL, "C", BIG),
    prompt(LONG, SMALL, LONG, WIDE, LONG, SMALL, "?"),
]
TEXT_ONLY: list[Prompt] = [prompt("Just text."), prompt(LONG, LONG), prompt("x")]
ALL = IMAGE_FIRST + TEXT_FIRST + TEXT_ONLY


class World:
    """The model folder, transformers' run as it is and with the original's mask, and the engine's golden tokens."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        make_model(folder)
        self.folder = folder
        self.plain = Reference(folder, original=False)
        self.original = Reference(folder, original=True)
        self.golden: list[list[int]] = []

    def config(self, **changes: Any) -> Any:
        base = {"model": str(self.folder), "max_model_len": 512, "kv_bytes": 8 * 2**20, "max_batched_tokens": 128}
        return config(**(base | changes))

    def check(self, made: Prompt, tokens: list[int], reference: Reference) -> None:
        """Each token is the reference's choice after those before it."""
        ids, images = made
        logits = reference.logits(ids + tokens[:-1], images, len(ids))[len(ids) - 1 :]
        best = logits.topk(2)
        for i, token in enumerate(tokens):
            gap = float(best.values[i, 0] - best.values[i, 1])
            assert token == int(best.indices[i, 0]) or gap < TIE, f"token {i}: {token} is not best, gap {gap:.2e}"

    def check_all(self, outputs: list[RequestOutput]) -> None:
        """The golden tokens, or others where the reference has a tie."""
        for made, output, golden in zip(ALL, outputs, self.golden, strict=True):
            if output.outputs[0].token_ids != golden:
                self.check(made, output.outputs[0].token_ids, self.original)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    made = World(tmp_path_factory.mktemp("mllama") / "tiny-vision")

    async def golden() -> list[RequestOutput]:
        async with AsyncEngine(made.config()) as engine:
            return await run_all(engine, asked(ALL), GREEDY)

    made.golden = [output.outputs[0].token_ids for output in asyncio.run(golden())]
    return made


def asked(prompts: list[Prompt]) -> list[Any]:
    return [{"prompt_token_ids": ids, "images": images} if images else ids for ids, images in prompts]


def ask(made: Prompt) -> Any:
    return asked([made])[0]


# ---- tokens


def test_tokens_equal_transformers_generate(world: World) -> None:
    """Unchanged transformers, with its own cache; prompts where nothing stands before the first image."""
    for made, golden in zip(ALL, world.golden, strict=True):
        if made in IMAGE_FIRST or made in TEXT_ONLY:
            assert golden == world.plain.generate(*made, TOKENS)


def test_tokens_equal_transformers_with_the_original_mask(world: World) -> None:
    for made, golden in zip(ALL, world.golden, strict=True):
        world.check(made, golden, world.original)


def test_the_image_decides(world: World) -> None:
    """The checks above could not fail if images did not change tokens."""
    outcomes = {tuple(world.original.generate(prompt(image, "What?")[0], [image], TOKENS)) for image in (SMALL, BIG)}
    outcomes.add(tuple(world.original.generate(prompt("What?")[0], [], TOKENS)))
    assert len(outcomes) == 3
    assert len({tuple(tokens) for tokens in world.golden}) == len(ALL)


@pytest.mark.parametrize("budget", [16, 64, 512])
async def test_chunked_prefill(world: World, budget: int) -> None:
    async with AsyncEngine(world.config(max_batched_tokens=budget)) as engine:
        world.check_all(await run_all(engine, asked(ALL), GREEDY))


@pytest.mark.parametrize("depth", [0, 2])
async def test_depth(world: World, depth: int) -> None:
    async with AsyncEngine(world.config(depth=depth)) as engine:
        world.check_all(await run_all(engine, asked(ALL), GREEDY))


async def test_reference_kernels_one_at_a_time_and_no_cache(world: World) -> None:
    async with AsyncEngine(world.config(kernels="reference", max_num_seqs=1, prefix_caching=False)) as engine:
        world.check_all(await run_all(engine, asked(ALL), GREEDY))
        stats = engine.stats()
        assert stats.media_computed == stats.media_items == sum(len(images) for _, images in ALL)


async def test_hot_cache(world: World) -> None:
    """The second pass finds every image, and all but the ends of the prompts."""
    async with AsyncEngine(world.config()) as engine:
        world.check_all(await run_all(engine, asked(ALL), GREEDY))
        before = engine.stats()
        assert before.media_computed == 4  # four different images, in 16 places
        world.check_all(await run_all(engine, asked(ALL), GREEDY))
        after = engine.stats()
        assert after.media_computed == before.media_computed
        assert after.media_items > before.media_items
        reusable = sum((len(ids) - 1) // 16 * 16 for ids, _ in ALL)
        assert after.prefix_hits - before.prefix_hits >= reusable


async def test_a_tiny_pool_preempts_and_resumes_with_images(world: World) -> None:
    """31 pages of 16 KiB: prompts of up to 24 pages, and their images, drive each other out."""
    prompts = ALL + IMAGE_FIRST + TEXT_FIRST
    async with AsyncEngine(world.config(kv_bytes=32 * 16384, max_model_len=384, max_batched_tokens=64)) as engine:
        for _ in range(6):  # how many run at once, and so who is driven out, depends on when images are ready
            outputs = await run_all(engine, asked(prompts), GREEDY)
            world.check_all(outputs[: len(ALL)])
            for made, output in zip(prompts[len(ALL) :], outputs[len(ALL) :], strict=True):
                golden = world.golden[ALL.index(made)]
                if output.outputs[0].token_ids != golden:
                    world.check(made, output.outputs[0].token_ids, world.original)
            if engine.stats().preemptions:
                break
        assert engine.stats().preemptions > 0
        assert engine._parts is not None
        engine._parts.scheduler.cache.check()


async def test_native_kernels_give_the_same_bits_in_any_batch(world: World) -> None:
    """Log-probabilities of the output, alone and beside others, in whole and in small chunks."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)

    async def logprobs(**changes: Any) -> list[list[float]]:
        async with AsyncEngine(world.config(kernels="native", **changes)) as engine:
            outputs = await run_all(engine, asked(ALL), params)
        return [[told.logprob for told in output.outputs[0].logprobs or []] for output in outputs]

    assert await logprobs() == await logprobs(max_num_seqs=1, max_batched_tokens=16, prefix_caching=False)


# ---- sharing


async def test_same_image_with_other_text_shares_its_pages(world: World) -> None:
    async with AsyncEngine(world.config()) as engine:
        texts = ["What is this?", "Where was it taken?", "Which colours?", LONG]
        prompts = [prompt(BIG, text) for text in texts]
        outputs = await run_all(engine, asked(prompts), GREEDY)
        for made, output in zip(prompts, outputs, strict=True):
            world.check(made, output.outputs[0].token_ids, world.original)
        stats = engine.stats()
        assert (stats.media_items, stats.media_computed) == (4, 1)
        cross = pages_of(engine, "cross")
        assert cross.cached + cross.live == -(-4 * TILE_TOKENS // 16)


async def test_another_image_with_the_same_text_never_hits(world: World) -> None:
    text = LONG + LONG
    async with AsyncEngine(world.config()) as engine:
        await last(engine, ask(prompt(BIG, text)), GREEDY)
        other = prompt(picture(5, 56, 56), text)
        output = await last(engine, ask(other), GREEDY)
        assert output.num_cached_tokens == 0
        assert engine.stats().media_computed == 2
        world.check(other, output.outputs[0].token_ids, world.original)


async def test_one_pixel_makes_another_image(world: World) -> None:
    changed = BIG.copy()
    red, green, blue = changed.getpixel((30, 40))
    changed.putpixel((30, 40), (red ^ 1, green, blue))
    async with AsyncEngine(world.config()) as engine:
        first, second = await engine.read_images([BIG, changed])
        assert first.digest != second.digest
        for image in (BIG, changed):
            await last(engine, ask(prompt(image, LONG)), GREEDY)
        assert engine.stats().media_computed == 2


async def test_cache_salt_separates_images_too(world: World) -> None:
    async with AsyncEngine(world.config()) as engine:
        for salt in ("tenant a", "tenant b", "tenant a"):
            output = await last(engine, ask(prompt(BIG, LONG)), GREEDY, cache_salt=salt)
        assert output.num_cached_tokens > 0
        assert engine.stats().media_computed == 2


async def test_text_only_requests_hold_no_cross_pages(world: World) -> None:
    async with AsyncEngine(world.config()) as engine:
        await run_all(engine, asked(TEXT_ONLY), GREEDY)
        assert pages_of(engine, "cross").slabs == 0
        assert pages_of(engine, "full").cached > 0


async def test_a_chat_that_shows_its_image_again(world: World) -> None:
    """The second turn brings the first image a second time, and another one."""

    def user(text: str, *images: Image.Image) -> dict[str, Any]:
        parts = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images]
        return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}

    async with AsyncEngine(world.config()) as engine:
        chat = [user(LONG, BIG)]
        first = await final(engine.chat(chat, GREEDY))
        chat += [{"role": "assistant", "content": "It is noise."}, user("And now?", BIG, WIDE)]
        second = await final(engine.chat(chat, GREEDY))
        assert engine.stats().media_computed == 2
        assert second.num_cached_tokens >= len(first.prompt_token_ids) // 16 * 16 - 16
        for output, images in ((first, [BIG]), (second, [BIG, BIG, WIDE])):
            world.check((output.prompt_token_ids, images), output.outputs[0].token_ids, world.original)


async def test_choices_of_one_prompt_share_the_image(world: World) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=8, ignore_eos=True)
    async with AsyncEngine(world.config()) as engine:
        output = await last(engine, ask(prompt(BIG, LONG)), params)
        assert len({tuple(choice.token_ids) for choice in output.outputs}) > 1
        assert engine.stats().media_computed == 1


# ---- forms of images and refusals


async def test_forms_of_one_image(world: World, tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    BIG.save(path)
    palette = BIG.convert("P", palette=Image.Palette.ADAPTIVE, colors=256)
    async with AsyncEngine(world.config()) as engine:
        forms = [BIG, np.asarray(BIG), path.read_bytes(), data_url(BIG)]
        read = await engine.read_images([*forms, str(path), path], files=True)
        assert len({image.digest for image in read}) == 1
        assert (await engine.read_images([palette]))[0].digest != read[0].digest
        text = "<|image|>" + LONG
        by_text = await last(engine, {"prompt": text, "images": [path]}, GREEDY)
        messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": LONG}]}]
        by_messages = await last(engine, {"messages": messages, "images": [path]}, GREEDY)
        assert by_text.prompt_token_ids[:2] == [BOS, IMAGE_TOKEN]
        for output in (by_text, by_messages):
            world.check((output.prompt_token_ids, [BIG]), output.outputs[0].token_ids, world.original)


async def test_refusals_name_the_numbers(world: World, tmp_path: Path) -> None:
    async with AsyncEngine(world.config(kv_bytes=16 * 16384, max_model_len=128)) as engine:

        async def refused(asked: Any, match: str, kind: type[Exception] = InvalidRequest, **params: Any) -> None:
            with pytest.raises(kind, match=match):
                await last(engine, asked, SamplingParams(**({"max_tokens": 4} | params)))

        await refused({"prompt": "no placeholder", "images": [BIG]}, "0 image placeholders .* for 1 images")
        await refused({"prompt": "<|image|> and <|image|>", "images": [BIG]}, "2 image placeholders .* for 1 images")
        await refused({"prompt": "<|image|>"}, "1 image placeholders .* for 0 images")
        await refused([IMAGE_TOKEN + 1], "not in")
        await refused({"prompt": "<|image|>", "images": ["https://example.org/a.png"]}, "nothing is fetched")
        await refused({"prompt": "<|image|>", "images": [b"not an image"]}, "image 0 cannot be decoded")
        await refused({"prompt": "<|image|>", "images": ["data:image/png;base64,@@"]}, "base64")
        await refused({"prompt": "<|image|>", "images": [BIG]}, "prompt_logprobs", prompt_logprobs=1)
        many = {"prompt": "<|image|>" * 40, "images": [BIG] * 40}
        numbers = r"45 tokens and 40 images of 800 entries in all need 3 \+ 80 KV pages"
        await refused(many, numbers, RequestTooLarge)
        await refused(many, "40 images", RequestTooLarge, max_tokens=None)
        stranger = [{"role": "user", "content": [{"type": "image", "image": str(tmp_path)}]}]
        await refused(stranger, "not an image")  # messages may come from strangers: no paths
        with pytest.raises(InvalidRequest, match="not an image"):
            await final(engine.chat(stranger))
        fitted = await last(engine, {"prompt": "<|image|>", "images": [BIG]}, SamplingParams(max_tokens=None, seed=1))
        assert fitted.finished


async def test_a_model_without_vision_refuses_images(world: World) -> None:
    async with AsyncEngine(world.config(device="sim")) as engine:
        with pytest.raises(InvalidRequest, match="takes text only") as refusal:
            await last(engine, {"prompt": "x", "images": [BIG]}, GREEDY)
        assert refusal.value.param == "messages"


async def test_penalties_and_images(world: World) -> None:
    """The placeholder is part of the history, but has no logit."""
    params = SamplingParams(
        temperature=0.0, max_tokens=8, repetition_penalty=1.3, presence_penalty=0.5, ignore_eos=True
    )
    async with AsyncEngine(world.config()) as engine:
        output = await last(engine, ask(prompt(BIG, LONG)), params)
        assert len(output.outputs[0].token_ids) == 8


async def test_an_image_that_fails_on_the_device_fails_its_request_alone(world: World) -> None:
    async with AsyncEngine(world.config()) as engine:
        (good,) = await engine.read_images([BIG])
        arrays = dict(good.arrays) | {"pixel_values": good.arrays["pixel_values"][:, :1]}
        bad = MediaInput(b"bad" * 8, good.tokens, arrays)
        made = prompt(BIG, LONG)

        async def fails() -> None:
            with pytest.raises(StepFailed, match="image 0 cannot be computed"):
                await last(engine, {"prompt_token_ids": made[0], "images": [bad]}, GREEDY)

        *_, output = await asyncio.gather(fails(), fails(), last(engine, ask(made), GREEDY))
        world.check(made, output.outputs[0].token_ids, world.original)
        assert engine._parts is not None
        engine._parts.scheduler.cache.check()


# ---- server


def test_a_data_url_through_the_server(world: World) -> None:
    content = [{"type": "image_url", "image_url": {"url": data_url(BIG)}}, {"type": "text", "text": LONG}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    arguments = [str(world.folder), "--max-model-len", "512", "--kv-bytes", "8MiB", "--dtype", "float32"]
    with serve(*arguments) as server:
        answer: Any = server.post("/v1/chat/completions", body)
        ids, tokens = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
        assert ids.count(IMAGE_TOKEN) == 1
        world.check((ids, [BIG]), tokens, world.original)
        remote = {"type": "image_url", "image_url": {"url": "http://example.org/a.png"}}
        status, error = post_error(server.url, body | {"messages": [{"role": "user", "content": [remote]}]})
        assert status == 400
        assert error["param"] == "messages[0].content[0].image_url"
        assert "nothing is fetched" in error["message"]


def post_error(url: str, body: Any) -> tuple[int, dict[str, Any]]:
    import json
    import urllib.error
    import urllib.request

    request = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(request, timeout=60)
    return refusal.value.code, json.load(refusal.value)["error"]


def data_url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


async def final(outputs: Any) -> RequestOutput:
    return [output async for output in outputs][-1]


def pages_of(engine: AsyncEngine, group: str) -> Any:
    assert engine._parts is not None
    stats = engine._parts.scheduler.cache.stats()
    return next(one for one in stats.pool.groups if one.name == group)
