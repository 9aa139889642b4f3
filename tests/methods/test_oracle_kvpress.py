"""kvpress against brute force in float64 over transformers' own tensors: the two oracles of eviction methods say the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Kept, Run, ask_kvpress
from recompute import (
    Choice,
    agreement,
    keep_across_heads,
    keep_across_model,
    keep_first_and_last,
    keep_per_head,
    replay_scores,
    window_scores,
)
from recorded import Recorded
from subjects import MICRO, text, tiny
from torch import Tensor
from transformers import AutoTokenizer

pytestmark = pytest.mark.slow
TOLERANCE = 2e-5  # how far a score of kvpress in float32 may be from ours in float64, as a share of the largest score

SNAPKV = [(8, 5, 40), (16, 7, 17), (64, 5, 100), (1, 1, 30)]  # window, kernel, capacity
STREAMING = [(4, 37), (0, 20), (1, 119)]  # sinks, capacity
ADAKV = [(0.2, 24), (0.0, 40), (0.8, 60), (1.0, 40)]  # share that is sure, capacity; window 8, kernel 5
KVZIP = [(2048, False, 30), (2048, True, 30), (50, False, 60), (50, True, 60)]  # chunk, layerwise, capacity


@dataclass
class Case:
    """One model with one prompt, and what kvpress did with it, by press and setting."""

    tokens: list[int]
    prefix: list[int]
    suffix: list[int]
    kept: dict[tuple[Any, ...], Kept]
    recorded: Recorded


def runs(tokens: list[int]) -> dict[tuple[Any, ...], Run]:
    found: dict[tuple[Any, ...], Run] = {}
    for window, kernel, capacity in SNAPKV:
        options = {"window_size": window, "kernel_size": kernel}
        found["snapkv", window, kernel, capacity] = Run("snapkv", tokens, capacity, options)
    for sinks, capacity in STREAMING:
        found["streamingllm", sinks, capacity] = Run("streamingllm", tokens, capacity, {"n_sink": sinks})
    for share, capacity in ADAKV:
        options = {"window_size": 8, "kernel_size": 5, "alpha_safeguard": share}
        found["adakv", share, capacity] = Run("adakv", tokens, capacity, options)
    for chunk, layerwise, capacity in KVZIP:
        options = {"chunk_size": chunk, "layerwise": layerwise, "n_sink": 4}
        found["kvzip", chunk, layerwise, capacity] = Run("kvzip", tokens, capacity, options)
    for press in ("snapkv", "streamingllm", "adakv", "kvzip"):
        found[press, "all"] = Run(press, tokens, len(tokens), {"alpha_safeguard": 0.2} if press == "adakv" else {})
    return found


@pytest.fixture(scope="module", params=["qwen3", "llama", "micro"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family = request.param
    folder = MICRO
    if family != "micro":
        folder = tmp_path_factory.mktemp(family)
        tiny(folder, family)
    templated = family != "llama"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prefix = tokenizer.encode("<|im_start|>user\n", add_special_tokens=False) if templated else []
    suffix = tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n" if templated else "\n", add_special_tokens=False)
    tokens = prefix + list(text(60 if family == "micro" else 16).encode())
    asked = runs(tokens)
    answers = ask_kvpress(folder, list(asked.values()), tmp_path_factory.mktemp("kvpress"))
    return Case(tokens, prefix, suffix, dict(zip(asked, answers, strict=True)), Recorded(folder, torch.float64))


def widest_gap(scores: Tensor, theirs: Kept) -> float:
    """Between our scores and theirs, which for a window go on over its positions."""
    return (torch.from_numpy(theirs.scores).double()[..., : scores.shape[-1]] - scores).abs().max().item()


def stacked(choices: list[Choice]) -> Choice:
    return Choice(torch.stack([choice.kept for choice in choices]), torch.stack([choice.margin for choice in choices]))


def check(choices: list[Choice], scores: Tensor, theirs: Kept, capacity: int) -> None:
    """The same scores within the tolerance, and the same kept sets but for near ties."""
    kept, tolerance = torch.from_numpy(theirs.kept), TOLERANCE * scores.max().item()
    gap, ours = widest_gap(scores, theirs), stacked(choices)
    found = agreement(ours, kept, tolerance)
    print(f"scores up to {scores.max():.2f}, largest gap {gap:.1e}; {found}")
    assert gap <= tolerance
    assert int(kept.sum()) == int(ours.kept.sum()) == kept.shape[0] * kept.shape[1] * capacity
    assert found.clear >= 0.98 * found.positions
    assert found.clear_same >= 0.999 * found.clear
    assert found.widest <= 2 * tolerance  # a score and the cut may each be off by one tolerance


@pytest.mark.parametrize(("window", "kernel", "capacity"), SNAPKV)
def test_snapkv(case: Case, window: int, kernel: int, capacity: int) -> None:
    scores = [window_scores(seen.q, seen.k, window, kernel) for seen in case.recorded.prompt(case.tokens)]
    choices = [keep_per_head(layer, window, capacity) for layer in scores]
    check(choices, torch.stack(scores), case.kept["snapkv", window, kernel, capacity], capacity)


@pytest.mark.parametrize(("share", "capacity"), ADAKV)
def test_adakv_ranks_across_the_heads_of_a_layer(case: Case, share: float, capacity: int) -> None:
    scores = [window_scores(seen.q, seen.k, 8, 5) for seen in case.recorded.prompt(case.tokens)]
    choices = [keep_across_heads(layer, 8, capacity, share) for layer in scores]
    theirs = case.kept["adakv", share, capacity]
    check(choices, torch.stack(scores), theirs, capacity)
    assert theirs.kept.sum(axis=2).min() >= max(int(capacity * share), 8)


def test_differences_in_bfloat16_are_near_ties(tmp_path: Path) -> None:
    """micro as it is shipped: only positions whose scores lie so near the cut that rounding can carry them over may differ."""
    tokens = list(text(60).encode())
    asked = runs(tokens)
    names: list[tuple[Any, ...]] = [("snapkv", *SNAPKV[0]), ("adakv", *ADAKV[0])]
    answers = ask_kvpress(MICRO, [asked[name] for name in names], tmp_path, "bfloat16")
    scores = [window_scores(seen.q, seen.k, 8, 5) for seen in Recorded(MICRO, torch.float64).prompt(tokens)]
    per_head = [keep_per_head(layer, 8, 40) for layer in scores]
    across = [keep_across_heads(layer, 8, 24, 0.2) for layer in scores]
    for choices, theirs in zip((per_head, across), answers, strict=True):
        gap = widest_gap(torch.stack(scores), theirs)
        found = agreement(stacked(choices), torch.from_numpy(theirs.kept), 2 * gap)
        print(f"largest gap {gap:.1e}; {found}")
        assert found.clear_same == found.clear
        assert found.widest <= 2 * gap


@pytest.mark.parametrize(("sinks", "capacity"), STREAMING)
def test_streamingllm(case: Case, sinks: int, capacity: int) -> None:
    theirs = torch.from_numpy(case.kept["streamingllm", sinks, capacity].kept)
    ours = keep_first_and_last(len(case.tokens), sinks, capacity)
    assert torch.equal(theirs, ours.expand_as(theirs))


@pytest.mark.parametrize(("chunk", "layerwise", "capacity"), KVZIP)
def test_kvzip(case: Case, chunk: int, layerwise: bool, capacity: int) -> None:
    theirs = case.kept["kvzip", chunk, layerwise, capacity]
    start, replays, edges = len(case.prefix), [], []
    context = case.tokens[start:]
    for at in range(0, len(context), chunk):
        piece = context[at : at + chunk]
        ask = list(b"\n\nRepeat the previous context exactly.")
        if at:
            ask = list(b"\n\nRepeat the part of the previous context exactly, starting with") + context[at - 8 : at]
        replays.append(ask + case.suffix + piece)
        edges.append((start + at, start + at + len(piece)))
    assert (theirs.prefix, theirs.replays) == (start, replays)

    recorded = case.recorded.replay(case.tokens, replays)
    scores = torch.zeros(theirs.kept.shape, dtype=torch.float64)
    for (first, end), layers in zip(edges, recorded, strict=True):
        for layer, seen in enumerate(layers):
            scores[layer, :, first:end] = replay_scores(seen.q, seen.k, first, end, 4)
    choice = keep_across_model(scores, 4, capacity, layerwise)
    check([Choice(*pair) for pair in zip(choice.kept, choice.margin, strict=True)], scores, theirs, capacity)


@pytest.mark.parametrize("press", ["snapkv", "streamingllm", "adakv", "kvzip"])
def test_a_budget_of_the_whole_length_keeps_all(case: Case, press: str) -> None:
    assert case.kept[press, "all"].kept.all()
