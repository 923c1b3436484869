"""Writes smollm2-135m.json: what transformers, with its own GGUF reader, answers to the 32 prompts, in fp32.

    python -m tests.golden.regenerate

Per prompt: `prompt_ids`, the 64 greedy `tokens`, the log-probability of each (`logprobs`), and by how much it leads the
runner-up (`gaps`). Tokens are proposed by the engine, which is fast, and judged by one forward of transformers over
prompt and proposal: where its argmax is the proposed token at every position, these are what generate would choose.
Where it is not, generate is asked. About two minutes; needed again only when prompts or model files change.
"""

from __future__ import annotations

import asyncio
import json

import torch

from aengine import AsyncEngine, SamplingParams
from aengine.config import home
from aengine.models.store import resolve
from tests.e2e.conftest import config, run_all
from tests.e2e.prompts import PROMPTS
from tests.golden import SMOLLM2, TOKENS, Answer


async def proposals() -> list[tuple[list[int], list[int]]]:
    """(prompt ids, tokens) of the engine."""
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    async with AsyncEngine(config()) as engine:
        outputs = await run_all(engine, PROMPTS, greedy)
    return [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]


@torch.inference_mode()
def judge(model: torch.nn.Module, prompt: list[int], proposed: list[int]) -> Answer:
    logits = model(torch.tensor([prompt + proposed[:-1]])).logits[0, len(prompt) - 1 :].float()
    best = logits.topk(2)
    if best.indices[:, 0].tolist() != proposed:
        ids = torch.tensor([prompt])
        given = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **given)  # type: ignore[operator]
        return judge(model, prompt, out[0, len(prompt) :].tolist())
    gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
    logprobs = torch.log_softmax(logits, -1)[torch.arange(len(proposed)), proposed].tolist()
    return Answer(prompt, proposed, [round(x, 6) for x in logprobs], [round(x, 6) for x in gaps])


def main() -> None:
    from transformers import AutoModelForCausalLM

    asked = asyncio.run(proposals())
    path = resolve("smollm2-135m", home=home(), progress=None).path
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    lines = [json.dumps(vars(judge(model, prompt, tokens))) for prompt, tokens in asked]
    SMOLLM2.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
