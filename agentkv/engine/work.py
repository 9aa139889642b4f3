"""What the host decides and the device carries out between and before steps, in order.

This module has no torch in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from agentkv.engine.form import Held, Seal
from agentkv.types import Interval

Slot = tuple[int, int]
"""(unit offset in granules, slot inside the page)."""


class Moves(NamedTuple):
    """Slots of one group to copy by one `Runner.move_slots`."""

    source: list[Slot]
    target: list[Slot]
    group: int = 0


class Copies(NamedTuple):
    """Whole units of a group to copy by one `Runner.move_units`, before anybody writes the copies."""

    source: list[int]
    target: list[int]
    group: int = 0


class TailPages(NamedTuple):
    """A sequence's pages in one group that every token enters: slots [first, stop) are the tokens of the tail. Slot `first`
    lies in the first of `units`, at offset `first % page_size`."""

    group: int
    first: int
    stop: int
    units: list[int]


@dataclass(slots=True)
class SealWork:
    """One sequence's seal, or a prune of its sealed part.

    form: index of the runner's form. row: its row, where its last queries are; None where it has none. held: what it held
    before; seal: what it is to hold (None: a prune, `removed` says of which logical tokens). runs: logical intervals of the
    tail's tokens, in slot order. tail: by group of the form. old, new: units of the sealed part by sealed group of the form,
    () where there was none. The first `seal.keeps` units of old and new are the same ones. slots_left: what the runner says.
    seq_id: of a running sequence, which alone ends where the work fails.
    """

    form: int
    row: int | None
    held: Held
    seal: Seal | None
    runs: tuple[Interval, ...]
    tail: tuple[TailPages, ...]
    old: tuple[list[int], ...]
    new: tuple[list[int], ...]
    removed: tuple[Interval, ...] = ()
    slots_left: int = -1
    seq_id: int | None = None


class PageWork(NamedTuple):
    """Full pages whose contents were moved: their page state is to be made anew. form: index of the runner's form. units: of
    those pages, by group of the form."""

    form: int
    units: tuple[list[int], ...]


Work = Moves | Copies | SealWork | PageWork
"""What is carried out on the device between steps, in the order in which it was decided."""


class TableUpdate(NamedTuple):
    """Units (offsets in granules) of a row's pages in one group, from page index `first` on. Pages are counted from the
    first slot there ever was, so that an entry stays where it is when pages before it are freed."""

    row: int
    first: int
    units: list[int]
    group: int = 0
