"""The device's arena: addressing above 4 GiB, the table's bounds, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from agentkv import methods
from agentkv.engine.core import GRANULE, Batch, EngineConfig, RowWork
from agentkv.engine.runner import ModelRunner
from agentkv.engine.work import TableUpdate
from agentkv.errors import BadModel, EngineFault
from agentkv.types import Sampling


def runner_of(loaded: Any, **sizes: Any) -> ModelRunner:
    config = EngineConfig(**({"memory": 1 << 20, "window": 256, "page_size": 4, "max_rows": 2} | sizes))
    return ModelRunner(loaded, config, methods.get("dense"))


def work(row: int, tokens: list[int], at: int = 0) -> RowWork:
    return RowWork(row, tokens, at, at, False, Sampling(), 0, 0)


def test_stripes_above_four_gib_hold_the_same_kv(model: Any) -> None:
    loaded = model("qwen3", "float32")
    high = runner_of(loaded, memory=(4 << 30) + (64 << 20))
    stride = high.groups[0].stripe_bytes // GRANULE
    base = (4 << 30) // GRANULE
    tokens = list(range(1, 12))
    want = runner_of(loaded).logits(Batch([work(0, tokens)], [TableUpdate(0, 0, [0, stride, 2 * stride])]))
    for units in ([base - stride, base, base + stride], [base + 9 * stride, 5, high.num_granules - stride]):
        first = high.logits(Batch([work(1, tokens[:6])], [TableUpdate(1, 0, units)]))
        second = high.logits(Batch([work(1, tokens[6:10], 6)]))
        third = high.logits(Batch([work(1, tokens[10:], 10)]))
        assert (torch.cat([first, second, third]) - want).abs().max() < 1e-5
    high.move_slots([(base + 9 * stride, slot) for slot in range(4)], [(base + 20 * stride, slot) for slot in range(4)])
    pages = high.pages.layer(2)
    assert torch.equal(pages[base + 9 * stride], pages[base + 20 * stride])
    assert high.pages.arena[(base + 20 * stride) * GRANULE :][: high.groups[0].stripe_bytes].any()


def test_a_stripe_is_ordered_layer_head_kv_token_dim(model: Any) -> None:
    """Brute force over the bytes: the layout that tiers and other processes rely on."""
    loaded = model("qwen3", "float32")
    runner = runner_of(loaded)
    layout = runner.groups[0]
    runner.logits(Batch([work(0, [1, 2, 3, 4])], [TableUpdate(0, 0, [3])]))
    raw = runner.pages.arena[3 * GRANULE : 3 * GRANULE + layout.num_layers * layout.num_kv_heads * 2 * 4 * 12 * 4]
    stripe = raw.view(torch.float32).view(layout.num_layers, layout.num_kv_heads, 2, 4, 12)
    for layer in range(layout.num_layers):
        assert torch.equal(stripe[layer], runner.pages.layer(layer)[3])


@pytest.mark.parametrize("update", [(2, 0, [1]), (-1, 0, [1]), (0, 64, [1]), (0, 60, [1] * 5), (0, -1, [1])])
def test_updates_outside_the_table_are_refused(model: Any, update: tuple[int, int, list[int]]) -> None:
    with pytest.raises(EngineFault, match="outside a table of 2 x 64"):
        runner_of(model("qwen3", "float32")).execute(Batch([], [TableUpdate(*update)]))


def test_moves_of_unequal_lists_are_refused(model: Any) -> None:
    with pytest.raises(EngineFault, match="1 source"):
        runner_of(model("qwen3", "float32")).move_slots([(0, 0)], [])


@pytest.mark.parametrize("memory", [1000, 1 << 62])
def test_impossible_arenas_are_refused(model: Any, memory: int) -> None:
    with pytest.raises(BadModel, match=f"arena of {memory} bytes") as caught:
        runner_of(model("qwen3", "float32"), memory=memory)
    assert "memory" in caught.value.hint
