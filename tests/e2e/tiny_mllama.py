"""A tiny random Llama 3.2 Vision as a model folder, and transformers' own run of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import MllamaConfig, MllamaForConditionalGeneration, PreTrainedTokenizerFast
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

SPECIAL = ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
VOCAB = 264
IMAGE_TOKEN = VOCAB
TILE, TILES, TILE_TOKENS = 28, 4, 5
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "cross_attention_layers": [1, 4],
    "max_position_embeddings": 2048,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_global_layers": 2,
    "attention_heads": 2,
    "image_size": TILE,
    "patch_size": 14,
    "max_num_tiles": TILES,
    "intermediate_layers_indices": [0, 2],
    "vision_output_dim": 96,
}
TEMPLATE = """{{ bos_token }}{% for message in messages %}
{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n' }}
{%- if message['content'] is string %}{{ message['content'] }}
{%- else %}{% for part in message['content'] %}
{%- if part['type'] == 'image' %}{{ '<|image|>' }}{% else %}{{ part['text'] }}{% endif %}
{%- endfor %}{% endif %}{{ '<|eot_id|>' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n' }}{% endif %}"""


def make_model(folder: Path, seed: int = 0) -> MllamaForConditionalGeneration:
    """Write model, tokenizer, template and preprocessor settings to `folder`."""
    torch.manual_seed(seed)
    model = MllamaForConditionalGeneration(
        MllamaConfig(vision_config=VISION, text_config=TEXT, image_token_index=IMAGE_TOKEN)
    )
    model = model.float().eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn_like(value)
            if "gate" in name.rsplit(".", 1)[-1] or name.endswith(".gate"):
                value.copy_(0.8 + 0.2 * noise)
            elif "norm" in name:
                value.add_(0.2 * noise)
            else:
                value.copy_(0.16 * noise)
    model.save_pretrained(folder)
    _make_tokenizer(folder)
    processor(folder).save_pretrained(folder)
    return model


def _make_tokenizer(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fill = [f"<|reserved_{i}|>" for i in range(VOCAB - 256 - len(SPECIAL))]
    backend.add_special_tokens([*SPECIAL, *fill, "<|image|>"])
    bos = SPECIAL[0]
    backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, 256)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token="<|eot_id|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def processor(folder: Path) -> MllamaImageProcessorPil:
    return MllamaImageProcessorPil(size={"height": TILE, "width": TILE}, max_image_tiles=TILES)


def picture(seed: int, width: int = 28, height: int = 28) -> Image.Image:
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def mask_like_the_original(model: MllamaForConditionalGeneration) -> None:
    """Let tokens before the first image get no cross-attention output, as in the original implementation.

    transformers applies the row mask to the MLP of a cross layer only.
    """

    def keep(layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
        layer.cross_attn.rows = kwargs.get("full_text_row_masked_out_mask")

    def apply(attention: Any, args: Any, output: Any) -> Any:
        rows = attention.rows
        return output if rows is None else (output[0] * rows[:, 0], *output[1:])

    for layer in model.model.language_model.layers:
        if hasattr(layer, "cross_attn"):
            layer.register_forward_pre_hook(keep, with_kwargs=True)
            layer.cross_attn.register_forward_hook(apply)


class Reference:
    """transformers' run of the same weights in fp32."""

    def __init__(self, folder: Path, *, original: bool) -> None:
        self.model = MllamaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self._images = processor(folder)
        if original:
            mask_like_the_original(self.model)

    def inputs(self, ids: Sequence[int], images: Sequence[Image.Image], prompt: int) -> dict[str, Any]:
        """`prompt`: how many of the ids are prompt; later ones see what its last one sees."""
        if not images:
            return {"input_ids": torch.tensor([list(ids)])}
        made = self._images([list(images)], return_tensors="pt")
        tiles = made.pop("num_tiles")
        seen = get_cross_attention_token_mask(list(ids)[:prompt], IMAGE_TOKEN)
        mask = torch.from_numpy(convert_sparse_cross_attention_mask_to_dense([seen], tiles, TILES, prompt))
        mask = torch.cat([mask, mask[:, -1:].expand(-1, len(ids) - prompt, -1, -1)], dim=1)
        return {"input_ids": torch.tensor([list(ids)]), "cross_attention_mask": mask, **made}

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], images: Sequence[Image.Image], prompt: int) -> torch.Tensor:
        """[len(ids), vocab] of one forward without a cache."""
        out: torch.Tensor = self.model(**self.inputs(ids, images, prompt), use_cache=False).logits[0]
        return out

    @torch.inference_mode()
    def generate(self, ids: Sequence[int], images: Sequence[Image.Image], tokens: int) -> list[int]:
        out = self.model.generate(
            **self.inputs(ids, images, len(ids)),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return [int(token) for token in out[0, len(ids) :]]
