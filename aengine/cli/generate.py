"""`aengine generate`: one prompt, one text.

Owns: reading the prompt, printing text or JSON.
Does not know: how tokens come about.
Invariants: stdout carries the text (or one JSON object) alone; notes go to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any

from aengine.cli.options import Parser, UsageError, add_sampling, add_settings, config_of, print_config
from aengine.cli.session import Engine, Factory, real_engine
from aengine.config import EngineConfig
from aengine.types import RequestOutput, SamplingParams


def parser() -> Parser:
    made = Parser("generate", "Complete one prompt with a model in this process and print the text.")
    made.add_argument("prompt", nargs="?", metavar="PROMPT", help="text to continue; absent or -: read from stdin")
    made.add_argument("--stream", action="store_true", help="print the text as it comes")
    made.add_argument("--json", action="store_true", help="print one JSON object: text, ids, counts, times")
    add_sampling(made, max_tokens=128)
    add_settings(made, server=False, model_flag=True)
    return made


def run(args: argparse.Namespace, factory: Factory = real_engine) -> int:
    config = config_of(args)
    if args.print_config:
        return print_config(config)
    if args.stream and args.json:
        raise UsageError("--stream and --json exclude each other")
    prompt = _prompt(args.prompt)
    sampling = SamplingParams(
        temperature=args.temperature, top_p=args.top_p, seed=args.seed, max_tokens=args.max_tokens
    )
    output = asyncio.run(_generate(config.engine, factory, prompt, sampling, stream=args.stream))
    if args.json:
        print(json.dumps(_as_json(prompt, output), ensure_ascii=False))
    else:
        print("" if args.stream else output.outputs[0].text)
    return 0


def _prompt(given: str | None) -> str:
    """Raises UsageError when there is none: what is piped in is one, a terminal that was not asked for is not."""
    if given is None and sys.stdin.isatty():
        raise UsageError("no prompt: give PROMPT, pipe a text in, or - to type one")
    text = sys.stdin.read().removesuffix("\n") if given in (None, "-") else given
    if not text:
        raise UsageError("the prompt is empty")
    return text


async def _generate(
    config: EngineConfig, factory: Factory, prompt: str, sampling: SamplingParams, *, stream: bool
) -> RequestOutput:
    engine = factory(config)
    try:
        await engine.start()
        for line in engine.report.lines:
            print(line, file=sys.stderr)
        return await _read(engine, prompt, sampling, stream=stream)
    finally:
        await engine.close()


async def _read(engine: Engine, prompt: str, sampling: SamplingParams, *, stream: bool) -> RequestOutput:
    shown = 0
    last: RequestOutput | None = None
    async for last in engine.generate(prompt, sampling):
        if stream:
            text = last.outputs[0].text
            print(text[shown:], end="", flush=True)
            shown = len(text)
    assert last is not None, "a request yields at least one output"
    return last


def _as_json(prompt: str, output: RequestOutput) -> dict[str, Any]:
    choice = output.outputs[0]
    return {
        "prompt": prompt,
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
        "completion_tokens": len(choice.token_ids),
        "ttft_s": output.ttft_s,
        "e2e_s": output.e2e_s,
    }
