"""Images of prompts: which positions see them, and how messages bring them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from aengine.engine.images import Images, place_images, take_images
from aengine.errors import InvalidRequest
from aengine.types import NO_END, MediaInput

TOKEN = 9


def images(count):
    return [MediaInput(bytes([i]), 4, {}) for i in range(count)]


@given(st.lists(st.sampled_from([1, 1, 1, TOKEN]), min_size=1, max_size=40))
def test_visibility_equals_the_processors(ids):
    count = ids.count(TOKEN)
    placed = place_images(np.array(ids, np.int32), images(count), TOKEN)
    ours = np.zeros((len(ids), count), bool)
    for i, one in enumerate(placed):
        ours[one.position : one.until, i] = True
    sparse = get_cross_attention_token_mask(ids, TOKEN)
    if not count:
        assert not placed
        return
    theirs = convert_sparse_cross_attention_mask_to_dense([sparse], [[1] * count], 1, len(ids))[0, :, :, 0]
    assert (ours == theirs.astype(bool)).all()
    assert placed[-1].until == NO_END


@given(st.lists(st.sampled_from([1, 1, TOKEN]), min_size=2, max_size=30), st.data())
def test_what_a_position_sees_does_not_depend_on_later_ids(ids, data):
    """Else a prompt's prefix could not be found again in a longer one."""
    cut = data.draw(st.integers(1, len(ids) - 1))

    def seen(ids):
        placed = place_images(np.array(ids, np.int32), images(ids.count(TOKEN)), TOKEN)
        return [[i for i, one in enumerate(placed) if one.position <= p < one.until] for p in range(len(ids))]

    assert seen(ids)[:cut] == seen(ids[:cut])


def test_counts_must_agree():
    ids = np.array([1, TOKEN, TOKEN], np.int32)
    with pytest.raises(InvalidRequest, match=r"2 image placeholders \(token 9\) for 1 images"):
        place_images(ids, images(1), TOKEN)
    with pytest.raises(InvalidRequest, match="takes text only"):
        place_images(ids, images(2), None)
    assert place_images(ids, [], None) == ()


def test_parts_become_marks_and_images_keep_their_order():
    messages = [
        {"role": "system", "content": "be brief"},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "data:a"}},
                {"type": "image"},
                {"type": "text", "text": "x"},
                {"type": "input_image", "image_url": "data:b"},
                {"type": "image", "image": b"c"},
            ],
        },
    ]
    marked, found = take_images(messages, ["given"])
    assert found == ["data:a", "given", "data:b", b"c"]
    assert [part["type"] for part in marked[1]["content"]] == ["image", "image", "text", "image", "image"]
    assert marked[0] == messages[0]
    assert messages[1]["content"][0]["image_url"] == {"url": "data:a"}
    assert take_images(messages[:1], ["left"])[1] == ["left"]
    with pytest.raises(InvalidRequest, match="brings no image"):
        take_images(messages)


async def test_a_text_model_refuses_images():
    reader = Images(None)
    assert await reader.read([]) == []
    with pytest.raises(InvalidRequest, match="1 images are given, but this model takes text only"):
        await reader.read(["data:image/png;base64,"])
    reader.close()
