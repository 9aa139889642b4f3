"""The same engine on a GPU: eager, against itself on the CPU."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from test_warm import engine_of, talk

from agentkv import methods
from agentkv.engine import experts, layers
from agentkv.engine.core import GRANULE, Batch, EngineConfig, RowWork
from agentkv.engine.loader import load_model
from agentkv.engine.runner import ModelRunner
from agentkv.engine.work import TableUpdate
from agentkv.kernels import reference, rotate
from agentkv.kernels.experts import route
from agentkv.types import Sampling

pytestmark = pytest.mark.gpu
FLIPPED = {"float32": 0.0, "bfloat16": 0.02}
"""Most of the chosen experts that rounding may choose otherwise, at near ties of the router."""


def play(loaded: Any, rows: int, memory: int = 64 << 20, first_unit: int = 0) -> torch.Tensor:
    """Prompts of different lengths, a chunk with history, then decodes of all rows at once: all logits, on the CPU."""
    runner = ModelRunner(loaded, EngineConfig(memory, 256, page_size=16, max_rows=rows), methods.get("dense"))
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(rows * 8, generator=generator).tolist()
    table, at, base = list[TableUpdate](), [0] * rows, first_unit
    for index, group in enumerate(runner.groups):
        stride = group.stripe_bytes // GRANULE
        pages = [[base + stride * place for place in order[row * 8 : row * 8 + 8]] for row in range(rows)]
        table += [TableUpdate(row, 0, units, index) for row, units in enumerate(pages)]
        base += stride * rows * 8
    outs = []

    def step(counts: dict[int, int], updates: list[Any]) -> None:
        works = []
        for row, count in counts.items():
            tokens = torch.randint(0, 97, (count,), generator=generator).tolist()
            works.append(RowWork(row, tokens, at[row], at[row], True, Sampling(), 0, 1))
            at[row] += count
        outs.append(runner.logits(Batch(works, updates)).cpu())

    step({row: 3 + 2 * row for row in range(rows)}, table)
    step({0: 40, **dict.fromkeys(range(1, rows), 1)}, [])
    for _ in range(4):
        step(dict.fromkeys(range(rows), 1), [])
    return torch.cat(outs)


@pytest.fixture
def nothing_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and rotary angles in the inputs' own width: a GPU's float32 rsqrt, sine and cosine differ from a CPU's in the last
    bit, 3e-6 in the logits of a float64 model."""

    def normalize(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))

    def angles(self: layers.Rotary, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        angle = (positions.double().unsqueeze(1) * self.frequency.double().to(positions.device)).unsqueeze(1)
        return angle.cos().to(dtype), angle.sin().to(dtype)

    monkeypatch.setattr(layers, "rms_norm", normalize)
    monkeypatch.setattr(rotate, "rms_norm", normalize)
    monkeypatch.setattr(layers.Rotary, "angles", angles)


@pytest.mark.usefixtures("nothing_in_float32")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_float64_logits_on_a_gpu(checkpoint: Any, family: str) -> None:
    want = play(load_model(checkpoint(family), dtype="float64"), 24)
    got = play(load_model(checkpoint(family), device="cuda", dtype="float64"), 24)
    assert (got - want).abs().max() <= 1e-9 * max(1.0, float(want.abs().max()))


class Routes:
    """Experts that one run chose, in order, which a second run follows: so a near tie that rounding decides otherwise is told
    apart from a wrong result.

    differ: of `total` chosen experts those that the second run's own router did not choose.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch, self._made = patch, list[torch.Tensor]()
        self.differ = self.total = 0

    def note(self) -> None:
        """From here on choices are noted."""

        def noting(logits: torch.Tensor, active: int, normed: bool) -> tuple[torch.Tensor, torch.Tensor]:
            chosen, weights = route(logits, active, normed)
            self._made.append(chosen.cpu())
            return chosen, weights

        self._patch.setattr(experts, "route", noting)

    def follow(self) -> None:
        """From here on they are followed, from the first on; each expert weighs what the run's own router gives it."""
        ahead = iter(self._made)

        def following(logits: torch.Tensor, active: int, normed: bool) -> tuple[torch.Tensor, torch.Tensor]:
            own, weights = route(logits, active, normed)
            given = next(ahead).to(own.device)
            self.total += given.numel()
            self.differ += int((given.unsqueeze(2) != own.unsqueeze(1)).all(2).sum())
            shares = logits.softmax(-1, dtype=torch.float32).gather(1, given.long())
            shares = shares / shares.sum(-1, keepdim=True) if normed else shares
            return given, torch.where((given == own).all(1, keepdim=True), weights, shares)

        self._patch.setattr(experts, "route", following)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3-moe", "gemma3"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-3), ("bfloat16", 0.06)])
def test_logits_on_a_gpu(checkpoint: Any, monkeypatch: pytest.MonkeyPatch, family: str, dtype: str, tolerance: float) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    routes = Routes(monkeypatch)
    routes.note()
    want = play(load_model(checkpoint(family), dtype="float64"), 24)
    routes.follow()
    got = play(load_model(checkpoint(family), device="cuda", dtype=dtype), 24)
    assert (routes.total > 0) == (family == "qwen3-moe")
    assert routes.differ <= FLIPPED[dtype] * routes.total
    assert (got - want).abs().max() <= tolerance * max(1.0, float(want.abs().max()))


def test_stripes_above_four_gib_on_a_gpu(checkpoint: Any) -> None:
    loaded = load_model(checkpoint("qwen3"), device="cuda", dtype="float32")
    want = play(loaded, 6)
    got = play(loaded, 6, memory=(5 << 30), first_unit=(4 << 30) // GRANULE + 3)
    assert torch.equal(got, want)


def test_units_move_and_go_to_host_memory_and_back(checkpoint: Any) -> None:
    loaded = load_model(checkpoint("qwen3"), device="cuda", dtype="float32")
    runner = ModelRunner(loaded, EngineConfig(8 << 20, 256, page_size=16, max_rows=2), methods.get("dense"))
    arena, size = runner.pages.arena, 5 * GRANULE
    before = torch.randint(0, 256, arena.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    arena.copy_(before)
    units = list(range(3, 30_000, 7))
    data = runner.read_units(size, units)
    assert bytes(data[: 2 * size]) == bytes(before[3 * GRANULE :][:size].numpy()) + bytes(before[10 * GRANULE :][:size].numpy())
    source, target = units[1000:], [2 + 5 * i for i in range(len(units) - 1000)]
    runner.move_units(size, source, target)
    want = before.clone()
    reference.move_units(want, size, GRANULE, source, target)
    assert torch.equal(arena.cpu(), want)
    arena.zero_()
    runner.write_units(size, units, data)
    assert runner.read_units(size, units) == data


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_session_goes_warm_on_a_gpu(checkpoint: Any, family: str) -> None:
    loaded = load_model(checkpoint(family), device="cuda", dtype="float32")
    hot, warm = engine_of(loaded), engine_of(loaded)
    assert talk(warm, lambda: warm.suspend("a")) == talk(hot, lambda: None)
    assert warm.stats().restores == 3


def test_decodes_of_many_rows_do_not_cost_as_many_steps(micro_path: Any) -> None:
    """One launch a layer for all rows: 48 rows at 2K within four times one row."""
    loaded = load_model(micro_path, device="cuda")
    runner = ModelRunner(loaded, EngineConfig(2 << 30, 4096, page_size=16, max_rows=48, graphs=False), methods.get("dense"))
    stride = runner.groups[0].stripe_bytes // GRANULE
    pages = 160
    table = [TableUpdate(row, 0, [stride * (row * pages + page) for page in range(pages)]) for row in range(48)]
    runner.execute(Batch([], table))

    def milliseconds(rows: int) -> float:
        times = []
        for step in range(30):
            works = [RowWork(row, [5], 2000 + step, 2000 + step, True, Sampling(), 0, 1) for row in range(rows)]
            start = time.perf_counter()
            runner.execute(Batch(works))
            times.append(time.perf_counter() - start)
        return sorted(times)[15] * 1e3

    one, many = milliseconds(1), milliseconds(48)
    print(f"decode at 2K: 1 row {one:.2f} ms, 48 rows {many:.2f} ms")
    assert many < 4 * one
