"""Captured decode steps on a CPU, by a graph that runs recorded operations again: the tokens are those of an eager engine."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from agentkv import methods
from agentkv.check.models import tiny
from agentkv.check.recorded import RecordedDevice
from agentkv.engine.core import Edit, EngineConfig, Request, Sequence
from agentkv.engine.graphs import Graphs
from agentkv.engine.limits import Buckets
from agentkv.engine.llm import LLM
from agentkv.engine.loader import LoadedModel
from agentkv.engine.runner import ModelRunner
from agentkv.engine.sparse import SparseMethod
from agentkv.engine.view import DeviceBatch
from agentkv.types import Sampling

METHODS: dict[str, dict[str, Any]] = {  # of those that can be replayed, with options under which short prompts show them
    "dense": {},
    "streamingllm": {"sinks": 4, "recent": 20},
    "snapkv": {"capacity": 24, "window": 8},
    "adakv": {"capacity": 24, "window": 8},
    "kvzip": {"chunk": 40},
    "quest": {"budget": 32, "dense_layers": 1},
    "omnikv": {"budget": 24, "observers": (0,), "recent": 4},
    "kivi": {"group": 16, "residual": 32},
    "fp8_kv": {},
}


def method(name: str | SparseMethod) -> SparseMethod:
    if isinstance(name, SparseMethod):
        return name
    return methods.get(name, **METHODS.get(name, {}))


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny("Qwen3ForCausalLM")


@dataclass
class Life:
    """An engine and what was asked of it. graphs: None for one that runs everything eagerly."""

    model: LoadedModel
    names: tuple[str | SparseMethod, ...]
    graphs: Graphs[Any] | None
    lookup: int = 0
    llm: LLM = field(init=False)
    made: list[list[int]] = field(init=False, default_factory=list)
    chains: dict[str, list[int]] = field(init=False, default_factory=dict)
    running: dict[str, Sequence] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        token = sum(group.token_bytes for group in self.model.groups(16))
        config = EngineConfig((8 << 20) + 6000 * token, 400, max_rows=8, step_tokens=256, lookup=self.lookup)
        runner = ModelRunner(self.model, config, [method(name) for name in self.names], graphs=self.graphs)
        self.llm = LLM(config, runner)

    def start(self, chain: str, ids: list[int], form: int, sampling: Sampling, edits: tuple[Edit, ...] = ()) -> None:
        request = Request([*self.chains.get(chain, []), *ids], sampling, chain_id=chain, form=form, edits=edits)
        self.running[chain] = self.llm.add(request)

    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.llm.has_work:
                self.llm.step()
            for chain, seq in list(self.running.items()):
                if seq.finish_reason is not None or seq.fault is not None:
                    self.end(chain)

    def end(self, chain: str) -> None:
        seq = self.running.pop(chain)
        assert seq.fault is None, seq.fault
        made = list(seq.token_ids[seq.num_prompt_tokens :])
        self.made.append(made)
        self.llm.commit(seq, made)
        self.chains[chain] = list(seq.token_ids)


def play(life: Life, seed: int, acts: int = 25) -> list[list[int]]:
    """The same acts for the same seed: turns of several forms that join and leave, forks, prunes, rollbacks, aborts."""
    draw, number, edits = random.Random(seed), 0, dict[str, tuple[Edit, ...]]()
    forms: dict[str, int] = {}
    for _ in range(acts):
        idle = sorted(chain for chain in life.chains if chain not in life.running)
        act = draw.choice(["new", "new", "more", "more", "fork", "prune", "rollback", "abort", "step", "step"])
        ids = [draw.randrange(128) for _ in range(draw.choice([1, 3, 17, 60, 130]))]
        temperature = draw.choice([0.0, 0.0, 1.0])
        sampling = Sampling(max_tokens=draw.choice([1, 4, 20, 40]), temperature=temperature, seed=draw.randrange(99), top_k=20)
        steps, which = draw.randrange(1, 12), draw.random()
        chain = idle[int(which * len(idle))] if idle else ""
        room = chain and len(life.chains[chain]) + len(ids) + 41 < 400
        if act == "new" and len(life.running) < 8:
            number += 1
            chain = f"c{number}"
            forms[chain], edits[chain] = int(which * len(life.names)), ()
            life.start(chain, ids, forms[chain], sampling)
        elif act == "more" and room:
            life.start(chain, ids, forms[chain], sampling, edits[chain])
        elif act == "fork" and chain:
            number += 1
            other = f"c{number}"
            life.llm.fork(chain, other, len(life.chains[chain]))
            life.chains[other], forms[other], edits[other] = list(life.chains[chain]), forms[chain], edits[chain]
        elif act == "prune" and chain and len(life.chains[chain]) > 30:
            removed = ((5, 5 + int(which * 20) + 1),)
            life.llm.prune(chain, removed)
            edits[chain] = (*edits[chain], Edit(len(life.chains[chain]), removed))
        elif act == "abort" and life.running:
            victim = sorted(life.running)[int(which * len(life.running))]
            life.llm.abort(life.running.pop(victim))
        life.steps(steps)
        life.llm.check()
    life.steps(500)
    return life.made


def graphs() -> Graphs[Any]:
    return Graphs(RecordedDevice(), Buckets((1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64), 32))


@pytest.mark.parametrize("name", METHODS)
def test_a_method_replayed_gives_the_tokens_of_an_eager_engine(model: LoadedModel, name: str) -> None:
    eager, replayed = (Life(model, (name,), each) for each in (None, graphs()))
    assert play(replayed, 1) == play(eager, 1)
    found = replayed.llm.runner.graphs.stats()
    assert found.replays > 2 * found.captured > 0
    assert not found.failed


@pytest.mark.parametrize("seed", [2, 3])
def test_all_methods_in_one_engine(model: LoadedModel, seed: int) -> None:
    eager, replayed = (Life(model, tuple(METHODS), each) for each in (None, graphs()))
    assert play(replayed, seed) == play(eager, seed)
    found = replayed.llm.runner.graphs.stats()
    assert found.replays
    assert not found.failed


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


def test_attention_received_is_told_eagerly(model: LoadedModel) -> None:
    life = Life(model, ("h2o",), graphs())
    life.start("a", list(range(50)), 0, Sampling(max_tokens=5))
    life.steps(20)
    assert life.llm.runner.graphs.stats().eager == life.llm.runner.graphs.stats().captured == 0


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
