"""Forwards cut into pieces: where they are cut, what fills them up, how many are recorded."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from aengine.kernels.ops import CrossBatch, CrossItem, CrossSpan, LayerKV, LayerState, StepBatch, state_specs
from aengine.runner.cuda.pieces import Pieces, piece_tokens
from tests.runner.conftest import TinyModel
from tests.runner.cuda.fake import FakeCuda
from tests.runner.cuda.steady import SteadyOps
from tests.runner.test_captured_step import load

PAGE, PAGES = 4, 40


def test_numbers_of_tokens():
    assert piece_tokens(1) == (16,)
    assert piece_tokens(48) == (16, 32, 48)
    assert piece_tokens(300)[7:] == (128, 144, 160, 176, 192, 208, 224, 240, 256, 288, 304)
    for most in (16, 100, 512, 2048, 5000, 65_536):
        sizes = piece_tokens(most)
        assert len(sizes) <= 9 + 8 * max(0, (most // 128).bit_length())
        assert sizes[-1] - most < 16
        for below, size in zip((0, *sizes), sizes, strict=False):
            filled = size - below - 1  # by the worst step
            assert 0 <= filled < max(16, (below + 1) / 8)


class Case:
    """A tiny model of a family with caches of its own. Two rows of 9 and 5 tokens, then one of each again and a
    new row of 11; in a model of images, the first row's tokens from its third on see one."""

    def __init__(self, family: str) -> None:
        self.ops = SteadyOps()
        self.model = load(family, self.ops, torch.float32)
        g = torch.Generator().manual_seed(5)
        shapes = [(PAGES, PAGE, spec.kv_heads, spec.head_dim) for spec in self.model.attention]
        kv = [LayerKV(*torch.zeros((2, *shape))) for shape in shapes]
        for one, spec in zip(kv, self.model.attention, strict=True):
            if spec.cross:
                one.k.copy_(torch.randn(one.k.shape, generator=g))
                one.v.copy_(torch.randn(one.v.shape, generator=g))
        parts = [spec.parts[0] for spec in state_specs(self.model)]
        self.states = tuple(LayerState((torch.zeros((PAGES, *part.shape)),)) for part in parts)
        self.kv, self.sees = tuple(kv), any(spec.cross for spec in self.model.attention)
        groups = 1 + max(spec.group for spec in self.model.attention)
        columns = torch.arange(8, dtype=torch.int32)
        tables = torch.stack([1 + row * 8 + columns for row in range(3)])
        self.tables = [tables for _ in range(groups)]
        self.made = [self._batch((9, 5), (0, 0)), self._batch((1, 1, 11), (9, 5, 0))]

    def _batch(self, counts: tuple[int, ...], starts: tuple[int, ...]) -> StepBatch:
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        positions = [position for start, end in zip(starts, ends, strict=True) for position in range(start, end)]
        states = [torch.tensor([[1 + row if start else 0, 1 + row] for row, start in enumerate(starts)]).int()]
        cross = None
        if self.sees and counts[0] > 2:
            tokens = torch.arange(2, counts[0])
            cross = CrossBatch(tokens, (CrossSpan(0, len(tokens), (CrossItem(torch.tensor([3, 5]), 7),)),))
        return StepBatch(
            ids=(torch.arange(len(positions)) * 7 % 89).int(), positions=torch.tensor(positions).int(),
            row_offsets=torch.tensor([0, *counts]).cumsum(0).int(), context=torch.tensor(ends).int(),
            tables=(*(table[: len(counts)] for table in self.tables), *(states if self.states else ())),
            kv=self.kv, max_context=max(ends), host_counts=counts, host_starts=starts, cross=cross, states=self.states,
        )  # fmt: skip

    def caches(self) -> list[torch.Tensor]:
        return [part for one in self.kv for part in (one.k, one.v)] + [state.parts[0] for state in self.states]


@pytest.mark.parametrize("family", ["gpt-oss", "lfm2", "mllama"])
def test_a_forward_in_pieces_is_the_same(family):
    """And what fills a piece up writes no KV and no state."""
    plain, cut, device = Case(family), Case(family), FakeCuda()
    stream = device.stream("compute")
    pieces = Pieces(device, cut.model, cut.ops, tokens=15)
    device.settle()
    assert len(list(pieces.capture(stream, 1))) == 1 + cut.sees
    for want, got in zip(plain.made, cut.made, strict=True):
        before = device.counts["replay piece"]
        with torch.inference_mode():
            wanted = plain.model.forward(plain.ops, want)
            with device.on(stream):
                hidden = pieces.forward(got)
        stream.record().wait()
        torch.testing.assert_close(hidden, wanted, atol=2e-4, rtol=1e-3)
        cuts = sum(not spec.cross or got.cross is not None for spec in cut.model.attention) + len(cut.states)
        assert device.counts["replay piece"] - before == cuts + 1
        for mine, theirs in zip(cut.caches(), plain.caches(), strict=True):
            assert torch.equal(mine == 0, theirs == 0)
            torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=1e-3)


def test_steps_that_are_not_recorded_are_told():
    case, device = Case("mllama"), FakeCuda()
    pieces = Pieces(device, case.model, case.ops, tokens=15)
    pieces._programs = {(16, False): "text", (16, True): "image"}
    assert [pieces._program(tokens, False) for tokens in (1, 16, 17)] == ["text", "text", None]
    assert [pieces._program(tokens, True) for tokens in (1, 15, 16)] == ["image", "image", None]
    both, _ = case.made
    few = CrossBatch(both.cross.tokens[:6], both.cross.spans)
    assert pieces.forward(dataclasses.replace(both, cross=few)) is None  # 6 of 14 tokens see


class Shrinking(FakeCuda):
    """Every recording takes a MiB."""

    free = 2**31

    def capture_pieces(self, stream, work):
        self.free -= 2**20
        return super().capture_pieces(stream, work)

    def memory(self):
        return self.free, 2**31


def test_recording_ends_where_its_room_does():
    device, model = Shrinking(), TinyModel()
    stream = device.stream("compute")
    pieces = Pieces(device, model, SteadyOps(), tokens=64)
    device.settle()
    assert list(pieces.capture(stream, 3 * 2**20)) == [1, 2, 3]
    assert (pieces.recorded, pieces.wanted) == (3, 4)
    assert [bool(pieces._program(tokens, False)) for tokens in (1, 17, 33, 49, 65)] == [True, True, False, True, False]
