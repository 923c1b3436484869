"""Which class describes which family.

Owns: the table family -> model class.
Does not know: files, configurations beyond the family's name.
Invariants: every family that config or gguf_config can name has an entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from aengine.kernels.ops import Model, Ops
from aengine.models.checkpoint import Checkpoint
from aengine.models.config import Family, ModelConfig
from aengine.models.gemma3 import Gemma3Model
from aengine.models.gpt_oss import GptOssModel
from aengine.models.lfm2 import Lfm2Model
from aengine.models.llama import LlamaModel
from aengine.models.llama4 import Llama4Model
from aengine.models.mllama import MllamaModel
from aengine.models.weights import Progress


class ModelClass(Protocol):
    """What a family's class offers to the loader."""

    def load(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        ops: Ops,
        dtype: torch.dtype,
        progress: Progress | None = None,
    ) -> Model: ...


MODELS: Mapping[Family, ModelClass] = {
    "llama": LlamaModel,
    "mistral": LlamaModel,
    "qwen2": LlamaModel,
    "qwen3": LlamaModel,
    "gemma3": Gemma3Model,
    "mllama": MllamaModel,
    "gpt_oss": GptOssModel,
    "llama4": Llama4Model,
    "lfm2": Lfm2Model,
}
