"""Views alias one buffer and never each other."""

from __future__ import annotations

import torch

from aengine.memory import Full, GroupSpec, LayerSpec, Part, State, Window, attention_group, plan
from aengine.memory.arena import Arena
from aengine.types import PageMove


def make() -> Arena:
    groups = [
        attention_group("full", Full(), 2, kv_heads=2, head_dim=16),
        attention_group("window", Window(64), 3, kv_heads=2, head_dim=16, tokens_per_page=8),
        GroupSpec("state", State(), (LayerSpec("s", (Part("conv", (5, 3), "float32"), Part("ssm", (7,), "float32"))),)),
    ]
    return Arena(plan(groups, 2**20))


def every_view(arena: Arena) -> list[tuple[int, torch.Tensor]]:
    out = []
    for index, group in enumerate(arena.plan.groups):
        for layer, spec in enumerate(group.spec.layers):
            out += [(index, arena.view(index, layer, part)) for part in range(len(spec.parts))]
    return out


def test_starts_out_zero_and_has_the_planned_size() -> None:
    arena = make()
    assert arena.buffer.numel() == arena.plan.arena_bytes
    assert not arena.buffer.any()


def test_shapes_and_strides() -> None:
    arena = make()
    plan_ = arena.plan
    key = arena.view(0, 1, "k")
    assert key.shape == (plan_.groups[0].slots * plan_.large_pages, 16, 2, 16)
    assert key.stride() == (plan_.groups[0].pitch // 2, 32, 16, 1)
    state = arena.view(2, 0, "conv")
    assert state.shape == (plan_.groups[2].slots * plan_.large_pages, 5, 3)
    assert state.dtype == torch.float32


def test_pages_of_one_slab_do_not_overlap() -> None:
    """Each group writes one slab of its own, every part of every page a value of its own; all read back."""
    arena = make()
    views = every_view(arena)
    value = 1
    wanted = []
    for index, view in views:
        slots = arena.plan.groups[index].slots
        for page in range((index + 1) * slots, (index + 2) * slots):
            view[page] = value % 250
            wanted.append((view, page, value % 250))
            value += 1
    for view, page, number in wanted:
        assert (view[page] == number).all()


def test_page_bytes_are_the_page() -> None:
    arena = make()
    page = 3 * arena.plan.groups[1].slots + 1
    for layer in range(3):
        for part in ("k", "v"):
            arena.view(1, layer, part)[page] = 1.0
    data = arena.page_bytes(1, page)
    assert data.numel() == arena.plan.groups[1].payload
    assert data.is_contiguous()
    assert (data.view(torch.bfloat16) == 1).all()
    assert int((arena.buffer != 0).sum()) == int((data != 0).sum())


def test_moves_copy_payloads_one_after_the_other() -> None:
    arena = make()
    first = arena.plan.groups[1].slots
    for page in (first, first + 1):
        arena.page_bytes(1, page).fill_(page)
    arena.move([PageMove(1, first, first + 2), PageMove(1, first + 1, first), PageMove(1, first + 2, first + 3)])
    found = [set(arena.page_bytes(1, page).tolist()) for page in range(first, first + 4)]
    assert found == [{first + 1}, {first + 1}, {first}, {first}]
    used = sum(arena.page_bytes(1, page).numel() for page in range(first, first + 4))
    assert int((arena.buffer != 0).sum()) == used


def test_zero_clears_one_large_page() -> None:
    arena = make()
    arena.buffer.fill_(7)
    arena.zero([2])
    size = arena.plan.large_bytes
    assert not arena.buffer[2 * size : 3 * size].any()
    assert (arena.buffer[: 2 * size] == 7).all()
    assert (arena.buffer[3 * size :] == 7).all()


def test_layer_kv_follows_the_order_of_layers() -> None:
    """Layers numbered across groups: a window layer, a full one, two window ones, a full one."""
    arena = make()
    kv = arena.layer_kv([(1, 0), (0, 1), (1, 2), (1, 3), (0, 4)])
    assert kv[2].k.data_ptr() == arena.view(1, 1, "k").data_ptr()
    assert kv[4].v.data_ptr() == arena.view(0, 1, "v").data_ptr()
    assert kv[0].page_tokens == 8


def test_layer_kv_of_int8_pages_has_scales() -> None:
    groups = [attention_group("full", Full(), 2, kv_heads=2, head_dim=16, dtype="int8")]
    arena = Arena(plan(groups, 2**20))
    first, second = arena.layer_kv([(0, 0), (0, 1)])
    assert second.k_scale is not None
    assert second.v_scale is not None
    assert second.k_scale.shape == (*second.k.shape[:2], 2)
    assert second.k_scale.stride() == second.v_scale.stride()
    second.k.fill_(3)
    second.k_scale.fill_(0.5)
    assert first.k_scale is not None
    assert not first.k_scale.any()
    assert not second.v_scale.any()
    assert not first.k.any()


def test_gather_through_a_block_table() -> None:
    arena = make()
    key = arena.view(0, 0, "k")
    first = arena.plan.groups[0].slots
    table = torch.tensor([first + 2, first], dtype=torch.int32)
    for column, page in enumerate(table.tolist()):
        key[page] = float(column + 1)
    gathered = key[table.long()].reshape(32, 2, 16)
    assert (gathered[:16] == 1).all()
    assert (gathered[16:] == 2).all()
