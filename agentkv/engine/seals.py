"""Seals of a sequence on the host: when one is due, and what it held before one that it may turn out not to have needed.

A step is launched ahead of the token that may end its rows. So is a seal that is due before it; the state of before is forked
first, which copies nothing, and goes on where the token was the last: an answer leaves the same KV, waited for or not.
"""

from __future__ import annotations

from agentkv.engine.cache.state import Change
from agentkv.engine.core import Sequence
from agentkv.engine.form import Held, Seal
from agentkv.engine.units import NOTHING, Units
from agentkv.engine.work import SealWork, Work
from agentkv.errors import EngineFault


def seal_due(seq: Sequence) -> bool:
    """Is it time for a seal before its next token?"""
    return seq.state is not None and _asked(seq, seq.state.held(False)) is not None


def seal(seq: Sequence, *, prompt_end: bool) -> Change | None:
    """Carry out the seal that is due, in the accounts; None if there is none."""
    state = seq.state
    if state is None:
        return None
    held = state.held(prompt_end)
    due = _asked(seq, held)
    if due is None:
        return None
    change = state.seal(held, due, seq.row)
    seal_works(seq, change)
    for group, first in enumerate(change.first_pages):
        seq.table_from[group] = min(seq.table_from[group], first)
    return change


def _asked(seq: Sequence, held: Held) -> Seal | None:
    """The seal that the method wants of what is held. One that cannot say is the sequence's fault, which ends for it."""
    assert seq.state is not None
    form = seq.state.form
    if form.seal is None or seq.fault is not None:
        return None
    try:
        return form.seal(held)
    except EngineFault as fault:
        seq.fault = fault
    except Exception as error:  # noqa: BLE001 - whatever a method says
        seq.fault = EngineFault(f"a method cannot say what it keeps of {held}: {type(error).__name__}: {error}")
        seq.fault.__cause__ = error
    return None


def seal_works(seq: Sequence, change: Change) -> list[SealWork]:
    """The seals and prunes of sealed parts in a change, marked as the sequence's."""
    works = [work for work in change.moves if isinstance(work, SealWork)]
    for work in works:
        work.seq_id = seq.seq_id
    return works


def sealed_copy(seq: Sequence) -> Units:
    """Units of the sealed part of its copy in host memory, where it will lie beside what the seal of the prompt makes of it."""
    warm, prompt = seq.warm, seq.num_prompt_tokens
    if warm is None or warm.logical_length > prompt or warm.sealed_at >= prompt:
        return NOTHING
    return Units.of(count * (group in warm.form.sealed) for group, count in enumerate(warm.units.counts))


def room_beside(seq: Sequence) -> bool:
    """Is what the sequence is promised enough for the seal that is due, and a page of each group, before anything that the seal
    lets go of returns?"""
    state = seq.state
    due = _asked(seq, state.held(False)) if state is not None else None
    if state is None or due is None:
        return True
    wanted = [int(group in state.form.groups) for group in range(len(state.holdings))]
    for group, units, keep in zip(state.form.sealed, due.units, due.keeps or (0,) * len(due.units), strict=True):
        wanted[group] += units - keep
    return Units.of(wanted).within(seq.reserved_units)


def seal_ahead(seq: Sequence) -> list[Work]:
    """Carry out the seal that is due, in the accounts. What was held before it stays, until `undo` or `stand`."""
    assert seq.state is not None
    seq.before = seq.state.fork()
    change = seal(seq, prompt_end=False)
    assert change is not None
    seq.reserved_units = (seq.reserved_units - change.new_units).least(seq.peak_units)
    return change.moves


def undo(seq: Sequence) -> None:
    """It has ended: it holds what it held before the seal."""
    if seq.before is not None and seq.state is not None:
        seq.state.release()
        seq.state, seq.before = seq.before, None


def stand(seq: Sequence) -> bool:
    """It goes on, or holds nothing more: what it held before a seal is let go of. False where there was none."""
    before, seq.before = seq.before, None
    if before is not None:
        before.release()
    return before is not None
