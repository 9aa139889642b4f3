"""Forms for the fake runner: what a method decides, as pure rules that the fake and the oracle both play.

A **cell** is (position, token, hash of everything the token could see). A **mark** is mutable state of a cell. What a seal
keeps is a function of the cells and marks before its floor, so that whoever holds the wrong ones keeps the wrong ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from fake_engine import Content, mix

from agentkv.engine.form import Bound, Form, Held, Seal

Marks = list[int | None]
"""By visible cell; None where it has none."""


@dataclass(frozen=True)
class Kind:
    """A method of the fake. floor(held): where a seal would let the tail begin; none is due where that is no further than now.

    keep: newest cells before it that a seal keeps at most, of those it likes; 0 all. tail: most tokens in the tail after
    the seal of a prompt of so many until there are so many. again: timed seals too. marks: seen (every token changes the
    marks of all that it sees), replays (only tokens of a replay do).
    """

    name: str
    floor: Callable[[Held], int] | None = None
    tail: Callable[[int, int], int] = lambda prompt, tokens: tokens
    keep: int = 0
    again: bool = False
    marks: Literal["", "seen", "replays"] = ""
    paged: bool = False
    reuse: Literal["radix", "chain"] = "chain"

    @property
    def appends(self) -> bool:
        return self.floor is not None and not self.keep

    def likes(self, cell: Content, mark: int | None) -> bool:
        return (cell[2] if mark is None else mark) % 3 > 0 or self.appends

    def chosen(self, cells: Sequence[Content], marks: Marks) -> list[int]:
        """Indices of what stays, ascending."""
        liked = [i for i, (cell, mark) in enumerate(zip(cells, marks, strict=True)) if self.likes(cell, mark)]
        return liked[-self.keep :] if self.keep else liked

    def replay(self, token_ids: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Two runs, unless the prompt is very short."""
        if self.marks != "replays" or len(token_ids) < 2:
            return ()
        return (token_ids[0], token_ids[-1]), (token_ids[1], 1, token_ids[0])

    def think(
        self, cells: Sequence[Content], marks: Marks, position: int, token: int, *, replay: bool
    ) -> tuple[Content, Marks, int]:
        """What a token becomes that sees these; their marks afterwards, and its own."""
        told = [] if replay else [mark for mark in marks if mark is not None]
        made = position, token, mix(position, token, *(cell[2] for cell in cells), *told)
        if self.marks == "seen":
            return made, [None if mark is None else mix(mark, made[2]) for mark in marks], mix(made[2])
        if replay:  # a run that begins anew leaves the same
            marks = [
                None if mark is None else max(mark, mix(cell[0], made[2])) for cell, mark in zip(cells, marks, strict=True)
            ]
        return made, list(marks), 0

    def form(self, groups: tuple[int, ...], sealed: tuple[int, ...], mutable: frozenset[int], page: int) -> Form:
        """sealed: payload, lens, and marks where seals move them. page: slots of a sealed page."""

        def units(slots: int) -> tuple[int, ...]:
            pages = -(-slots // page)
            return (pages, int(slots > 0), pages)[: len(sealed)]

        def seal(held: Held) -> Seal | None:
            floor = self.floor(held) if self.floor is not None else 0
            if floor <= held.floor:
                return None
            slots = held.slots + floor - held.floor
            slots = min(slots, self.keep) if self.keep else slots
            return Seal(floor, slots, units(slots), (held.slots // page, 0) if self.appends else ())

        def bound(prompt: int, tokens: int) -> Bound:
            most = units(min(tokens, self.keep or tokens))
            if self.appends:
                most = most[0] + 1, 2 * most[1]
            elif self.again:
                most = tuple(2 * each for each in most)
            return Bound(min(tokens, self.tail(prompt, tokens)), most)

        seals = self.floor is not None
        return Form(
            groups,
            self.name,
            sealed,
            mutable,
            self.reuse,
            self.name,
            truncates=not (seals or self.marks),
            paged=self.paged,
            shrinks=seals,
            seal=seal if seals else None,
            bound=bound if seals else None,
            replay=(lambda held, token_ids: self.replay(token_ids)) if self.marks == "replays" else None,
            replay_most=lambda prompt: 3 if self.marks == "replays" else 0,
        )


def _after(kept: int) -> Callable[[int, int], int]:
    return lambda prompt, tokens: kept + max(0, tokens - prompt)


PLAIN = Kind("plain", reuse="radix")
PAGED = Kind("paged", paged=True, reuse="radix")
EVICTS = Kind("evicts", lambda held: held.prompt_end and held.tokens - 3, _after(3), keep=8)
TIMED = Kind(
    "timed",
    lambda held: (held.prompt_end or held.tail >= 6) and held.tokens - 2,
    lambda prompt, tokens: 6,
    keep=5,
    again=True,
)
APPENDS = Kind(
    "appends", lambda held: held.floor + (held.tokens - held.floor - 4) // 4 * 4, lambda prompt, tokens: 8, again=True
)
MARKED = Kind("marked", lambda held: held.prompt_end and held.tokens - 2, _after(2), keep=6, marks="seen")
REPLAYS = Kind("replays", lambda held: held.prompt_end and held.tokens - 1, _after(1), keep=7, marks="replays")
LOOSE = Kind("loose", marks="seen")
"""Mutable state beside the tail and no seal."""

KINDS = (PLAIN, EVICTS, TIMED, APPENDS, MARKED, REPLAYS, LOOSE, PAGED)
