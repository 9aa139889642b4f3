"""What our engine keeps of a prompt against kvpress and against brute force in float64, over the same models and prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from evicted import Engine, kept_mask
from oracle import Kept, Run, ask_kvpress
from recompute import Choice, agreement, keep_across_heads, keep_per_head, window_scores
from recorded import Recorded, Seen
from subjects import MICRO, text, tiny

pytestmark = pytest.mark.slow
TOLERANCE = 2e-5  # how far a score in float32 may be from one in float64, as a share of the largest

SNAPKV = [(8, 5, 40), (16, 7, 17), (64, 5, 100), (1, 1, 30)]  # window, kernel, capacity
STREAMING = [(4, 37), (0, 20), (1, 119)]  # sinks, capacity
ADAKV = [(0.2, 24), (0.0, 40), (0.8, 60), (1.0, 40)]  # share that is sure, capacity; window 8, kernel 5


@dataclass
class Case:
    folder: Path
    tokens: list[int]
    seen: list[Seen]
    kvpress: dict[tuple[Any, ...], Kept]


@pytest.fixture(scope="module", params=["qwen3", "llama", "micro"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, folder = request.param, MICRO
    if family != "micro":
        folder = tmp_path_factory.mktemp(family)
        tiny(folder, family)
    tokens = list(text(60 if family == "micro" else 16).encode())
    runs: dict[tuple[Any, ...], Run] = {}
    for window, kernel, capacity in SNAPKV:
        options = {"window_size": window, "kernel_size": kernel}
        runs["snapkv", window, kernel, capacity] = Run("snapkv", tokens, capacity, options)
    for sinks, capacity in STREAMING:
        runs["streamingllm", sinks, capacity] = Run("streamingllm", tokens, capacity, {"n_sink": sinks})
    for share, capacity in ADAKV:
        options = {"window_size": 8, "kernel_size": 5, "alpha_safeguard": share}
        runs["adakv", share, capacity] = Run("adakv", tokens, capacity, options)
    answers = ask_kvpress(folder, list(runs.values()), tmp_path_factory.mktemp("kvpress"))
    seen = Recorded(folder, torch.float64).prompt(tokens)
    return Case(folder, tokens, seen, dict(zip(runs, answers, strict=True)))


def check(case: Case, name: str, options: dict[str, Any], choices: list[Choice], largest: float, theirs: Kept) -> None:
    """Both times the same positions, but for those whose score is nearer to the cut than the tolerance."""
    ours = kept_mask(Engine(case.folder, name, dtype="float32", **options).turn(case.tokens, count=2), len(case.tokens))
    kvpress, tolerance = torch.from_numpy(theirs.kept), TOLERANCE * largest
    choice = Choice(torch.stack([each.kept for each in choices]), torch.stack([each.margin for each in choices]))
    exact, pressed = agreement(choice, ours, tolerance), agreement(Choice(kvpress, choice.margin), ours, tolerance)
    print(f"brute force {exact}; kvpress {pressed}")
    for found in (exact, pressed):
        assert found.clear >= 0.98 * found.positions
        assert found.clear_same >= 0.999 * found.clear
        assert found.widest <= 2 * tolerance
    assert int(ours.sum()) == int(kvpress.sum())


@pytest.mark.parametrize(("window", "kernel", "capacity"), SNAPKV)
def test_snapkv(case: Case, window: int, kernel: int, capacity: int) -> None:
    scores = [window_scores(seen.q, seen.k, window, kernel) for seen in case.seen]
    options = {"capacity": capacity, "window": window, "kernel": kernel}
    choices, theirs = (
        [keep_per_head(layer, window, capacity) for layer in scores],
        case.kvpress["snapkv", window, kernel, capacity],
    )
    check(case, "snapkv", options, choices, torch.stack(scores).max().item(), theirs)


@pytest.mark.parametrize(("share", "capacity"), ADAKV)
def test_adakv(case: Case, share: float, capacity: int) -> None:
    scores = [window_scores(seen.q, seen.k, 8, 5) for seen in case.seen]
    options = {"capacity": capacity, "window": 8, "kernel": 5, "pool": "avg", "safeguard": share}
    choices = [keep_across_heads(layer, 8, capacity, share) for layer in scores]
    check(case, "adakv", options, choices, torch.stack(scores).max().item(), case.kvpress["adakv", share, capacity])


@pytest.mark.parametrize(("sinks", "capacity"), STREAMING)
def test_streamingllm(case: Case, sinks: int, capacity: int) -> None:
    engine = Engine(case.folder, "streamingllm", dtype="float32", sinks=sinks, recent=capacity - sinks)
    turn = engine.turn(case.tokens, count=2)
    kvpress = torch.from_numpy(case.kvpress["streamingllm", sinks, capacity].kept)
    assert torch.equal(kept_mask(turn, len(case.tokens)), kvpress)
