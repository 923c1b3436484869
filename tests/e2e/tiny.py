"""Tiny random models in Hugging Face folders, with a tokenizer, beside their transformers twins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from aengine import RequestOutput
from aengine.engine.page_groups import kv_groups, state_groups
from aengine.engine.sizing import bytes_for, in_flight_tokens
from aengine.kernels.ops import state_specs
from aengine.models.loader import outline
from aengine.models.store import resolve
from tests.e2e.conftest import config

VOCAB = 97
TIE = 1e-4
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


class Tiny:
    """A model of transformers with random weights, and the folder the engine loads it from."""

    def __init__(self, model: Any, folder: Path, *, seed: int = 0) -> None:
        self.model = model.float().eval()
        self.folder = folder
        _randomise(self.model, seed)
        self.model.save_pretrained(folder)
        words = {f"t{index}": index for index in range(VOCAB)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(folder / "tokenizer.json"))

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """[len(ids), VOCAB], of one forward over the whole sequence."""
        with torch.inference_mode():
            return self.model(torch.tensor([list(ids)]), use_cache=False).logits[0]

    def config(self, **changes: Any) -> Any:
        """Engine settings for this model; `pool_of=(tokens, n)` gives pages for n sequences of that many tokens."""
        pool_of = changes.pop("pool_of", (512, 8))
        given = {"max_model_len": 512, "max_num_seqs": 16, "kv_bytes": 2**20} | changes
        made = config(model=str(self.folder), **given)
        files, page = resolve(str(self.folder), home=self.folder), made.cache.page_tokens
        model = outline(files, torch.float32)
        groups = kv_groups(model.attention, "float32", page) + state_groups(state_specs(model), page)
        tokens, count = pool_of
        each = bytes_for(groups, tokens, in_flight_tokens(made.scheduler))
        kv_bytes = int(count * each) + 2 * sum(group.payload_bytes for group in groups)
        return config(model=str(self.folder), **given | {"kv_bytes": kv_bytes})


def _randomise(model: Any, seed: int) -> None:
    """Weights far from neutral: norms and sinks that matter, attention that is not flat, distinct logits."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name:
                value.add_(torch.randn_like(value) * 0.3)
            elif "sinks" in name or "embed" in name:
                value.copy_(torch.randn_like(value))
            else:
                value.copy_(torch.randn_like(value) * 0.25)


def prompts(lengths: Sequence[int], *, seed: int = 0) -> list[list[int]]:
    """Random token ids; no two prompts begin alike."""
    rng = np.random.default_rng(seed)
    return [rng.integers(2, VOCAB, size=length).tolist() for length in lengths]


def assert_follows(outputs: Sequence[RequestOutput], reference: Any, *, tolerance: float = 2e-4) -> None:
    """Each output is what the reference would choose, by one forward over prompt and output; log-probabilities too."""
    for output in outputs:
        prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
        logits = reference.logits(prompt + tokens[:-1])[len(prompt) - 1 :]
        best = logits.topk(2)
        for at, token in enumerate(tokens):
            gap = float(best.values[at, 0] - best.values[at, 1])
            where = f"prompt of {len(prompt)}, token {at} at position {len(prompt) + at}"
            assert token == int(best.indices[at, 0]) or gap < TIE, f"{where}: gap {gap:.2e}"
        wanted = torch.log_softmax(logits, -1)
        for at, told in enumerate(output.outputs[0].logprobs or []):
            off = abs(told.logprob - float(wanted[at, told.token_id]))
            assert off < tolerance, f"prompt of {len(prompt)}, token {at}: log-probability off by {off:.2e}"
