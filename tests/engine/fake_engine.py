"""A runner without a model, and what it must produce, computed from the logical history alone.

The fake keeps what was written in each (unit, slot): position, token and a hash of everything the token could see when it
was written. The next token is a hash of all that is visible. So a stale page, a missing copy, a wrong slot, or a prune at
the wrong moment changes what is generated. `Oracle` knows no pages: it plays the history in a list.
"""

from __future__ import annotations

from collections.abc import Iterable

from agentkv.engine.core import GRANULE, Batch, Edit, EngineConfig, KVLayout, Request, Slot
from agentkv.engine.llm import LLM
from agentkv.types import Sampling

Content = tuple[int, int, int]
"""(position, token, hash of what was visible)."""


def mix(*values: int) -> int:
    return hash(values) & 0xFFFFFFFFFFFF


def write(visible: list[Content], position: int, token: int) -> None:
    visible.append((position, token, mix(position, token, *(h for _, _, h in visible))))


def draw(visible: list[Content], seed: int, step: int, vocab: int) -> int:
    return mix(seed, step, *(mix(*content) for content in visible)) % vocab


def copying(visible: list[Content], seed: int, step: int, vocab: int) -> int:
    """Mostly what followed the last three tokens before, so that guesses come true now and then."""
    tokens, chance = [token for _, token, _ in visible], draw(visible, seed, step, 4 * vocab)
    places = [end for end in range(3, len(tokens)) if tokens[end - 3 : end] == tokens[-3:]]
    return tokens[places[-1]] % vocab if places and chance % 4 else chance // 4


class FakeRunner:
    """Implements `core.Runner` over a dictionary of slots."""

    def __init__(
        self, units: int, page_size: int, *, vocab: int = 5, step_tokens: int | None = None, max_rows: int = 64
    ) -> None:
        self.layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=128, itemsize=2, page_size=page_size)
        self.num_granules = units * (self.layout.stripe_bytes // GRANULE)
        self.vocab = self.vocab_size = vocab
        self.step_tokens = step_tokens
        self.max_rows = max_rows
        self.draw = draw
        self.slots: dict[Slot, Content] = {}
        self.tables: dict[int, dict[int, int]] = {}
        self.forwarded = 0
        self.steps = 0
        self.fail_execute: set[int] = set()
        self.fail_move = False

    def execute(self, batch: Batch) -> list[int | None]:
        self.steps += 1
        assert self.step_tokens is None or batch.num_tokens <= self.step_tokens
        rows = [work.row for work in batch.rows]
        assert len(set(rows)) == len(rows)
        assert all(0 <= row < self.max_rows for row in rows)
        for row, first, units in batch.table_updates:
            for page, unit in enumerate(units, start=first):
                assert 0 <= unit < self.num_granules
                self.tables.setdefault(row, {})[page] = unit
        owners: dict[Slot, int] = {}
        for work in batch.rows:  # nobody may write where another row writes
            for i in range(len(work.tokens)):
                assert owners.setdefault(self._slot(work.row, work.slot + i), work.row) == work.row
        drawn: list[int | None] = []
        for work in batch.rows:
            assert work.tokens
            visible = [self.slots[self._slot(work.row, slot)] for slot in range(work.slot)]
            draws: list[int] = []
            for i, token in enumerate(work.tokens):
                write(visible, work.position + i, token)
                self.slots[self._slot(work.row, work.slot + i)] = visible[-1]
                if work.sample and i >= len(work.tokens) - 1 - work.drafted:
                    draws.append(self.draw(visible, work.seed, work.step + len(draws), self.vocab))
            self.forwarded += len(work.tokens)
            work.later += [(token, None) for token in draws[1:]]
            drawn.append(draws[0] if draws else None)
        if self.steps in self.fail_execute:
            raise RuntimeError("device fault")
        return drawn

    def move_slots(self, source: list[Slot], target: list[Slot]) -> None:
        assert len(source) == len(target) == len(set(target))
        if self.fail_move:
            raise RuntimeError("copy fault")
        contents = [self.slots[slot] for slot in source]
        for slot, content in zip(target, contents, strict=True):
            self.slots[slot] = content

    def _slot(self, row: int, slot: int) -> Slot:
        return self.tables[row][slot // self.layout.page_size], slot % self.layout.page_size


class Oracle:
    """What a history generates: every token sees what is left of those before it, edits at `at` go before token at - 1."""

    def __init__(self, vocab: int = 5) -> None:
        self.vocab = vocab
        self.draw = draw

    def visible(self, token_ids: list[int], edits: Iterable[Edit], length: int) -> list[Content]:
        out: list[Content] = []
        for position in range(length):
            out = self.edited(out, edits, position)
            write(out, position, token_ids[position])
        return out

    def edited(self, visible: list[Content], edits: Iterable[Edit], position: int) -> list[Content]:
        gone = [interval for edit in edits if edit.at - 1 == position for interval in edit.removed]
        return [content for content in visible if not any(start <= content[0] < end for start, end in gone)]

    def generate(
        self, token_ids: list[int], edits: Iterable[Edit], seed: int, count: int, stop: Iterable[int] = ()
    ) -> list[int]:
        prompt = len(token_ids)
        ids = list(token_ids)
        visible = self.visible(ids, edits, prompt)
        while True:
            ids.append(self.draw(visible, seed, len(ids) - prompt, self.vocab))
            if len(ids) - prompt == count or ids[-1] in stop:
                return ids[prompt:]
            write(visible, len(ids) - 1, ids[-1])


def engine(
    units: int = 32,
    page_size: int = 4,
    *,
    window: int = 10_000,
    max_rows: int = 4,
    step_tokens: int = 16,
    checkpoints: int = 2,
    lookup: int = 0,
    **options: object,
) -> LLM:
    """An engine of `units` pages over a fake runner."""
    runner = FakeRunner(units, page_size, step_tokens=step_tokens, max_rows=max_rows)
    config = EngineConfig(
        memory=runner.num_granules * GRANULE,
        window=window,
        page_size=page_size,
        max_rows=max_rows,
        step_tokens=step_tokens,
        checkpoints=checkpoints,
        lookup=lookup,
    )
    return LLM(config, runner, **options)  # type: ignore[arg-type]


def request(
    token_ids: list[int],
    chain: str | None = None,
    *,
    max_tokens: int | None = 4,
    seed: int = 0,
    edits: Iterable[Edit] = (),
    **options: object,
) -> Request:
    sampling = Sampling(max_tokens=max_tokens, seed=seed, stop=options.pop("stop", ()))  # type: ignore[arg-type]
    return Request(token_ids=list(token_ids), sampling=sampling, chain_id=chain, edits=tuple(edits), **options)  # type: ignore[arg-type]


def run(llm: LLM, *, limit: int = 10_000) -> None:
    """Step until there is no work, checking every account after each step."""
    for _ in range(limit):
        if not llm.has_work:
            return
        llm.step()
        llm.check()
    raise AssertionError("no progress")


def turn(llm: LLM, token_ids: list[int], chain: str | None = None, **options: object) -> list[int]:
    """One request from add to commit; the generated ids."""
    seq = llm.add(request(token_ids, chain, **options))  # type: ignore[arg-type]
    run(llm)
    assert seq.fault is None
    made = seq.token_ids[seq.num_prompt_tokens :]
    llm.commit(seq, made)
    llm.check()
    return made
