"""Captured decode steps on a CPU, by a graph that runs recorded operations again: the tokens are those of an eager engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from graph_life import BUCKETS, COARSE, EXTENDED, METHODS, Counted, Life, play, talk

from agentkv import methods
from agentkv.check.models import tiny
from agentkv.check.recorded import RecordedDevice
from agentkv.engine.core import Request
from agentkv.engine.graphs import Graphs
from agentkv.engine.limits import Buckets
from agentkv.engine.loader import LoadedModel
from agentkv.engine.sparse import SparseMethod
from agentkv.engine.view import DeviceBatch
from agentkv.types import Sampling


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny("Qwen3ForCausalLM")


def graphs() -> Graphs[Any]:
    return Graphs(RecordedDevice(), BUCKETS)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_replayed_gives_the_tokens_of_an_eager_engine(model: LoadedModel, name: str) -> None:
    eager, replayed = (Life(model, (name,), each) for each in (None, graphs()))
    assert play(replayed, 1) == play(eager, 1)
    found = replayed.llm.runner.graphs.stats()
    assert found.replays > 2 * found.captured > 0
    assert not found.failed


@pytest.mark.parametrize("name", METHODS)
def test_steps_launched_ahead_of_their_tokens(model: LoadedModel, name: str) -> None:
    eager, ahead = Life(model, (name,), None), Life(model, (name,), graphs(), ahead=True)
    assert play(ahead, 9) == play(eager, 9)
    assert ahead.llm.runner.graphs.stats().replays


@pytest.mark.parametrize("seed", [2, 3])
def test_all_methods_in_one_engine(model: LoadedModel, seed: int) -> None:
    eager, replayed = (Life(model, tuple(METHODS), each) for each in (None, graphs()))
    assert play(replayed, seed) == play(eager, seed)
    found = replayed.llm.runner.graphs.stats()
    assert found.replays
    assert not found.failed


@pytest.mark.parametrize("name", ["dense", "snapkv", "adakv", "kivi", "h2o"])
def test_short_chunks_of_prompts_are_replayed(model: LoadedModel, name: str) -> None:
    counted = Counted(RecordedDevice(), COARSE)
    eager, replayed = (Life(model, (name,), each) for each in (None, counted))
    assert talk(replayed, 1) == talk(eager, 1)
    assert not counted.stats().failed
    if name in EXTENDED:
        assert counted.alone > 2
        assert counted.beside > 0 or name != "dense"
    else:
        assert counted.alone == counted.beside == 0


def test_short_chunks_of_all_methods_in_one_engine(model: LoadedModel) -> None:
    counted = Counted(RecordedDevice(), COARSE)
    eager, replayed = (Life(model, tuple(METHODS), each) for each in (None, counted))
    assert talk(replayed, 2, 40) == talk(eager, 2, 40)
    assert not counted.stats().failed


def test_short_chunks_in_layers_with_windows() -> None:
    model = tiny("Qwen3ForCausalLM", sliding=(None, 20, 20))
    counted = Counted(RecordedDevice(), COARSE)
    eager, replayed = Life(model, ("dense",), None), Life(model, ("dense",), counted, ahead=True)
    assert sorted(talk(replayed, 3)) == sorted(talk(eager, 3))  # steps launched ahead end in another order
    assert counted.alone > 0


def test_long_chunks_run_as_they_are(model: LoadedModel) -> None:
    counted = Counted(RecordedDevice(), Buckets((1, 2), 512, (16, 64), far=50))
    eager, replayed = (Life(model, ("dense",), each) for each in (None, counted))
    for life in (eager, replayed):
        for chain, count in (("a", 65), ("b", 64), ("c", 60), ("d", 50), ("e", 200), ("d", 40), ("d", 40), ("d", 33)):
            life.start(chain, [i % 128 for i in range(count)], 0, Sampling(max_tokens=1))
            life.steps(20)
    assert replayed.made == eager.made
    assert (counted.alone, counted.stats().captured) == (1, 1)  # the third of those that fit


def test_steps_that_fill_a_page_have_no_graph_of_their_own(model: LoadedModel) -> None:
    """A method with state of whole pages, which writes it in one step of a page, captures no more than one without."""
    captured = []
    for name in ("dense", "quest"):
        life = Life(model, (name,), graphs())
        life.start("a", list(range(40)), 0, Sampling(max_tokens=60))
        life.steps(100)
        captured.append(life.llm.runner.graphs.stats().captured)
    assert captured[0] == captured[1] > 0


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "LlamaForCausalLM"])
def test_windows(architecture: str) -> None:
    model = tiny(architecture, sliding=(None, 20, 20))
    eager, replayed = (Life(model, ("dense",), each) for each in (None, graphs()))
    assert play(replayed, 4) == play(eager, 4)
    assert replayed.llm.runner.graphs.stats().replays


def test_guesses_are_rows_of_their_own(model: LoadedModel) -> None:
    eager, replayed = (Life(model, ("dense",), each, lookup=8) for each in (None, graphs()))
    for life in (eager, replayed):
        life.start("a", [1, 2, 3, 4, 5] * 12, 0, Sampling(max_tokens=60))
        life.start("b", [7, 8, 9] * 20, 0, Sampling(max_tokens=60, temperature=0.5, seed=1))
        life.steps(100)
    assert replayed.made == eager.made
    assert replayed.llm.decoding.accepted == eager.llm.decoding.accepted > 0
    assert replayed.llm.runner.graphs.stats().replays
    lives = [Life(model, ("dense",), each, lookup=8) for each in (None, graphs())]
    assert play(lives[1], 5) == play(lives[0], 5)


@dataclass(frozen=True)
class Waiting(SparseMethod):
    """A hook that looks at a number of the device."""

    def on_step_end(self, batch: DeviceBatch) -> None:
        assert float(batch.positions[0]) >= 0


def test_what_cannot_be_captured_runs_as_it_is_and_is_told_of_once(model: LoadedModel, caplog: Any) -> None:
    eager, replayed = (Life(model, (Waiting(),), each) for each in (None, graphs()))
    assert play(replayed, 6) == play(eager, 6)
    found = replayed.llm.runner.graphs.stats()
    assert found.captured == found.replays == 0
    assert len(found.failed) == len(caplog.records) < found.eager
    assert all("waits for the device" in why for why in found.failed.values())


@pytest.mark.parametrize(
    "options",
    [{"heavy": 0.2, "recent": 0.1, "interval": 4}, {"heavy": 12, "recent": 8, "interval": 5, "eviction": "interval"}],
)
def test_scores_that_a_step_rewrites(model: LoadedModel, options: dict[str, Any]) -> None:
    """Budgets that are shares of the row's prompt, and tokens that go in bursts: each replay goes on from the one before."""
    method = methods.get("h2o", **options)
    eager, replayed = (Life(model, (method,), each) for each in (None, graphs()))
    assert play(replayed, 8) == play(eager, 8)
    found = replayed.llm.runner.graphs.stats()
    assert found.replays > found.captured > 0
    assert not found.failed


def test_few_graphs_are_kept(model: LoadedModel) -> None:
    few = Graphs[Any](RecordedDevice(), Buckets((1, 2, 4, 8), 32), most=2)
    eager, replayed = (Life(model, ("dense",), each) for each in (None, few))
    assert play(replayed, 7) == play(eager, 7)
    assert few.stats().kept == len(few.keys) == 2 < few.stats().captured


def test_masks_penalties_and_logprobs_come_after_the_graph(model: LoadedModel) -> None:
    outputs = []
    for each in (None, graphs()):
        life = Life(model, ("dense",), each)
        sampling = Sampling(max_tokens=30, repetition_penalty=1.3, logit_bias={5: 3.0}, logprobs=True, top_logprobs=2)
        life.start("a", list(range(40)), 0, sampling)
        life.start("b", list(range(50)), 0, Sampling(max_tokens=30, temperature=1.0, top_p=0.8, min_p=0.01, seed=3))
        life.llm.add(Request([3] * 20, Sampling(max_tokens=30), mask=lambda ids: bytes([len(ids) % 2, 1] * 64)))
        scores = [(out.token_ids, out.scores) for _ in range(40) if life.llm.has_work for out in life.llm.step()]
        outputs.append(scores)
    (eager, replayed) = outputs
    assert [ids for ids, _ in replayed] == [ids for ids, _ in eager]
    for (_, ours), (_, theirs) in zip(replayed, eager, strict=True):
        for mine, wanted in zip(ours, theirs, strict=True):
            assert mine.logprob == pytest.approx(wanted.logprob, abs=1e-9)
            assert [token for token, _ in mine.top] == [token for token, _ in wanted.top]
