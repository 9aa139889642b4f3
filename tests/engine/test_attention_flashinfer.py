"""FlashInfer's decode attention in our engine: what it is given, what it is not asked for, and the tokens that come of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from flashinfer_stand_in import StandIn, install
from graph_life import BUCKETS, METHODS, Life, play
from view_scene import SCALE, Row, Scene, brute

from agentkv.check.models import tiny
from agentkv.check.recorded import RecordedDevice
from agentkv.engine.attention import attend
from agentkv.engine.attention_flashinfer import FlashInferDecode, Heads
from agentkv.engine.graphs import Graphs
from agentkv.engine.loader import LoadedModel
from agentkv.engine.view import AttentionView
from agentkv.errors import BadRequest
from agentkv.types import Sampling

ROWS = [Row(1, 30), Row(1, 4), Row(1, 1), Row(1, 57)]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return install(monkeypatch)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny("Qwen3ForCausalLM")


@pytest.mark.parametrize("name", ["dense", "snapkv", "quest", "kivi"])
def test_the_tokens_are_those_of_our_own_kernel(model: LoadedModel, name: str, library: StandIn) -> None:
    """Eager and replayed, among rows that come and go; they read in full until something is sealed, or in some layers."""
    own, eager = Life(model, (name,), None), Life(model, (name,), None, attention="flashinfer")
    replayed = Life(model, (name,), Graphs(RecordedDevice(), BUCKETS), attention="flashinfer")
    before = len(library.calls)
    wanted = play(own, 1)
    assert len(library.calls) == before
    assert play(eager, 1) == wanted
    assert play(replayed, 1) == wanted
    found = replayed.llm.runner.graphs.stats()
    assert found.replays > found.captured > 0
    assert not found.failed
    assert len(library.calls) > before


def test_all_methods_in_one_engine(model: LoadedModel, library: StandIn) -> None:
    own, theirs = (Life(model, tuple(METHODS), None, attention=each) for each in ("triton", "flashinfer"))
    assert play(theirs, 2) == play(own, 2)


def test_layers_with_a_window_and_guesses_stay_ours(library: StandIn) -> None:
    model = tiny("LlamaForCausalLM", sliding=(None, 20, 20))
    own, theirs = (Life(model, ("dense",), None, lookup=8, attention=each) for each in ("triton", "flashinfer"))
    assert play(theirs, 3) == play(own, 3)
    life = Life(model, ("dense",), None, attention="flashinfer")
    life.start("a", list(range(40)), 0, Sampling(max_tokens=20))
    life.steps(2)
    before = len(library.calls)
    life.steps(3)
    assert len(library.calls) - before == 3, "one layer of three sees all"


def test_rows_tables_and_scale_reach_the_library(library: StandIn) -> None:
    """Lines of the table in another order than the rows', pages in any order, NaN wherever nothing lives."""
    scene = Scene(ROWS, False, page_size=4)
    batch = replace(scene.batch, library=_kernel(scene))
    done = attend(scene.q, AttentionView((batch.part(0),)), batch, SCALE)
    assert library.calls[-1] == (4, 15)
    assert done.lse is None
    assert (done.out - brute(scene, [])[0]).abs().max() <= 1e-12


@pytest.mark.parametrize("case", ["lse", "bias", "record", "floor", "guesses", "two parts", "chunk"])
def test_what_it_gives_no_answer_to_is_not_asked(case: str, library: StandIn) -> None:
    rows = {
        "floor": [Row(1, 30, 5), Row(1, 9)],
        "guesses": [Row(3, 30), Row(1, 9)],
        "chunk": [Row(9, 30), Row(4, 9)],
        "two parts": [Row(1, 30, 0, (7, 3)), Row(1, 9, 0, (2, 0))],
    }.get(case, ROWS)
    scene = Scene(rows, case == "chunk", page_size=4)
    batch = replace(scene.batch, library=_kernel(scene))
    part, more, lines = batch.part(0), (), []
    if case == "bias":
        part = replace(part, bias=torch.zeros(len(rows), 1, 60))
    elif case == "record":
        part = replace(part, record=[])
    elif case == "two parts":
        sealed, held = scene.sealed("stripe", True)
        more, lines = (sealed,), [held]
    before = len(library.calls)
    done = attend(scene.q, AttentionView((*more, part)), batch, SCALE, lse=case == "lse")
    assert len(library.calls) == before
    assert (done.out - brute(scene, lines)[0]).abs().max() <= 1e-9


def test_a_library_that_cannot_be_loaded_is_told_when_the_engine_opens(model: LoadedModel, library: StandIn) -> None:
    def broken(*arguments: Any, **more: Any) -> None:
        raise RuntimeError("ninja: not found")

    library_module = __import__("flashinfer.decode", fromlist=["decode"])
    library_module.trtllm_batch_decode_with_kv_cache = broken
    with pytest.raises(BadRequest, match="cannot be used: RuntimeError: ninja: not found") as caught:
        Life(model, ("dense",), None, attention="flashinfer")
    assert "attention='triton'" in caught.value.hint


def _kernel(scene: Scene) -> FlashInferDecode:
    heads = Heads(scene.num_heads, scene.num_kv_heads, scene.head_dim, scene.page_size, scene.dtype, torch.device("cpu"))
    return FlashInferDecode(heads)
