"""Units' offsets against arrays that are laid out by brute force."""

from __future__ import annotations

import itertools

import numpy
import pytest
import torch

from agentkv.engine.cache.arena import Arena
from agentkv.engine.cache.extents import ExtentPool
from agentkv.engine.cache.holding import Holding
from agentkv.engine.cache.layout import MOST_GRANULES, Granularity, UnitLayout
from agentkv.engine.core import GRANULE, KVGroup

GRANULARITIES: list[Granularity] = ["stripe", "layer", "head"]
SHAPE = KVGroup(layers=(0, 1, 2), num_kv_heads=2, head_dim=6, itemsize=2, page_size=5)


def every(layout: UnitLayout) -> list[tuple[int, ...]]:
    sizes = (layout.num_layers, layout.num_kv_heads, 2, layout.page_size)
    return list(itertools.product(*map(range, sizes)))


def entries(layout: UnitLayout, first: int = 7) -> numpy.ndarray:
    """A table's page: an entry for each unit of it, far apart and in no order of bytes."""
    count = int(numpy.prod(layout.table_shape))
    step = layout.unit_bytes // GRANULE + 1
    return (first + step * numpy.arange(count)[::-1]).reshape(layout.table_shape)


@pytest.mark.parametrize("scale_bytes", [0, 4])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_every_element_has_its_own_place_in_the_fixed_order(granularity: Granularity, scale_bytes: int) -> None:
    layout = UnitLayout.of(SHAPE, granularity, scale_bytes=scale_bytes)
    table = entries(layout)
    axis = len(layout.table_shape)
    payload = numpy.arange(3 * 2 * 2 * 5 * 6).reshape(3, 2, 2, 5, 6)  # [layer][kv head][K, V][token][dim]
    scales = numpy.arange(3 * 2 * 2 * 5).reshape(3, 2, 2, 5)
    arena: dict[int, tuple[str, int]] = {}
    for index in numpy.ndindex(*layout.table_shape):  # each unit: its part of the payload in order, then its scales
        start = int(table[index]) * GRANULE
        for i, value in enumerate(payload[index].reshape(-1)):
            arena[start + 2 * i] = ("kv", int(value))
        behind = start + 2 * payload[index].size
        for i, value in enumerate(scales[index].reshape(-1)):
            if scale_bytes:
                arena[behind + scale_bytes * i] = ("scale", int(value))
        assert layout.payload_bytes == 2 * payload[index].size
        assert layout.unit_bytes >= 2 * payload[index].size + scale_bytes * scales[index].size > layout.unit_bytes - GRANULE
    for layer, head, kv, token in every(layout):
        entry = int(table[(layer, head)[:axis]])
        if scale_bytes:
            assert arena[layout.scale_address(entry, layer, head, kv, token)] == ("scale", scales[layer, head, kv, token])
        for dim in range(6):
            assert arena[layout.address(entry, layer, head, kv, token, dim)] == ("kv", payload[layer, head, kv, token, dim])


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_view_of_a_layer_reads_what_was_put_there(granularity: Granularity) -> None:
    layout = UnitLayout.of(SHAPE, granularity)
    table = entries(layout)
    num_granules = int(table.max()) + layout.unit_bytes // GRANULE
    arena = torch.zeros(num_granules * GRANULE, dtype=torch.uint8)
    elements = arena.view(torch.int16)
    for number, (layer, head, kv, token) in enumerate(every(layout)):
        entry = int(table[(layer, head)[: table.ndim]])
        for dim in range(6):
            elements[layout.address(entry, layer, head, kv, token, dim) // 2] = 100 * dim + number
    for number, (layer, head, kv, token) in enumerate(every(layout)):
        shape, strides, offset = layout.strides(layer, num_granules)
        pages = elements.as_strided(shape, strides, offset)
        entry = int(table[(layer, head)[: table.ndim]])
        found = pages[entry, 0 if granularity == "head" else head, kv, token]
        assert found.tolist() == [100 * dim + number for dim in range(6)]


def test_the_units_of_a_real_model() -> None:
    """Qwen3-4B, pages of 16, bf16."""
    shape = KVGroup(layers=tuple(range(36)), num_kv_heads=8, head_dim=128, itemsize=2, page_size=16)
    sizes = [UnitLayout.of(shape, granularity).unit_bytes for granularity in GRANULARITIES]
    assert sizes == [36 * 64 << 10, 64 << 10, 8 << 10]
    assert sizes[0] == shape.stripe_bytes


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_last_unit_of_the_largest_arena(granularity: Granularity) -> None:
    """549 GB: the address is past every 32-bit byte offset, the entry still an int32; a tensor without memory agrees."""
    shape = KVGroup(layers=(0, 1, 2, 3), num_kv_heads=2, head_dim=64, itemsize=2, page_size=16)
    layout = UnitLayout.of(shape, granularity)
    entry = MOST_GRANULES - layout.unit_bytes // GRANULE
    assert numpy.int32(entry) == entry
    arena = torch.empty(MOST_GRANULES * GRANULE // 2, dtype=torch.bfloat16, device="meta")
    for layer in range(4):
        pages = arena.as_strided(*layout.strides(layer, MOST_GRANULES))
        last = pages[entry, -1, 1, -1, -1:]
        head = 0 if granularity == "head" else 1
        assert last.storage_offset() * 2 == layout.address(entry, layer, head, 1, 15, 63) < MOST_GRANULES * GRANULE
    assert layout.address(entry, 3, 1, 1, 15, 63) == MOST_GRANULES * GRANULE - 2


@pytest.mark.parametrize("place", [(3, 0), (-1, 0), (0, 2), (0, -1)])
def test_outside_the_shape(place: tuple[int, int]) -> None:
    for granularity in GRANULARITIES:
        with pytest.raises(IndexError):
            UnitLayout.of(SHAPE, granularity).constant(*place)


def test_states_of_every_granularity_share_an_arena() -> None:
    """One pool each; a layer page state is one holding a layer, a head page state one a layer and head."""
    arena = Arena(3000)
    pools = [ExtentPool(arena, UnitLayout.of(SHAPE, granularity).unit_class, 5) for granularity in GRANULARITIES]
    states = [[Holding(pool) for _ in range(count)] for pool, count in zip(pools, (1, 3, 6), strict=True)]
    for number, holdings in enumerate(states):
        for index, holding in enumerate(holdings):
            count = 11 + number + index  # other counts by layer, by head
            holding.grow(count, 0, holding.plan(count))
    for pool, holdings in zip(pools, states, strict=True):
        pool.check([piece for holding in holdings for piece in holding.slices], [])
        for holding in holdings:
            holding.release()
    assert arena.used_bytes == 0
