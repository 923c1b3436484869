"""Llama 3.2 Vision's configuration, tensor names and page arithmetic; images and their digests."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from aengine.engine.page_groups import kv_groups
from aengine.errors import InvalidRequest, ModelLoadError
from aengine.kernels.reference import ReferenceOps
from aengine.memory import plan
from aengine.models import images, loader
from aengine.models.config import config_from_hf
from aengine.models.images import ImageProcessor
from aengine.models.mllama import _attention_specs
from tests.e2e.tiny_mllama import TILE, TILE_TOKENS, make_model, picture

REAL = {
    "architectures": ["MllamaForConditionalGeneration"],
    "image_token_index": 128256,
    "text_config": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}},
    "vision_config": {"image_size": 560},
}  # fmt: skip


def test_pages_of_the_11b_model():
    """A page of the 32 text layers is four pages of the 8 cross layers: nothing is padded."""
    config = config_from_hf(REAL)
    assert config.vision is not None
    assert (config.vision.tile_tokens, config.vision.max_tokens, config.vision.input_vocab) == (1601, 6404, 128264)
    groups = kv_groups(_attention_specs(config, config.vision), "bfloat16", 16)
    assert [(group.name, group.payload_bytes) for group in groups] == [("full", 2_097_152), ("cross", 524_288)]
    pages = plan(groups, 10**9)
    assert pages.large_bytes == 2 * 2**20
    assert [group.slots for group in pages.groups] == [1, 4]
    assert pages.large_pages == 476
    assert pages.peak_pages(100, media_tokens=[6404]) == (7, 401)
    assert pages.large_needed((7, 401)) == 108
    assert not pages.fits(9_000)
    assert pages.fits(7_000)
    assert not pages.fits(7_000, media_tokens=[6404])


def test_configurations_that_contradict_themselves_are_refused():
    for key, value in (("text_config", {"cross_attention_layers": [40]}), ("vision_config", {"image_size": 100})):
        with pytest.raises(ModelLoadError, match=r"cross_attention_layers \[40\]|image_size 100"):
            config_from_hf(REAL | {key: value})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("mllama") / "tiny"
    make_model(made)
    return made


def newer(name):
    for old, new in (
        ("language_model.model.", "model.language_model."),
        ("language_model.lm_head.", "lm_head."),
        ("vision_model.", "model.vision_model."),
        ("multi_modal_projector.", "model.multi_modal_projector."),
    ):
        if name.startswith(old):
            return new + name.removeprefix(old)
    raise AssertionError(name)


def test_both_ways_of_naming_tensors(folder, tmp_path, hf_files, full_logits):
    tensors = {newer(name): value for name, value in load_file(folder / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    models = [loader.load_model(hf_files(path), ReferenceOps(), torch.float32) for path in (folder, tmp_path)]
    first, second = (full_logits(model, list(range(40))) for model in models)
    assert torch.equal(first, second)
    reader = ImageProcessor(folder, models[0].config.vision)
    made = reader.read(picture(0, 50, 40), files=False, where="image")
    entries = [model.encode_media({k: torch.tensor(v) for k, v in made.arrays.items()}) for model in models]
    assert torch.equal(*entries)
    assert entries[0].shape == (made.tokens, 64)


def test_a_tower_of_another_size_is_named(folder, tmp_path, hf_files):
    for name in ("model.safetensors", "preprocessor_config.json"):
        (tmp_path / name).symlink_to(folder / name)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["intermediate_size"] = 64
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"vision_model\.transformer.*shape \(48.*configuration says \(64"):
        loader.load_model(hf_files(tmp_path), ReferenceOps(), torch.float32)
    vision = config_from_hf(config | {"vision_config": {**config["vision_config"], "image_size": 56}}).vision
    with pytest.raises(ModelLoadError, match="makes 4 tiles of 28 pixels, the vision tower takes 4 of 56"):
        ImageProcessor(tmp_path, vision)


@pytest.fixture(scope="module")
def reader(folder):
    return ImageProcessor(folder, config_from_hf(json.loads((folder / "config.json").read_text())).vision)


def test_entries_follow_the_tiles(reader):
    for size, tiles in (((28, 28), 1), ((56, 20), 2), ((28, 84), 3), ((56, 56), 4), ((500, 500), 4)):
        made = reader.read(picture(0, *size), files=False, where="image")
        assert made.tokens == tiles * TILE_TOKENS
        assert made.arrays["pixel_values"].shape == (tiles, 3, TILE, TILE)
        assert made.n_bytes > tiles * 3 * TILE * TILE * 4
        with pytest.raises(ValueError, match="read-only"):
            made.arrays["pixel_values"][0] = 0


def test_digests_name_pixels_sizes_and_settings(reader, folder, tmp_path):
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    digests = [
        reader.read(image, files=False, where="image").digest
        for image in (pixels, pixels.reshape(2, 8, 3), pixels.reshape(8, 2, 3), pixels[:, :, 0], pixels[:, :, :1])
    ]
    assert len(set(digests)) == 4
    assert digests[3] == digests[4]
    settings = json.loads((folder / "preprocessor_config.json").read_text()) | {"image_mean": [0.4, 0.5, 0.5]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    other = ImageProcessor(tmp_path, config_from_hf(json.loads((folder / "config.json").read_text())).vision)
    assert other.read(pixels, files=False, where="image").digest != digests[0]


def test_hostile_images_are_refused(reader, monkeypatch, tmp_path):
    path = tmp_path / "image.png"
    Image.new("RGB", (30, 30)).save(path)
    cases = [
        (b"", "cannot be decoded"),
        (path.read_bytes()[:60], "cannot be decoded"),
        ("data:text/html;base64,AAAA", "must begin with data:image"),
        ("data:image/png,AAAA", "must begin with data:image"),
        ("data:image/png;base64,A", "not valid base64"),
        (str(path), "text that is no data: URL"),
        (path, "PosixPath, not an image"),
        (5, "int, not an image"),
        (np.zeros((4, 4, 3)), r"array float64 \[4, 4, 3\], not uint8"),
        (np.zeros((4, 4, 2), np.uint8), r"array uint8 \[4, 4, 2\]"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot be decoded"),
    ]
    for source, message in cases:
        with pytest.raises(InvalidRequest, match=message) as refusal:
            reader.read(source, files=False, where="image 3")
        assert refusal.value.message.startswith("image 3")
    monkeypatch.setattr(images, "MAX_PIXELS", 899)
    with pytest.raises(InvalidRequest, match="30 x 30 = 900 pixels, not 1 to 899"):
        reader.read(path.read_bytes(), files=False, where="image 3")
    with pytest.raises(InvalidRequest, match="cannot be decoded"):
        reader.read(tmp_path / "absent.png", files=True, where="image 3")
