"""Items of slots: spans of what a step's tokens see, twins computed once, faults told by slot."""

from __future__ import annotations

import numpy as np
import torch

from aengine.runner.media import SlotMedia
from aengine.types import NO_END, MediaInput, MediaPlacement


class FakeModel:
    def __init__(self):
        self.encoded, self.written = [], []

    def encode_media(self, arrays):
        self.encoded.append(int(arrays["x"][0]))
        if arrays["x"][0] < 0:
            raise ValueError("negative")
        return torch.zeros(len(arrays["x"]), 1)

    def write_media(self, ops, entries, kv, pages):
        self.written.append(pages.tolist())


def make():
    model = FakeModel()
    return model, SlotMedia(model, None, (), 4, torch.device("cpu"))


def source(value, tokens=3):
    return MediaInput(bytes([value % 256]), tokens, {"x": np.full(3, value)})


def placement(slot, item, first, until, pages=(1,), made=None):
    return MediaPlacement(slot, 1, item, tuple(pages), 3, first, until, made)


def told(batch, names):
    return [(s.first, s.count, [names[int(i.pages[0])] for i in s.items]) for s in batch.spans]


def test_rows_are_cut_where_what_they_see_changes():
    _, media = make()
    media.place([placement(2, 1, 6, NO_END, [8]), placement(2, 0, 3, 6, [7]), placement(0, 0, 1, NO_END, [9])])
    names = {7: "a", 8: "b", 9: "c"}
    batch = media.batch((0, 1, 2), (5, 0, 0), (1, 4, 9))
    assert batch.tokens.tolist() == [0, 8, 9, 10, 11, 12, 13]
    assert told(batch, names) == [(0, 1, ["c"]), (1, 3, ["a"]), (4, 3, ["b"])]
    assert media.batch((1,), (0,), (4,)) is None
    assert media.batch((2,), (0,), (3,)) is None
    assert told(media.batch((2,), (100,), (1,)), names) == [(0, 1, ["b"])]
    media.vacate(2)
    assert media.batch((2,), (100,), (1,)) is None


def test_adjacent_items_are_seen_together_in_the_order_of_the_prompt():
    _, media = make()
    media.place([placement(0, 1, 3, NO_END, [8]), placement(0, 0, 2, NO_END, [7])])
    batch = media.batch((0,), (0,), (6,))
    assert told(batch, {7: "a", 8: "b"}) == [(0, 1, ["a"]), (1, 3, ["a", "b"])]


def test_an_item_placed_again_has_moved():
    model, media = make()
    media.place([placement(0, 1, 3, NO_END, [8]), placement(0, 0, 2, NO_END, [7], source(5))])
    media.place([placement(0, 0, 2, NO_END, [9])])
    assert told(media.batch((0,), (0,), (6,)), {7: "old", 8: "b", 9: "a"}) == [(0, 1, ["a"]), (1, 3, ["a", "b"])]
    assert model.encoded == [5]


def test_twins_of_a_step_are_computed_once_and_written_twice():
    model, media = make()
    assert media.place([placement(0, 0, 0, NO_END, [4], source(5)), placement(1, 0, 0, NO_END, [6], source(5))]) == {}
    assert model.encoded == [5]
    assert model.written == [[4], [6]]
    media.place([placement(2, 0, 0, NO_END, [4])])
    assert model.encoded == [5]


def test_faults_name_their_slot():
    _, media = make()
    bad, short = source(-1), source(7, tokens=2)
    failed = media.place(
        [placement(3, 0, 0, NO_END, [1], bad), placement(1, 2, 0, 9, [2], short), placement(0, 0, 0, 9, [3], source(1))]
    )
    assert failed == {
        3: "image 0 cannot be computed: ValueError: negative",
        1: "image 2 cannot be computed: ValueError: the model made 3 entries of it, not 2",
    }
