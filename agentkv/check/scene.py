"""An engine with methods on a model, and the turns that checks play on it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from agentkv.check.outcome import Failed
from agentkv.check.watch import Watcher, watched
from agentkv.engine.cache.state import KVState
from agentkv.engine.core import Edit, EngineConfig, Request
from agentkv.engine.core import Sequence as Running
from agentkv.engine.graphs import Graphs
from agentkv.engine.llm import LLM
from agentkv.engine.loader import LoadedModel
from agentkv.engine.runner import ModelRunner
from agentkv.engine.sparse import SparseMethod
from agentkv.types import Sampling

PAGE = 16
LENGTH = 100
"""Tokens of a first prompt: six pages and a quarter."""
NEW = 6
"""Tokens that a turn generates."""
MORE = 21
"""Tokens of a later prompt beyond its history."""
CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""By dtype, how near log-probabilities are of the same computation in another order; other dtypes: a tenth."""
SPAN = (8, 36)
"""Early tokens that are pruned: some of them are still held by a method that keeps half of a prompt."""


class Answer(NamedTuple):
    """One turn: the generated ids and their log-probabilities, what of the prompt was cached and prefilled, and how near the
    log-probabilities of the same turn are."""

    ids: list[int]
    logprobs: list[float]
    cached: int
    prefilled: int
    close: float


def same(a: Answer, b: Answer, close: float | None = None) -> bool:
    """Are the tokens the same, and as likely?"""
    close = close or a.close
    return a.ids == b.ids and all(abs(x - y) <= close for x, y in zip(a.logprobs, b.logprobs, strict=True))


def difference(a: Answer, b: Answer) -> str:
    """For people."""
    at = next((i for i, pair in enumerate(zip(a.ids, b.ids, strict=False)) if pair[0] != pair[1]), None)
    if at is not None:
        return f"token {at + 1} of the answer is another"
    gap = max((abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=False)), default=0.0)
    return f"a log-probability is off by {gap:.1e}"


@dataclass
class Scene:
    """methods: see `ModelRunner`; requests name one by its index. watcher: sees the hooks of the last of them. graphs: of
    decode steps."""

    loaded: LoadedModel
    methods: Sequence[SparseMethod]
    step_tokens: int = 512
    lookup: int = 0
    watcher: Watcher | None = None
    graphs: Graphs[Any] | None = None
    each_step: Callable[[LLM], None] | None = None
    llm: LLM = field(init=False)
    runner: ModelRunner = field(init=False)

    def __post_init__(self) -> None:
        methods = [*self.methods[:-1], watched(self.methods[-1], self.watcher)] if self.watcher else list(self.methods)
        token = sum(group.token_bytes for group in self.loaded.groups(PAGE))
        config = EngineConfig(
            memory=(8 << 20) + 8192 * token,
            window=min(512, self.loaded.window),
            page_size=PAGE,
            max_rows=6,
            step_tokens=self.step_tokens,
            warm_memory=(8 << 20) + 8192 * token,
            lookup=self.lookup,
            graphs=False,
        )
        self.runner = ModelRunner(self.loaded, config, methods, graphs=self.graphs)
        self.llm = LLM(config, self.runner)

    @property
    def used(self) -> int:
        """Arena bytes that are held."""
        return self.llm.arena.used_bytes

    def state(self, chain: str) -> KVState:
        """What an idle chain holds; Failed where it holds nothing."""
        found = self.llm.chains.chains.get(chain)
        if found is None or found.state is None:
            raise Failed(f"chain {chain!r} holds nothing after its turn")
        return found.state

    def start(
        self,
        ids: Sequence[int],
        chain: str | None = None,
        *,
        form: int = 0,
        edits: tuple[Edit, ...] = (),
        new: int = NEW,
    ) -> Running:
        """Queue a greedy request."""
        sampling = Sampling(max_tokens=new, logprobs=True)
        return self.llm.add(Request(list(ids), sampling, chain_id=chain, edits=edits, form=form))

    def finish(self, *running: Running) -> list[Answer]:
        """Step until nothing is left to do, and commit. Failed where a sequence faulted."""
        logprobs: dict[int, list[float]] = {seq.seq_id: [] for seq in running}
        while self.llm.has_work:
            for output in self.llm.step():
                logprobs.setdefault(output.seq.seq_id, []).extend(score.logprob for score in output.scores)
            if self.each_step is not None:
                self.each_step(self.llm)
        answers, close = [], CLOSE.get(self.loaded.dtype, 0.1)
        for seq in running:
            if seq.fault is not None:
                raise Failed(getattr(seq.fault, "message", repr(seq.fault)))
            made = list(seq.token_ids[seq.num_prompt_tokens :])
            answers.append(Answer(made, logprobs[seq.seq_id], seq.num_cached_tokens, seq.num_prefilled_tokens, close))
            self.llm.commit(seq, made)
        return answers

    def turn(self, ids: Sequence[int], chain: str | None = None, *, edits: tuple[Edit, ...] = (), new: int = NEW) -> Answer:
        """A whole turn of the first method, alone."""
        (answer,) = self.finish(self.start(ids, chain, edits=edits, new=new))
        return answer

    def steps(self, count: int) -> None:
        """Step so many times, or until nothing is left to do."""
        for _ in range(count):
            if self.llm.has_work:
                self.llm.step()

    def clear(self, chains: Iterable[str]) -> None:
        """Forget these chains, and all that is cached."""
        for chain in chains:
            self.llm.drop(chain)
        self.llm.radix.clear()


@dataclass
class Case:
    """A method on a model, and what its turns come to without anything in between (made once)."""

    method: SparseMethod
    loaded: LoadedModel
    _known: dict[tuple[int, ...], list[Answer]] = field(default_factory=dict)
    _used: dict[tuple[int, ...], int] = field(default_factory=dict)

    def ids(self, number: int, count: int = LENGTH) -> list[int]:
        """Random tokens of prompt `number`."""
        draw = random.Random(number)
        return [draw.randrange(self.loaded.config.vocab_size) for _ in range(count)]

    @property
    def windowed(self) -> bool:
        """Has the model layers that see a window only?"""
        return any(group.window is not None for group in self.loaded.groups(PAGE))

    def scene(self, **more: Any) -> Scene:
        """An engine with the method alone; see Scene."""
        return Scene(self.loaded, [self.method], **more)

    def more(self, history: Sequence[int], answer: Answer, number: int) -> list[int]:
        """The next turn's prompt."""
        return [*history, *answer.ids, *self.ids(number, MORE)]

    def plain(self, *numbers: int) -> list[Answer]:
        """Turns of one chain with prompts of these numbers, in an engine of their own."""
        if numbers not in self._known:
            scene, ids = self.scene(), self.ids(numbers[0])
            answers = [scene.turn(ids, "a")]
            for number in numbers[1:]:
                ids = self.more(ids, answers[-1], number)
                answers.append(scene.turn(ids, "a"))
            self._known[numbers], self._used[numbers] = answers, scene.used
        return self._known[numbers]

    def plain_used(self, *numbers: int) -> int:
        """Arena bytes that are held behind these turns."""
        self.plain(*numbers)
        return self._used[numbers]
