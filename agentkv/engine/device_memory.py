"""Copies of KV on the device, in the order in which the host decided them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from agentkv.engine.cache.arena import UnitMoves
from agentkv.engine.core import Batch, Moves, Runner
from agentkv.errors import EngineFault


class DeviceMemory:
    """The runner as the place where units lie. Everything is carried out at once, on the runner's stream.

    batch: gives the step that is being put together. Its moves wait until the step runs, or until something else here is
    about to touch units: then they go first. Whatever the runner raises becomes an EngineFault.
    """

    def __init__(self, runner: Runner, batch: Callable[[], Batch]) -> None:
        self.runner = runner
        self._batch = batch

    def settle(self) -> None:
        """Carry out the moves that wait."""
        batch = self._batch()
        moves, batch.moves = batch.moves, []
        self.move_slots(moves)

    def move_slots(self, moves: list[Moves]) -> None:
        """Copy slots, one list after another."""
        with _faults("moving KV"):
            for each in moves:
                self.runner.move_slots(*each)

    def move_units(self, moves: list[UnitMoves]) -> None:
        """Copy whole units (defragmentation): the accounts say already that they have moved."""
        self.settle()
        with _faults("moving units"):
            for cls, source, target in moves:
                self.runner.move_units(cls.unit_bytes, source, target)

    def read_units(self, unit_bytes: int, units: list[int]) -> memoryview:
        """The bytes of units, one after another."""
        self.settle()
        with _faults("reading KV"):
            return self.runner.read_units(unit_bytes, units)

    def write_units(self, unit_bytes: int, units: list[int], data: memoryview) -> None:
        """Put such bytes into units."""
        self.settle()
        with _faults("writing KV"):
            self.runner.write_units(unit_bytes, units, data)


@contextmanager
def _faults(doing: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise EngineFault(f"{doing} failed: {type(error).__name__}: {error}") from error
