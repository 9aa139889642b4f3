"""FlashInfer's decode attention on a GPU, over pages of ours, beside float64, our own kernel, and in a step of the engine.

Its kernel is compiled here where it is not there yet: about ten seconds for each of two shapes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from agentkv.check.models import tiny
from agentkv.engine import models
from agentkv.engine.attention_flashinfer import FlashInferDecode, Heads, build, version
from agentkv.engine.cache.layout import UnitLayout
from agentkv.engine.core import GRANULE, Batch, EngineConfig, RowWork
from agentkv.engine.layers import ModelConfig, RopeConfig
from agentkv.engine.loader import LoadedModel
from agentkv.engine.runner import ModelRunner
from agentkv.engine.work import TableUpdate
from agentkv.methods.dense import Dense
from agentkv.types import Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(version() is None, reason="FlashInfer is not installed")]
PAGE, DIM, LAYERS, SCALE = 16, 128, 2, 128**-0.5
LENS = (1, 16, 17, 300, 5000, 255, 4097, 33)


@pytest.fixture(scope="module", params=[8, 4])
def kernel(request: pytest.FixtureRequest) -> tuple[FlashInferDecode, int]:
    """Of 32 heads over so many KV heads."""
    heads = Heads(32, request.param, DIM, PAGE, torch.bfloat16, torch.device("cuda"))
    build(heads)
    return FlashInferDecode(heads), request.param


class Rows:
    """KV of rows in the last units of an arena of so many bytes, in random order and one granule off; NaN elsewhere in them."""

    def __init__(self, lens: tuple[int, ...], num_kv_heads: int, arena_bytes: int) -> None:
        draw = torch.Generator("cuda").manual_seed(0)
        layout = UnitLayout("stripe", LAYERS, num_kv_heads, DIM, 2, PAGE)
        step, counts = layout.unit_bytes // GRANULE, [-(-n // PAGE) for n in lens]
        granules = arena_bytes // GRANULE
        self.arena = torch.empty(arena_bytes // 2, dtype=torch.bfloat16, device="cuda")
        first = granules - sum(counts) * step - 1
        self.arena[first * 128 :] = torch.nan
        order = torch.randperm(sum(counts), generator=draw, device="cuda") * step + first
        self.layers = [self.arena.as_strided(*layout.strides(layer, granules)) for layer in range(LAYERS)]
        self.table = torch.full((len(lens), max(counts) + 3), -5, dtype=torch.int32, device="cuda")
        self.lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
        self.q = torch.randn(len(lens), 32, DIM, device="cuda", generator=draw).bfloat16()
        self.held: list[list[Tensor]] = [[] for _ in range(LAYERS)]
        for row, (entries, length) in enumerate(zip(torch.split(order, counts), lens, strict=True)):
            self.table[row, : len(entries)] = entries
            for layer, pages in enumerate(self.layers):
                kv = torch.randn(len(entries), num_kv_heads, 2, PAGE, DIM, device="cuda", generator=draw).bfloat16()
                kv.view(len(entries), num_kv_heads, 2, PAGE, DIM)[-1, :, :, (length - 1) % PAGE + 1 :] = torch.nan
                pages[entries] = kv
                self.held[layer].append(kv.permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :length].double())

    def wanted(self, layer: int) -> Tensor:
        """float64, row by row."""
        outs = []
        for q, (k, v) in zip(self.q.double(), self.held[layer], strict=True):
            scores = q.view(len(k), -1, DIM) @ k.mT * SCALE
            outs.append((scores.softmax(-1) @ v).view(-1, DIM))
        return torch.stack(outs)


@pytest.mark.parametrize("arena_bytes", [128 << 20, 5 << 30])
def test_pages_in_place_beside_float64_and_our_kernel(kernel: tuple[FlashInferDecode, int], arena_bytes: int) -> None:
    from agentkv.kernels.paged_decode import bound_pieces, paged_decode, plan_decode

    attend, num_kv_heads = kernel
    rows = Rows(LENS, num_kv_heads, arena_bytes)
    plan = plan_decode(rows.lens, torch.arange(len(LENS), device="cuda"), bound_pieces(len(LENS), sum(LENS)))
    for layer, pages in enumerate(rows.layers):
        wanted = rows.wanted(layer)
        theirs = attend(rows.q, pages, rows.table, rows.lens, SCALE)
        ours = paged_decode(rows.q, pages, rows.table, plan, SCALE)[0]
        most = wanted.abs().amax((1, 2), keepdim=True)
        assert ((theirs.double() - wanted).abs() / most).max() <= 2**-7
        assert ((ours.double() - wanted).abs() / most).max() <= 2**-7


def test_a_graph_is_replayed_with_other_rows(kernel: tuple[FlashInferDecode, int]) -> None:
    attend, num_kv_heads = kernel
    rows = Rows(LENS, num_kv_heads, 128 << 20)
    pages, table, lens = rows.layers[1], rows.table.clone(), rows.lens.clone()
    attend(rows.q, pages, table, lens, SCALE)
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(rows.q, pages, table, lens, SCALE)
    for shift in (0, 3, 0, 5):
        order = torch.arange(len(LENS), device="cuda").roll(shift)
        table.copy_(rows.table[order])
        lens.copy_(rows.lens[order])
        graph.replay()
        first = out.clone()
        graph.replay()
        assert torch.equal(out, first), "the same bits each time"
        assert torch.equal(first, attend(rows.q, pages, table, lens, SCALE))
        assert not first.isnan().any()


def wide() -> LoadedModel:
    """Two layers of 2 KV heads of 128 dims for 8 heads, bfloat16."""
    config = ModelConfig(
        architecture="Qwen3ForCausalLM", vocab_size=512, hidden_size=256, inner_size=512, num_layers=2, num_heads=8,
        num_kv_heads=2, head_dim=DIM, norm_eps=1e-6, rope=RopeConfig(10_000.0), window=2048, tied=False,
    )  # fmt: skip
    model = models.resolve(config.architecture)(config).requires_grad_(False)
    draw = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.normal_(*((1.0, 0.2) if parameter.dim() == 1 else (0.0, parameter.shape[-1] ** -0.5)), generator=draw)
    model = model.to("cuda", torch.bfloat16)
    model.prepare()
    loaded = tiny("Qwen3ForCausalLM", "cuda")
    return replace(loaded, model=model, config=config, dtype=torch.bfloat16)


def runner_of(loaded: LoadedModel, attention: Literal["triton", "flashinfer"]) -> ModelRunner:
    """Eight rows of 512 slots, all drawn, pages in random order."""
    (group,) = loaded.groups(PAGE)
    config = EngineConfig(8 * 32 * group.stripe_bytes, 512, max_rows=8, attention=attention)
    runner = ModelRunner(loaded, config, Dense())
    runner.pages.arena.view(torch.bfloat16).normal_(generator=torch.Generator("cuda").manual_seed(2))
    order = torch.randperm(8 * 32, generator=torch.Generator().manual_seed(3)).tolist()
    units = [[page * group.stripe_bytes // GRANULE for page in order[row * 32 : row * 32 + 32]] for row in range(8)]
    runner.pages.update_tables([TableUpdate(row, 0, mine) for row, mine in enumerate(units)])
    return runner


def test_a_step_of_the_engine_eager_and_replayed() -> None:
    loaded = wide()
    build(Heads.of(loaded, PAGE))
    ours, theirs = (runner_of(loaded, each) for each in ("triton", "flashinfer"))
    assert theirs.graphs is not None
    for lengths in ([500, 3, 17, 40, 1], [2, 300, 1, 480, 129], [512] * 8, [1] * 7):
        works = [RowWork(row, [row + 1], n - 1, n - 1, True, Sampling(), 0, 1) for row, n in enumerate(lengths)]
        wanted, found = (each.logits(Batch(works)).float() for each in (ours, theirs))
        off = (wanted - found).abs().amax(1)
        assert (off <= 0.05 * wanted.abs().amax(1)).all()
        best = wanted.topk(2).values
        sure = (best[:, 0] - best[:, 1] > 4 * off).tolist()
        for _ in range(3):
            drawn = theirs.execute(Batch(works))
            for row, token in enumerate(drawn):
                assert token == int(wanted[row].argmax()) or not sure[row]
    stats = theirs.graphs.stats()
    assert stats.replays > stats.captured > 0
    assert not stats.failed
