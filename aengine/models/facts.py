"""What model files say of a model, without its weights.

Owns: the reading of a configuration from either form; what keeps a file open between readers.
Does not know: weights, torch.
Invariants: reads headers only; a malformed file ends in ModelLoadError.
"""

from __future__ import annotations

from aengine.models.bounds import absurd_values
from aengine.models.config import ModelConfig, config_from_folder
from aengine.models.gguf import open_gguf
from aengine.models.gguf_config import config_from_gguf
from aengine.models.store import ModelFiles


def load_config(files: ModelFiles) -> ModelConfig:
    """Raises ModelLoadError when the model is malformed or of an unsupported kind."""
    with absurd_values(files.path):
        return config_from_gguf(open_gguf(files.path)) if files.kind == "gguf" else config_from_folder(files.path)


def hold_open(files: ModelFiles) -> object:
    """What makes all who read the model's files share one open file while it is kept."""
    return open_gguf(files.path) if files.kind == "gguf" else None
