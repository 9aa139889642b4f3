"""Steps that nobody asked for, before somebody does: kernels are compiled and graphs captured while no one waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter

from agentkv.engine.core import Request
from agentkv.engine.llm import LLM
from agentkv.errors import Capacity
from agentkv.types import Sampling

DECODES = 24
"""Tokens of each answer: past the end of a page, and past what a prompt's seal leaves to the next one."""

FEW, SHORT = 2, 32
"""Of those behind prompts of other lengths: a seal and a step are enough. SHORT: tokens of the turn behind them."""

BESIDE = (4, 64)
"""Tokens of prompts that are read beside decodes."""


def warm_up(llm: LLM, rows: Sequence[int], tokens: int) -> Iterator[tuple[int, int, float]]:
    """Read prompts of so many tokens and decode behind them, in as many rows at once as `rows` say, form by form; (form, rows,
    seconds) of each. Before a form's first, sessions whose prompts have other lengths, see `_others`, and prompts beside
    decodes. Nothing of all this stays. Call it in the engine's thread. Rows or tokens that there is no room for are less."""
    length = max(1, min(tokens, llm.config.window - DECODES - 1))
    for form in range(len(llm.runner.forms)):
        began = perf_counter()
        for other in _others(llm, length):
            _session(llm, form, other)
        _beside_decodes(llm, form)
        for count in sorted({min(each, llm.config.max_rows) for each in rows}):
            yield form, _run(llm, form, count, length, DECODES), perf_counter() - began
            began = perf_counter()


def _others(llm: LLM, length: int) -> list[int]:
    """Lengths of prompts that run kernels of other sizes: parts of that length, for those that hold a whole row, and one and a
    half chunks, whose second part sees a history and which is past the budgets that methods have by default."""
    longest = llm.config.window - DECODES - SHORT - 1
    parts = (length * share // 16 for share in (9, 10, 12))
    return [each for each in (*parts, llm.config.step_tokens * 3 // 2) if 0 < each <= longest]


def _session(llm: LLM, form: int, length: int) -> None:
    """A prompt, and a short one behind it, as the result of a tool is."""
    ids, chain = list[int](), "warm-up"
    for more in (length, SHORT):
        ids += _ids(llm, 0, more)
        try:
            seq = llm.add(Request(list(ids), Sampling(max_tokens=FEW), chain_id=chain, form=form))
        except Capacity:
            break
        for _ in range(more + FEW):
            if seq.num_generated < FEW and seq.fault is None:
                llm.step()
        if seq.num_generated < FEW:
            llm.abort(seq)
            break
        made = seq.token_ids[seq.num_prompt_tokens :]
        ids += made
        llm.commit(seq, made)
    llm.drop(chain)


def _beside_decodes(llm: LLM, form: int) -> None:
    """Short prompts that are read while another row decodes: steps of a few tokens, and of more."""
    sequences = []
    for row, length in enumerate((SHORT, *BESIDE)):
        ids = _ids(llm, row, max(1, min(length, llm.config.window - DECODES - 1)))
        try:
            sequences.append(llm.add(Request(ids, Sampling(max_tokens=DECODES), form=form)))
        except Capacity:
            break
        for _ in range(FEW + 1):
            llm.step()
    for seq in sequences:
        llm.abort(seq)


def _ids(llm: LLM, row: int, count: int) -> list[int]:
    return [(7 * row + 3 * i + 1) % llm.runner.vocab_size for i in range(count)]


def _run(llm: LLM, form: int, count: int, length: int, decodes: int) -> int:
    """How many rows there was room for."""
    sequences = []
    try:
        for row in range(count):
            ids = _ids(llm, row, length)
            sequences.append(llm.add(Request(ids, Sampling(max_tokens=decodes), form=form)))
    except Capacity:
        pass  # one that never fits; those before it do
    for _ in range(len(sequences) * (length + decodes)):
        if all(seq.num_generated >= decodes or seq.fault is not None for seq in sequences):
            break
        llm.step()
        for seq in sequences:
            if seq.num_generated >= decodes:
                llm.abort(seq)  # makes room for those that wait
    for seq in sequences:
        llm.abort(seq)
    return len(sequences)
