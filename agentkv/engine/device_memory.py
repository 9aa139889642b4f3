"""Copies of KV on the device, in the order in which the host decided them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from agentkv.engine.cache.arena import UnitMoves
from agentkv.engine.core import Batch
from agentkv.engine.runner_protocol import Runner
from agentkv.engine.work import Copies, Moves, PageWork, SealWork, Work
from agentkv.errors import EngineFault


class DeviceMemory:
    """The runner as the place where units lie. Everything is carried out at once, on the runner's stream.

    batch: gives the step that is being put together. Its moves wait until the step runs, or until something else here is
    about to touch units: then they go first. Whatever the runner raises becomes an EngineFault.

    failed: by running sequence, the fault of its seal or prune since somebody last looked. Its new sealed units hold anything;
    nobody else's are touched.
    """

    def __init__(self, runner: Runner, batch: Callable[[], Batch]) -> None:
        self.runner = runner
        self._batch = batch
        self.failed: dict[int, EngineFault] = {}

    def settle(self) -> None:
        """Carry out the moves that wait."""
        batch = self._batch()
        moves, batch.moves = batch.moves, []
        self.carry_out(moves)

    def carry_out(self, works: list[Work]) -> None:
        """One work after another."""
        with _faults("moving KV"):
            for work in works:
                if isinstance(work, Moves):
                    self.runner.move_slots(*work)
                elif isinstance(work, Copies):
                    self.runner.move_units(self.runner.groups[work.group].stripe_bytes, work.source, work.target)
                elif isinstance(work, PageWork):
                    self.runner.refresh(work)
                else:
                    self._seal(work)

    def _seal(self, work: SealWork) -> None:
        try:
            work.slots_left = self.runner.seal(work)
        except Exception as error:
            if work.seq_id is None:
                raise
            self.failed[work.seq_id] = EngineFault(f"a seal failed: {type(error).__name__}: {error}")

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
