"""The warm tier: KV states as bytes in host memory, and back bit for bit.

A copy is of one state, whole units in the state's order, and is never changed. It is made by `demote` and becomes a new state,
in fresh units, by `restore`; what the old state shared with others is shared no more. A digest over bytes, tokens and shape
and the fingerprint of the engine are checked on the way back: a copy that fails is lost and says why, it is never KV.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from agentkv.engine.cache.pools import KVPools
from agentkv.engine.cache.state import KVState
from agentkv.engine.core import Edit
from agentkv.engine.form import Form
from agentkv.engine.units import Units
from agentkv.types import Interval


class UnitIO(Protocol):
    """Reads and writes whole units of the arena; raises EngineFault."""

    def read_units(self, unit_bytes: int, units: list[int]) -> memoryview:
        """Their bytes in host memory, one unit after another."""
        ...

    def write_units(self, unit_bytes: int, units: list[int], data: memoryview) -> None:
        """Put such bytes into units."""
        ...


class Part(NamedTuple):
    """What a copy has of one KV group: see Holding. covers_from: shortest length at which the group's window is whole."""

    length: int
    runs: tuple[Interval, ...]
    start: int
    floor: int
    covers_from: int
    data: memoryview


@dataclass(slots=True, eq=False)
class Warm:
    """A state in host memory.

    runs, edits, length, logical_length, form, floor, sealed_at, slots: as in KVState. token_ids: those that its KV was
    computed from. units: pages by group. size: bytes that it takes of the budget. parts: by group, None once the copy is lost.
    lost: why (reclaimed, corrupt, fingerprint). holders: how many may still restore it.
    """

    runs: tuple[Interval, ...]
    edits: tuple[Edit, ...]
    length: int
    logical_length: int
    token_ids: array[int]
    salt: str
    units: Units
    size: int
    fingerprint: str
    parts: tuple[Part, ...] | None
    form: Form
    floor: int = 0
    sealed_at: int = 0
    slots: int = 0
    digest: bytes = b""
    lost: str = ""
    holders: int = 1

    def usable(self, limit: int) -> int:
        """Longest length up to `limit` that the state can be cut to; 0 if there is none."""
        length = min(limit, self.logical_length)
        if not self.form.reaches(self.sealed_at, self.logical_length, length):
            return 0
        return length if all(length >= part.covers_from for part in self.parts or ()) else 0

    def computed_digest(self) -> bytes:
        """SHA-256 of everything that the copy says."""
        sealed = self.form.fingerprint, self.floor, self.sealed_at, self.slots
        said = (self.salt, self.fingerprint, self.runs, self.edits, self.logical_length, self.units, sealed)
        running = hashlib.sha256(repr(said).encode())
        running.update(self.token_ids)
        for part in self.parts or ():
            running.update(repr(part[:-1]).encode())
            running.update(part.data)
        return running.digest()


class WarmTier:
    """All copies of one engine. budget: most bytes of them together, 0 for no tier. fingerprint: what KV depends on beside its
    tokens; a copy made under another is refused. Least recently made copies go first.
    """

    def __init__(self, pools: KVPools, device: UnitIO, budget: int, fingerprint: str = "") -> None:
        self.pools = pools
        self.device = device
        self.budget = budget
        self.fingerprint = fingerprint
        self.used_bytes = 0
        self.demotions = 0
        self.restores = 0
        self.rejected = 0
        """Copies that failed a check."""
        self._copies: dict[Warm, None] = {}  # oldest first

    def demote(self, state: KVState, token_ids: Sequence[int], salt: str = "") -> Warm | None:
        """Copy a state, which stays as it is: the caller releases it. None where the copy would not fit the whole budget.

        token_ids: at least those with KV. Room is made by losing the oldest copies. Raises EngineFault.
        """
        size = self.pools.bytes(state.units)
        if not 0 < size <= self.budget:
            return None
        warm = Warm(
            runs=tuple(state.runs),
            edits=state.edits,
            length=state.length,
            logical_length=state.logical_length,
            token_ids=array("q", token_ids[: state.logical_length]),
            salt=salt,
            units=state.units,
            size=size,
            fingerprint=self.fingerprint,
            parts=tuple(
                Part(
                    length=holding.length,
                    runs=tuple(holding.runs),
                    start=holding.start,
                    floor=holding.floor,
                    covers_from=holding.covers_from,
                    data=self.device.read_units(holding.pool.cls.unit_bytes, holding.units),
                )
                for holding in state.holdings
            ),
            form=state.form,
            floor=state.floor,
            sealed_at=state.sealed_at,
            slots=state.slots,
        )
        warm.digest = warm.computed_digest()
        self._keep(warm)
        self.demotions += 1
        return warm

    def restore(self, warm: Warm, room: Callable[[Units], bool] | None = None) -> KVState | None:
        """A state in fresh units with the copy's bytes; one holder less, and no copy after the last. None: `warm.lost` says why
        it cannot be had any more, or is empty where there is no room now and nothing has changed.

        room(units): make so many free, and may they be taken? Default: are they at hand? It may demote others meanwhile.
        Raises EngineFault; then the copy stays too.
        """
        if warm.parts is None:
            return None
        if warm.fingerprint != self.fingerprint or warm.computed_digest() != warm.digest:
            self.rejected += 1
            self._lose(warm, "fingerprint" if warm.fingerprint != self.fingerprint else "corrupt")
            return None
        parts, last = warm.parts, warm.holders == 1
        if last:
            self._take_out(warm)  # what `room` demotes may have its bytes
        state: KVState | None = None
        try:
            if (room or self.pools.at_hand)(warm.units):
                state = self._filled(warm, parts)
        finally:
            if last and state is None:
                self._keep(warm)
        if state is not None:
            warm.holders -= 1
            self.restores += 1
            if last:
                warm.parts, warm.lost = None, "restored"
        return state

    def share(self, warm: Warm) -> Warm:
        """One more holder of a copy."""
        warm.holders += 1
        return warm

    def discard(self, warm: Warm) -> None:
        """One holder less; the last one forgets the copy."""
        warm.holders -= 1
        if not warm.holders and warm.parts is not None:
            self._lose(warm, "discarded")

    def check(self) -> None:
        """Budget and copies agree. Raises AssertionError."""
        assert self.used_bytes == sum(warm.size for warm in self._copies)
        assert self.used_bytes <= self.budget
        for warm in self._copies:
            assert warm.parts is not None
            assert warm.holders > 0
            assert warm.size == self.pools.bytes(warm.units)
            assert len(warm.token_ids) == warm.logical_length

    def holds(self, warm: Warm) -> bool:
        """Is the copy one of those that count?"""
        return warm in self._copies

    def _filled(self, warm: Warm, parts: tuple[Part, ...]) -> KVState:
        state = KVState(self.pools, warm.form)
        try:
            state.restore(warm.runs, warm.edits, warm.logical_length)
            state.floor, state.sealed_at, state.slots = warm.floor, warm.sealed_at, warm.slots
            for holding, part in zip(state.holdings, parts, strict=True):
                holding.restore(part.runs, part.start, part.floor, part.length)
                self.device.write_units(holding.pool.cls.unit_bytes, holding.units, part.data)
        except BaseException:
            state.release()
            raise
        return state

    def _keep(self, warm: Warm) -> None:
        while self.used_bytes + warm.size > self.budget:
            self._lose(next(iter(self._copies)), "reclaimed")
        self._copies[warm] = None
        self.used_bytes += warm.size

    def _take_out(self, warm: Warm) -> None:
        del self._copies[warm]
        self.used_bytes -= warm.size

    def _lose(self, warm: Warm, why: str) -> None:
        self._take_out(warm)
        warm.parts, warm.lost = None, why
