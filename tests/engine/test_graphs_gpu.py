"""Decode steps out of CUDA graphs: the tokens are those of an eager engine, and those of torch on a CPU."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from graph_life import BUCKETS, COARSE, EXTENDED, METHODS, Counted, Life, play, talk

from agentkv.check.models import tiny
from agentkv.engine.core import Batch, EngineConfig, History, RowWork
from agentkv.engine.graphs import CudaDevice, Graphs
from agentkv.engine.limits import Limits
from agentkv.engine.loader import LoadedModel
from agentkv.engine.runner import ModelRunner
from agentkv.engine.work import TableUpdate
from agentkv.methods.dense import Dense
from agentkv.types import Sampling

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny("Qwen3ForCausalLM", "cuda")


def graphs() -> Graphs[tuple[Limits, ...]]:
    return Graphs(CudaDevice(torch.device("cuda")), BUCKETS)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_replayed_is_eager_and_is_torch(model: LoadedModel, name: str) -> None:
    on_cpu = replace(model, model=deepcopy(model.model).cpu(), device=torch.device("cpu"))
    on_cpu.model.prepare()
    eager, replayed, plain = Life(model, (name,), None), Life(model, (name,), graphs()), Life(on_cpu, (name,), None)
    ours, theirs, wanted = (play(life, 1) for life in (replayed, eager, plain))
    assert ours == theirs
    found = replayed.llm.runner.graphs.stats()
    assert not found.failed
    assert found.replays > found.captured > 0
    same = sum(a == b for a, b in zip(ours, wanted, strict=True))
    assert same >= 0.9 * len(wanted), f"{same} of {len(wanted)} turns as in torch"  # in float32 a tie may fall otherwise


def test_all_methods_in_one_engine(model: LoadedModel) -> None:
    eager, replayed = Life(model, tuple(METHODS), None), Life(model, tuple(METHODS), graphs())
    assert play(replayed, 2) == play(eager, 2)
    assert not replayed.llm.runner.graphs.stats().failed


@pytest.mark.parametrize("name", METHODS)
def test_short_chunks_of_prompts_are_replayed(model: LoadedModel, name: str) -> None:
    counted = Counted(CudaDevice(torch.device("cuda")), COARSE)
    eager, replayed = (Life(model, (name,), each) for each in (None, counted))
    assert talk(replayed, 1) == talk(eager, 1)
    assert not counted.stats().failed
    assert (counted.alone > 0) is (name in EXTENDED)


def test_windows_and_guesses() -> None:
    model = tiny("LlamaForCausalLM", "cuda", sliding=(None, 20, 20))
    eager, replayed = (Life(model, ("dense",), each, lookup=8) for each in (None, graphs()))
    assert play(replayed, 3) == play(eager, 3)
    assert not replayed.llm.runner.graphs.stats().failed
    counted = Counted(CudaDevice(torch.device("cuda")), COARSE)
    eager, replayed = Life(model, ("dense",), None), Life(model, ("dense",), counted, ahead=True)
    assert talk(replayed, 3) == talk(eager, 3)
    assert counted.alone > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_short_chunk_in_a_graph_of_longer_ones(model: LoadedModel, dtype: torch.dtype) -> None:
    """Chunks of other rows, places and lengths in one graph, beside rows that decode: logits are those of an eager step."""
    cast = replace(model, model=deepcopy(model.model).to(dtype), dtype=dtype)
    (group,) = cast.groups(16)
    runner = ModelRunner(cast, EngineConfig(8 * 2048 * group.stripe_bytes // 16, 2048, max_rows=8), Dense())
    runner.pages.arena.view(dtype).normal_()
    granules, order = group.stripe_bytes // 256, torch.randperm(8 * 128).tolist()
    units = [[page * granules for page in order[row * 128 : row * 128 + 128]] for row in range(8)]
    runner.pages.update_tables([TableUpdate(row, 0, mine) for row, mine in enumerate(units)])
    kept, whole = runner.graphs, Sampling(logprobs=True, top_logprobs=20)
    assert kept is not None

    def logprobs(works: list[RowWork], times: int) -> list[dict[int, float]]:
        for _ in range(times):
            runner.execute(Batch(works))
        return [dict(work.score.top) for work in works if work.score is not None]

    for chunks in ([(3, 1990, 40), (1, 100, 20)], [(0, 1500, 33)], [(6, 1400, 1), (2, 0, 60), (5, 1024, 3)], [(7, 1800, 64)]):
        works = [RowWork(4, [9], 700, 700, True, whole, 0, 1)]
        for row, slot, count in chunks:
            ids = [(7 * i + row) % 128 for i in range(count)]
            works.append(RowWork(row, ids, slot, slot, True, whole, 0, 0, prompt=True))
        runner.graphs = kept
        ours = logprobs(works, 3)
        runner.graphs = None
        for mine, wanted in zip(ours, logprobs(works, 1), strict=True):
            both = mine.keys() & wanted.keys()
            assert len(both) >= 15
            assert max(abs(mine[token] - wanted[token]) for token in both) < (1e-3 if dtype == torch.float32 else 0.2)
    assert kept.stats().replays >= 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_skewed_rows_and_other_lengths_in_one_graph(model: LoadedModel, dtype: torch.dtype) -> None:
    """One long row among short ones, then other rows and lengths of the same buckets: each is what it is eagerly."""
    cast = replace(model, model=deepcopy(model.model).to(dtype), dtype=dtype)
    (group,) = cast.groups(16)
    config = EngineConfig(8 * 512 * group.stripe_bytes // 16, 512, max_rows=8)
    runner = ModelRunner(cast, config, Dense())
    runner.pages.arena.view(dtype).normal_()
    granules = group.stripe_bytes // 256
    order = torch.randperm(8 * 32).tolist()
    units = [[page * granules for page in order[row * 32 : row * 32 + 32]] for row in range(8)]
    runner.pages.update_tables([TableUpdate(row, 0, mine) for row, mine in enumerate(units)])
    kept = runner.graphs
    assert kept is not None
    for lengths in ([500, 3, 17, 40, 1], [2, 300, 1, 480, 129], [33, 33, 33, 33, 512], [512] * 8, [1] * 7):
        works = [RowWork(row, [row + 1], n - 1, n - 1, True, Sampling(), 0, 1) for row, n in enumerate(lengths)]
        runner.graphs = kept
        ours = [runner.execute(Batch(works)) for _ in range(2)]
        runner.graphs = None
        assert ours == [runner.execute(Batch(works))] * 2
    assert kept.stats().replays >= 7


def test_launching_waits_for_nothing(model: LoadedModel) -> None:
    """Greedy, sampled in every way, penalised, with log-probabilities: the host waits when it asks for tokens, not before."""
    config = EngineConfig(4 << 20, 256, max_rows=4)
    runner = ModelRunner(model, config, Dense())
    units = [[(16 * row + page) * runner.groups[0].stripe_bytes // 256 for page in range(16)] for row in range(4)]
    given = [
        Sampling(),
        Sampling(temperature=0.7, top_p=0.9, top_k=20, min_p=0.01),
        Sampling(logprobs=True, top_logprobs=3),
        Sampling(temperature=1.0, repetition_penalty=1.2, frequency_penalty=0.1, logit_bias={5: 1.0}),
    ]

    def batch(at: int) -> Batch:
        rows = [RowWork(row, [3], at, at, True, sampling, 1, 1 + at) for row, sampling in enumerate(given)]
        rows[3].history = History([1, 2, 3], 2)
        return Batch(rows, [TableUpdate(row, 0, mine) for row, mine in enumerate(units)])

    for at in (20, 21):  # kernels are compiled, and the step is captured
        runner.launch(batch(at)).wait()
    torch.cuda.set_sync_debug_mode("error")
    try:
        flight = runner.launch(batch(22))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(token is not None for token in flight.wait())
    assert runner.graphs is not None
    assert runner.graphs.stats().replays == 2
