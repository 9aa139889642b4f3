"""An engine whose decode steps may be captured, and random lives of it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from agentkv import methods
from agentkv.engine.core import Edit, EngineConfig, Request, Sequence
from agentkv.engine.graphs import Graphs
from agentkv.engine.limits import Buckets
from agentkv.engine.llm import LLM
from agentkv.engine.loader import LoadedModel
from agentkv.engine.runner import ModelRunner
from agentkv.engine.sparse import SparseMethod
from agentkv.types import Sampling

BUCKETS = Buckets((1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64), 32)
"""Small ones, so that short lives cross them."""

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
    "h2o": {"heavy": 12, "recent": 8, "interval": 5},
}


def method(name: str | SparseMethod) -> SparseMethod:
    if isinstance(name, SparseMethod):
        return name
    return methods.get(name, **METHODS.get(name, {}))


@dataclass
class Life:
    """An engine and what was asked of it. graphs: None for one that runs everything eagerly."""

    model: LoadedModel
    names: tuple[str | SparseMethod, ...]
    graphs: Graphs[Any] | None
    lookup: int = 0
    ahead: bool = False
    attention: Literal["triton", "flashinfer"] = "triton"
    llm: LLM = field(init=False)
    made: list[list[int]] = field(init=False, default_factory=list)
    chains: dict[str, list[int]] = field(init=False, default_factory=dict)
    running: dict[str, Sequence] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        token = sum(group.token_bytes for group in self.model.groups(16))
        config = EngineConfig((8 << 20) + 6000 * token, 400, max_rows=8, step_tokens=256, lookup=self.lookup, graphs=False)
        config = replace(config, attention=self.attention)
        runner = ModelRunner(self.model, config, [method(name) for name in self.names], graphs=self.graphs)
        runner.ahead |= self.ahead
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


COARSE = Buckets((1, 2, 4, 8, 16, 32, 64), 512, (64, 512))
"""Coarse ones, so that short chunks often meet the same graph."""

EXTENDED = {name for name in METHODS if name not in ("kivi", "fp8_kv", "h2o")}
"""Of those, the methods that hold K and V in pages and are not told what a prompt's slots received: their short chunks can be
replayed."""


class Counted(Graphs[Any]):
    """Counts replays of steps in which a prompt is read: chunks alone, and beside decodes."""

    alone = beside = 0

    def run(self, key: Any, numbers: Any, work: Any, *, rare: bool = False) -> Any:
        assert rare is any(part.tokens > 0 for part in key)
        if rare and key in self.keys:
            self.alone += all(part.tokens > 0 for part in key)
            self.beside += any(part.tokens == 0 for part in key)
        return super().run(key, numbers, work, rare=rare)


def talk(life: Life, seed: int, rounds: int = 20) -> list[list[int]]:
    """Sessions of all forms whose turns are short, some begun while others answer; histories of up to 400 tokens."""
    draw, number = random.Random(seed), 0
    chains = [""] * (3 * len(life.names))
    for _ in range(rounds):
        place = draw.randrange(len(chains))
        chain = chains[place]
        ids = [draw.randrange(128) for _ in range(draw.choice([2, 5, 20, 33, 60, 100]))]
        while chain in life.running:
            life.steps(1)
        if not chain or len(life.chains[chain]) + len(ids) > 375:
            number += 1
            chain = chains[place] = f"c{number}"
        sampling = Sampling(max_tokens=draw.choice([1, 3, 10]), temperature=draw.choice([0.0, 1.0]), seed=draw.randrange(9))
        life.start(chain, ids, place % len(life.names), sampling)
        life.steps(draw.choice([0, 1, 2, 3]))
        life.llm.check()
    life.steps(300)
    return life.made


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
