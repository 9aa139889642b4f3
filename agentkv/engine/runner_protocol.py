"""What the engine's host logic asks of the device side."""

from __future__ import annotations

from typing import Protocol

from agentkv.engine.core import Batch, Group
from agentkv.engine.form import Form
from agentkv.engine.work import PageWork, SealWork, Slot


class Launched(Protocol):
    """A step that the device works on."""

    def wait(self) -> list[int | None]:
        """What `Runner.execute` returns, when it is there."""
        ...


class Runner(Protocol):
    """The device side. The engine's host logic talks to it only through this, so it can be tested without torch.

    ahead: a step may be launched before the one before it was waited for; otherwise `launch` is not called.
    """

    groups: tuple[Group, ...]
    forms: tuple[Form, ...]
    num_granules: int
    vocab_size: int
    ahead: bool

    def launch(self, batch: Batch, after: Launched | None = None) -> Launched:
        """Queue a step. after: the one before it, whose draws are the tokens of rows that follow it."""
        ...

    def execute(self, batch: Batch) -> list[int | None]:
        """Forward the batch; for each row the sampled token id, None where `sample` is False, -1 where a mask allows none.

        Of a row with guesses it is the first draw; the others are in the row's `later`.
        """
        ...

    def move_slots(self, source: list[Slot], target: list[Slot], group: int = 0) -> None:
        """Copy K and V of all the group's layers from slot to slot (compaction, copy-on-write of a page).

        The sets may overlap: as if every source were read before a target is written.
        """
        ...

    def move_units(self, unit_bytes: int, source: list[int], target: list[int]) -> None:
        """Copy whole units from granule to granule, in order (defragmentation).

        Sources ascend and no target overlaps a source that comes later; a target may overlap its own source.
        """
        ...

    def seal(self, work: SealWork) -> int:
        """Write a sequence's new sealed part from its old one and its tail; most slots that it has in a layer and head."""
        ...

    def refresh(self, work: PageWork) -> None:
        """Make page state anew."""
        ...

    def read_units(self, unit_bytes: int, units: list[int]) -> memoryview:
        """The bytes of units, one after another, in host memory that nobody else writes (demotion to the warm tier)."""
        ...

    def write_units(self, unit_bytes: int, units: list[int], data: memoryview) -> None:
        """Put such bytes into units, bit for bit."""
        ...
