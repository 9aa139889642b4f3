"""Methods on a GPU say what they say on a CPU: two turns of a chain, and rows beside one another, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from played import Turn, engine_of, together, turn

from agentkv import methods
from agentkv.engine.loader import load_model

pytestmark = pytest.mark.gpu
METHODS = (
    "quest:budget=24,dense_layers=1",
    "quest:budget=40,dense_layers=0,heads=all,reduce=sum",
    "omnikv:budget=24,observers=(0,),recent=4",
    "omnikv:budget=0.2,observers=(1,),recent=4,sinks=2,score=logit",
    "snapkv:capacity=40,window=8",
    "adakv:capacity=40,window=8",
    "h2o:heavy=20,recent=20,interval=4",
    "h2o:heavy=20,recent=20,window=8",
)


def prompt(count: int, seed: int) -> list[int]:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def said(folder: Path, method: str, device: str) -> tuple[list[Turn], list[list[int]]]:
    """Two turns, the second behind an answer; and three requests at once, one of them shorter than the budget."""
    loaded = load_model(folder, dtype="float32", device=device)
    llm = engine_of(loaded, methods.parse(method))
    first = turn(llm, prompt(150, 1), "chain", count=20)
    turns = [first, turn(llm, first.ids + prompt(40, 2), "chain", count=20)]
    several = engine_of(loaded, methods.parse(method))
    return turns, together(several, [prompt(count, count) for count in (130, 12, 87)], 16)


def compare(folder: Path, method: str) -> float:
    """The largest distance between log-probabilities of the same tokens."""
    torch.backends.cuda.matmul.allow_tf32 = False
    (mine, rows), (want, their_rows) = said(folder, method, "cuda"), said(folder, method, "cpu")
    assert [each.ids for each in mine] == [each.ids for each in want]
    assert rows == their_rows
    pairs = zip(mine, want, strict=True)
    return max(abs(a - b) for got, other in pairs for a, b in zip(got.logprobs, other.logprobs, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_a_gpu_says_the_same(folder: Path, method: str) -> None:
    assert compare(folder, method) < 1e-3
