"""Every method on models of every shape, rows of very different lengths at once, in bfloat16 and float32 on a GPU, beside
float64 on the CPU, whose kernels share nothing with those of a GPU.

How far logits may be apart follows from what one rounding of the dtype does, not from a table by method: the float64 run is
made a second time with each weight moved at random by up to one rounding. That says what rounding amounts to through this
model and this method, whatever the method makes of it: a sharp softmax, a code on the edge of the next. The rounded run may be
off `SPARE` times as far, in the mean over all draws, and `WORST` times as far in the worst draw. What is read or kept, and the
codes that are written, follow the exact run: one number that falls to the other side of a code's edge, or one token more or
less, is worth more than all rounding (which of a few do is luck: by seed, moved weights were off by 2.8e-5 to 1.5e-4 where
codes were each run's own). A rounded run's own choice is made, and may be another at near ties only: it is counted, and held
to `WORST` times what moved weights choose otherwise.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from six_shapes import PROMPTS, SHAPES, Choices, distances, drawn, engine, method_of, play
from torch import Tensor

from agentkv import methods
from agentkv.engine.cache.arena import UnitClass
from agentkv.engine.loader import LoadedModel
from agentkv.engine.sparse import SparseMethod

Served = tuple[LoadedModel, list[SparseMethod]]
ROUNDING = {"bfloat16": 2.0**-8, "float32": 2.0**-21}
"""What one rounding moves; float32 sums hundreds of terms, which costs it three of its 24 bits."""
SPARE, WORST, FEW = 2.0, 3.0, 0.005
MIXED = (("snapkv", "kivi", "palu", "dense", "kvzip", "quest"), ("adakv", "streamingllm", "fp8_kv", "dense", "omnikv", "h2o"))
"""Methods of the rows of one batch: the short rows are those that read everything."""


def served(shape: str, names: tuple[str, ...], device: str, dtype: str, moved: float = 0.0) -> Served:
    """The model and its methods; skips where one of them does not serve it."""
    loaded = drawn(shape, device, getattr(torch, dtype), moved)
    found = [method_of(name, loaded) for name in names]
    if None in found:
        pytest.skip(f"does not serve {shape}")
    return loaded, [method for method in found if method is not None]


def forms(names: tuple[str, ...]) -> tuple[int, ...]:
    """One name: every row is of that method; else each has its own."""
    return tuple(range(len(names))) if len(names) > 1 else (0,) * len(PROMPTS)


@cache
def exact(shape: str, names: tuple[str, ...]) -> tuple[Tensor, tuple[Choices, ...]]:
    """Log-probabilities in float64 on the CPU, and by method what was chosen."""
    loaded, methods = served(shape, names, "cpu", "float64")
    chosen = tuple(Choices() for _ in methods)
    noting = [each.noting(method) for each, method in zip(chosen, methods, strict=True)]
    return play(engine(loaded, noting), forms(names)), chosen


def follow(shape: str, names: tuple[str, ...], device: str, dtype: str, moved: float = 0.0) -> tuple[Tensor, int, int]:
    """The same with those choices; how many it would not have made, and of how many."""
    loaded, methods = served(shape, names, device, dtype, moved)
    pairs = [each.followed_by(method) for each, method in zip(exact(shape, names)[1], methods, strict=True)]
    found = play(engine(loaded, [method for method, _ in pairs]), forms(names))
    return found, sum(count.differ for _, count in pairs), sum(count.total for _, count in pairs)


@cache
def rounded(shape: str, names: tuple[str, ...], dtype: str) -> tuple[Tensor, int, int]:
    """The same in float64 with weights moved by a rounding of the dtype."""
    return follow(shape, names, "cpu", "float64", ROUNDING[dtype])


def compare(shape: str, names: tuple[str, ...], device: str, dtype: str) -> None:
    want = exact(shape, names)[0]
    (moved, usual, _), (got, differ, total) = rounded(shape, names, dtype), follow(shape, names, device, dtype)
    found, allowed = distances(got, want), distances(moved, want)
    mean, most = (float(each.square().mean().sqrt()) for each in (found, allowed))
    print(f"{shape} {' '.join(names)} {dtype}: off by {mean:.1e} in the mean, {float(found.max()):.1e} at worst; one rounding "
          f"of each weight {most:.1e}, {float(allowed.max()):.1e}; {differ} and {usual} other choices of {total}")  # fmt: skip
    assert mean <= SPARE * most
    assert float(found.max()) <= WORST * float(allowed.max())
    assert differ <= WORST * usual + total * FEW


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("name", methods.NAMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_off_by_rounding_alone(shape: str, name: str, dtype: str, device: str) -> None:
    compare(shape, (name,), device, dtype)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("names", MIXED, ids=" ".join)
def test_rows_of_six_methods_in_one_batch(names: tuple[str, ...], dtype: str, device: str) -> None:
    """Each method that seals or selects does so in it."""
    compare("qwen3-128-4", names, device, dtype)
    idle = {name for name, each in zip(names, exact("qwen3-128-4", names)[1], strict=True) if not any(each.made)}
    assert idle == {"dense", "palu"} & {*names}


@pytest.mark.gpu
@pytest.mark.parametrize("name", methods.NAMES)
def test_units_above_four_gib_hold_the_same(name: str) -> None:
    """Bit for bit: where a unit lies is no part of any result."""
    loaded = drawn("qwen3-128-4", "cuda", torch.bfloat16)
    method = method_of(name, loaded)
    assert method is not None
    low, high = engine(loaded, [method]), engine(loaded, [method], memory=9 << 29)
    assert high.arena.allocate(UnitClass("filler", 1 << 30), 4) == [granules << 22 for granules in range(4)]
    assert torch.equal(play(high), play(low))


def test_a_page_that_is_not_read_would_be_seen() -> None:
    """What the bounds are for: reading the best half only is much further off than they allow."""
    want, other = exact("qwen3-128-4", ("dense",))[0], exact("qwen3-128-4", ("quest",))[0]
    allowed = distances(rounded("qwen3-128-4", ("dense",), "bfloat16")[0], want)
    assert float(distances(other, want).max()) > WORST * float(allowed.max())
