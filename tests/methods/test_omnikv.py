"""Tokens that an observing layer chooses for the layers behind it: beside transformers told what to hide, and closed forms."""

from __future__ import annotations

import json
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from selecting import Play, Policy, Twin, same, spying
from torch import Tensor

from agentkv import Runtime, methods
from agentkv.engine.core import Edit
from agentkv.engine.loader import LoadedModel, load_model
from agentkv.errors import BadRequest
from agentkv.methods.omnikv import Observers, OmniKV, places


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(folder, dtype="float64")


def prompt(count: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def by_observer(
    budget: float, observers: tuple[int, ...], sinks: int, recent: int, wait: int = 0, score: str = "probability"
) -> Policy:
    """The definition: the most that any query head gives to a token, in the last observer before the layer."""
    found: list[Tensor] = []

    def policy(layer: int, q: Tensor, k: Tensor, scale: float) -> list[list[int]] | None:
        num_kv_heads, length = k.shape[:2]
        most = int(budget) if budget > 1 else max(sinks + recent, ceil(budget * length))
        if layer in observers:
            logits = torch.einsum("hgd,hnd->hgn", q.view(num_kv_heads, -1, q.shape[1]), k) * scale
            found[:] = [(logits if score == "logit" else torch.softmax(logits, 2)).amax((0, 1))]
        near = [each for each in observers if layer - wait <= each <= layer]
        if near or layer < observers[0] or length <= most:
            return None
        middle = found[0][sinks : length - recent].topk(most - sinks - recent).indices + sinks
        return [[*range(sinks), *middle.tolist(), *range(length - recent, length)]] * num_kv_heads

    return policy


@pytest.mark.parametrize(
    "options",
    [
        {"budget": 20, "observers": (0,), "sinks": 2, "recent": 3},
        {"budget": 9, "observers": (0,), "sinks": 0, "recent": 1, "score": "logit"},
        {"budget": 12, "observers": (0,), "sinks": 1, "recent": 4, "wait": 1},
        {"budget": 0.25, "observers": (1,), "sinks": 2, "recent": 3},
        {"budget": 4, "observers": (0, 1), "sinks": 2, "recent": 2},
    ],
)
def test_answers_are_those_of_transformers_which_sees_the_same_tokens(
    folder: Path, loaded: LoadedModel, options: dict[str, Any]
) -> None:
    play, twin = Play(loaded, OmniKV(**options)), Twin(folder, by_observer(**options))
    first, more_ids = prompt(90), prompt(30, seed=2)
    one = play.turn(first, "c", count=20)
    same(one, twin.turn(first, count=20))
    two = play.turn([*first, *one.made, *more_ids], "c", count=20)
    same(two, twin.turn([one.made[-1], *more_ids], count=20))
    assert two.cached == len(first) + 19


def test_within_the_budget_it_is_full_attention(loaded: LoadedModel) -> None:
    ids = prompt(77)
    dense, wide, whole = (
        Play(loaded, each).turn(ids, count=20) for each in (methods.get("dense"), OmniKV(96, (0,)), OmniKV(1.0, (0,), recent=1))
    )
    assert dense == wide == whole  # bit for bit
    assert Play(loaded, OmniKV(40, (0,), recent=1)).turn(ids, count=20).logprobs != dense.logprobs


def test_requests_in_a_batch_answer_as_alone(loaded: LoadedModel) -> None:
    prompts = [prompt(length, seed=length) for length in (5, 23, 24, 90, 140)]
    for method in (OmniKV(24, (0,), recent=4), OmniKV(0.3, (0,), recent=2)):
        for each, together in zip(prompts, Play(loaded, method).turns(prompts), strict=True):
            same(together, Play(loaded, method).turn(each))


def test_a_reused_prefix_gives_the_same_answer(loaded: LoadedModel) -> None:
    play, ids = Play(loaded, OmniKV(24, (0,), recent=4)), prompt(100)
    fresh = play.turn(ids)
    again = play.turn(ids)
    assert again.cached >= 96
    same(again, fresh)


def test_prune_fork_and_rollback(folder: Path, loaded: LoadedModel) -> None:
    options: dict[str, Any] = {"budget": 20, "observers": (0,), "sinks": 2, "recent": 3}
    play, twin = Play(loaded, OmniKV(**options)), Twin(folder, by_observer(**options))
    ids, spans = prompt(90), [(1, 29), (70, 75)]
    one = play.turn(ids, "a", count=20)
    twin.turn(ids, count=20)
    play.llm.prune("a", spans)
    twin.prune(spans)
    whole = [*ids, *one.made]
    follow, edits = [*whole, *prompt(21, seed=4)], (Edit(len(whole), tuple(spans)),)
    play.llm.fork("a", "b", len(whole))
    first = twin.turn(follow[len(whole) - 1 :], count=20)
    for chain in ("a", "b"):
        same(play.turn(follow, chain, count=20, edits=edits), first)
    play.llm.rollback("b", len(whole))
    same(play.turn(follow, "b", count=20, edits=edits), first)


@pytest.mark.parametrize(
    "options", [{}, {"score": "logit"}, {"wait": 1}, {"budget": 0.4}, {"budget": 89}, {"observers": (0, 1)}]
)
def test_the_reference_reads_what_the_method_reads(loaded: LoadedModel, options: dict[str, Any]) -> None:
    method = spying(OmniKV)(**({"budget": 30, "observers": (0,), "sinks": 2, "recent": 5} | options))
    Play(loaded, method).turn(prompt(88), count=2)
    plain = method.seen.plain(loaded.config.head_dim**-0.5, 8)
    for layer in range(3):
        wanted = [[*read, 88] for read in method.reference(plain, layer).positions]
        assert method.seen.read.get(layer, [list(range(89))] * 2) == wanted
        assert len(wanted[0]) <= method.most_read(layer, 88, 89)
    assert (1 in method.seen.read) == (options not in ({"wait": 1}, {"budget": 89}, {"observers": (0, 1)}))


def test_the_papers_places() -> None:
    """2, 8 and 18 of 32 layers."""
    assert places(32) == (2, 8, 18)
    assert places(8) == (0, 2, 4)
    assert places(1) == (0,)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"budget": 8, "recent": 9}, "budget=8"),
        ({"budget": 1.5}, "budget=1.5"),
        ({"budget": 0.0}, "budget=0.0"),
        ({"recent": 0}, "recent=0"),
        ({"sinks": -1}, "sinks=-1"),
        ({"wait": True}, "wait=True"),
        ({"score": "sum"}, "score='sum'"),
        ({"observers": (3, 1)}, "observers=(3, 1)"),
        ({"observers": (-1,)}, "observers=(-1,)"),
        ({"observers": (0,), "prepared": "x.json"}, "give one of them"),
        ({"prepared": "nowhere.json"}, "no file of observers"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(BadRequest) as caught:
        methods.get("omnikv", **options)
    assert named in str(caught.value)


def test_observers_are_layers_of_the_model(loaded: LoadedModel) -> None:
    with pytest.raises(BadRequest, match="its layers are 0 to 2"):
        Play(loaded, OmniKV(observers=(0, 3)))


def test_what_was_prepared_for_another_model_is_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "observers.json"
    path.write_text(json.dumps({"model": loaded.fingerprint, "observers": [1]}))
    method = methods.get("omnikv", prepared=str(path))
    assert isinstance(method, OmniKV)
    assert method.prepared == Observers(loaded.fingerprint, (1,))
    Play(loaded, method)
    path.write_text(json.dumps({"model": "another", "observers": [1]}))
    other = methods.get("omnikv", prepared=str(path))
    assert other.fingerprint != method.fingerprint  # what is in the file counts, not its name
    with pytest.raises(BadRequest, match="made for another model"):
        Play(loaded, other)
    path.write_text(json.dumps({"model": "another"}))
    with pytest.raises(BadRequest, match="no file of observers"):
        methods.get("omnikv", prepared=str(path))


def test_micro_answers_from_the_face(tmp_path: Path) -> None:
    text = "the key is 7421. " + "nothing here is of any use to anybody. " * 10
    with Runtime("micro", method="omnikv:budget=64", device="cpu", db=tmp_path / "a.db") as runtime:
        session = runtime.session()
        session.add_user(text)
        turn = session.generate(max_tokens=5)
    assert turn.exactness == "lossy"
    assert turn.usage.evicted_tokens == 0
