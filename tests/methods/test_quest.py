"""Pages by their bounds: beside transformers told what to hide, closed forms, page state through prunes and forks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from selecting import Play, Policy, Twin, same, spying
from torch import Tensor

from agentkv import Runtime, methods
from agentkv.engine.core import GRANULE, Edit
from agentkv.engine.loader import LoadedModel, load_model
from agentkv.errors import BadRequest
from agentkv.methods.quest import Quest

PAGE = 8


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(folder, dtype="float64")


def prompt(count: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def by_pages(budget: int, page: int = PAGE, reduce: str = "max", heads: str = "each", dense: int = 1) -> Policy:
    """The definition, page by page: of all pages but the newest, those with the greatest bounds that fit beside it."""

    def policy(layer: int, q: Tensor, k: Tensor, scale: float) -> list[list[int]] | None:
        length, count = k.shape[1], -(-k.shape[1] // page)
        fit = (budget - (length - page * (count - 1))) // page
        if layer < dense or length <= budget:
            return None
        bounds = []
        for head, keys in enumerate(k):
            group = q.view(len(k), -1, q.shape[1])[head]
            of_pages = []
            for number in range(count - 1):
                low, high = keys[number * page : number * page + page].aminmax(dim=0)
                by_query = [torch.maximum(one * low, one * high).sum() for one in group]
                of_pages.append(float(max(by_query) if reduce == "max" else sum(by_query)))
            bounds.append(of_pages)
        if heads == "all":
            bounds = [[max(each) for each in zip(*bounds, strict=True)]] * len(k)
        best = [sorted(range(count - 1), key=lambda i: -each[i])[:fit] for each in bounds]
        return [[at for at in range(length) if at // page in chosen or at // page == count - 1] for chosen in best]

    return policy


@pytest.mark.parametrize(
    ("budget", "page", "more"),
    [
        (24, 8, {}),
        (39, 8, {"reduce": "sum", "dense_layers": 0}),
        (16, 8, {"heads": "all"}),
        (8, 8, {}),
        (10, 1, {}),
        (48, 16, {"dense_layers": 2}),
    ],
)
def test_answers_are_those_of_transformers_which_sees_the_same_pages(
    folder: Path, loaded: LoadedModel, budget: int, page: int, more: dict[str, Any]
) -> None:
    options = {"dense_layers": 1} | more
    play = Play(loaded, Quest(budget, **options), page)
    twin = Twin(folder, by_pages(budget, page, more.get("reduce", "max"), more.get("heads", "each"), options["dense_layers"]))
    first, more_ids = prompt(90), prompt(30, seed=2)
    one = play.turn(first, "c", count=20)
    same(one, twin.turn(first, count=20))
    # the last token was not forwarded, the next turn's prompt begins with it
    two = play.turn([*first, *one.made, *more_ids], "c", count=20)
    same(two, twin.turn([one.made[-1], *more_ids], count=20))
    assert two.cached == len(first) + 19


def test_pages_of_one_key_are_the_tokens_that_score_highest(folder: Path, loaded: LoadedModel) -> None:
    def best(layer: int, q: Tensor, k: Tensor, scale: float) -> list[list[int]] | None:
        scores = torch.einsum("hgd,hnd->hgn", q.view(len(k), -1, q.shape[1]), k).amax(1)[:, :-1]
        return [[*each.topk(9).indices.tolist(), k.shape[1] - 1] for each in scores] if layer else None

    ids = prompt(60)
    same(Play(loaded, Quest(10, dense_layers=1), 1).turn(ids), Twin(folder, best).turn(ids))


@pytest.mark.parametrize("page", [1, 8, 16])
def test_within_the_budget_it_is_full_attention(loaded: LoadedModel, page: int) -> None:
    ids = prompt(77)
    dense, wide = (Play(loaded, each, page).turn(ids, count=20) for each in (methods.get("dense"), Quest(96, dense_layers=0)))
    assert dense == wide  # bit for bit
    narrow = Play(loaded, Quest(32, dense_layers=0), page).turn(ids, count=20)
    assert narrow.logprobs != dense.logprobs


def test_requests_in_a_batch_answer_as_alone(loaded: LoadedModel) -> None:
    prompts = [prompt(length, seed=length) for length in (5, 23, 24, 90, 140)]
    method = Quest(24, dense_layers=1)
    for each, together in zip(prompts, Play(loaded, method).turns(prompts), strict=True):
        same(together, Play(loaded, method).turn(each))


def test_a_reused_prefix_brings_its_bounds(loaded: LoadedModel) -> None:
    play, ids = Play(loaded, Quest(24, dense_layers=0)), prompt(100)
    fresh = play.turn(ids)
    again = play.turn(ids)
    assert again.cached >= 96
    same(again, fresh)
    other = [*ids[:64], *prompt(40, seed=9)]
    branch = play.turn(other)
    assert branch.cached == 64
    same(branch, Play(loaded, Quest(24, dense_layers=0)).turn(other))


def kept_bounds(play: Play, chain: str) -> tuple[Tensor, Tensor]:
    """A chain's bounds of full pages as they are held, and as its keys' bytes say: both
    [num_pages, num_layers, num_kv_heads, 2, head_dim]."""
    state = play.llm.chains.chains[chain].state
    assert state is not None
    kv, bounds = state.holdings
    full = state.resident // PAGE
    group = play.runner.groups[0]
    shape = group.num_layers, group.num_kv_heads, 2, group.page_size, group.head_dim
    arena = play.runner.pages.arena

    def read(units: list[int], dims: tuple[int, ...]) -> Tensor:
        size = 8 * int(torch.tensor(dims).prod())
        return torch.stack([arena[unit * GRANULE : unit * GRANULE + size].view(torch.float64).view(dims) for unit in units])

    keys = read(list(kv.units[:full]), shape)[:, :, :, 0]
    held = read(list(bounds.units[:full]), (*shape[:3], group.head_dim))
    return held, torch.stack([keys.amin(3), keys.amax(3)], 3)


def test_bounds_are_those_of_the_keys_through_prune_fork_and_rollback(folder: Path, loaded: LoadedModel) -> None:
    play, twin = Play(loaded, Quest(24, dense_layers=1)), Twin(folder, by_pages(24))
    ids = prompt(90)
    one = play.turn(ids, "a", count=20)
    twin.turn(ids, count=20)
    held, wanted = kept_bounds(play, "a")
    assert len(held) == 13
    assert torch.equal(held, wanted)
    whole, spans = [*ids, *one.made], [(10, 29), (70, 75)]
    play.llm.prune("a", spans)
    twin.prune(spans)
    held, wanted = kept_bounds(play, "a")
    assert len(held) == 10
    assert torch.equal(held, wanted)
    follow = [*whole, *prompt(21, seed=4)]
    edits = (Edit(len(whole), tuple(spans)),)
    play.llm.fork("a", "b", len(whole))
    for chain in ("a", "b"):
        two = play.turn(follow, chain, count=20, edits=edits)
        if chain == "a":
            same(two, twin.turn(follow[len(whole) - 1 :], count=20))
            first = two
        same(two, first)
        assert torch.equal(*kept_bounds(play, chain))
    play.llm.rollback("b", len(whole))
    same(play.turn(follow, "b", count=20, edits=edits), first)
    assert torch.equal(*kept_bounds(play, "b"))


def test_no_key_of_a_page_scores_above_its_bound(loaded: LoadedModel) -> None:
    play, ids = Play(loaded, Quest(24)), prompt(96)
    play.turn(ids, "c", count=1)
    state = play.llm.chains.chains["c"].state
    assert state is not None
    held, _ = kept_bounds(play, "c")
    q = torch.randn(50, held.shape[-1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    bound = torch.maximum(q[:, None, None, None] * held[..., 0, :], q[:, None, None, None] * held[..., 1, :]).sum(-1)
    group, arena = play.runner.groups[0], play.runner.pages.arena
    shape = group.num_layers, group.num_kv_heads, 2, PAGE, group.head_dim
    for page, unit in enumerate(state.holdings[0].units[: len(held)]):
        keys = arena[unit * GRANULE :].view(torch.float64)[: int(torch.tensor(shape).prod())].view(shape)[:, :, 0]
        scores = torch.einsum("qd,lhnd->qlhn", q, keys)
        assert bool((scores <= bound[:, page, :, :, None] + 1e-12).all())


@pytest.mark.parametrize("more", [{}, {"reduce": "sum"}, {"heads": "all"}, {"budget": 8}, {"budget": 1000}])
@pytest.mark.parametrize("length", [87, 88, 89])
def test_the_reference_reads_what_the_method_reads(loaded: LoadedModel, length: int, more: dict[str, Any]) -> None:
    method = spying(Quest)(**({"budget": 32, "dense_layers": 1} | more))
    Play(loaded, method).turn(prompt(length), count=2)
    plain = method.seen.plain(loaded.config.head_dim**-0.5, PAGE)
    for layer in range(3):
        wanted = [[*read, length] for read in method.reference(plain, layer).positions]
        assert method.seen.read.get(layer, [list(range(length + 1))] * 2) == wanted
        assert len(wanted[0]) <= method.most_read(layer, length, length + 1)


@pytest.mark.parametrize(
    "options", [{"budget": 0}, {"budget": 7.5}, {"dense_layers": -1}, {"reduce": "mean"}, {"heads": "one"}]
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=next(iter(options))):
        methods.get("quest", **options)


def test_a_budget_below_a_page_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="budget=100 is less than a page of KV, 128 slots"):
        Runtime("micro", method="quest:budget=100", device="cpu", db=tmp_path / "a.db", page_size=128)
    with Runtime("micro", method="quest:budget=100", device="cpu", db=tmp_path / "b.db", page_size=16) as runtime:
        session = runtime.session()
        session.add_user("count to three " * 20)
        assert session.generate(max_tokens=5).exactness == "lossy"
