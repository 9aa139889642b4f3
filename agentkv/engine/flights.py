"""Steps on the device: the one under way, and the one behind it, which is launched before the first is waited for.

While the device works on a step in which every row decodes, the host knows all of the next one but its tokens. These stay on
the device, so the next step can be queued already: scheduling, packing and launching cost the device nothing. A row that turns
out to have ended runs a step too many. What that step wrote lies behind the row's last token, and its draw is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable

from agentkv.engine.core import Batch, Sequence
from agentkv.engine.demands import MasksAhead
from agentkv.engine.device_memory import DeviceMemory
from agentkv.engine.runner_protocol import Launched, Runner
from agentkv.errors import EngineFault


class Flight:
    """A step that was launched, or failed in that. land: wait for it."""

    def __init__(
        self,
        batch: Batch,
        launched: Launched | None = None,
        told: list[int | None] | None = None,
        fault: EngineFault | None = None,
    ) -> None:
        self.batch, self.launched, self.fault = batch, launched, fault
        self._told = told or []

    def land(self) -> list[int | None] | EngineFault:
        """Sampled tokens by row, or the fault that ended the step."""
        if self.fault is not None:
            return self.fault
        try:
            return _checked(self.batch, self._told if self.launched is None else self.launched.wait())
        except EngineFault as fault:
            return fault
        except Exception as error:  # noqa: BLE001 - whatever the device says
            return _fault(error)


class Flights:
    """Launches steps on the runner, what waits in `memory` first."""

    def __init__(self, runner: Runner, memory: DeviceMemory) -> None:
        self._runner, self._memory = runner, memory
        self._masks = MasksAhead()

    def launch(self, batch: Batch, after: Flight | None = None) -> Flight:
        """Queue the step, without the rows whose seals failed; one without rows has landed. after: see `Runner.launch`."""
        if not batch.rows:
            return Flight(batch)
        try:
            self._memory.settle()
            batch.rows = [work for work in batch.rows if work.seq_id not in self._memory.failed]
            if not batch.rows:
                return Flight(batch)
            self._masks.start(batch.rows)
            if not self._runner.ahead:
                return Flight(batch, told=self._runner.execute(batch))
            return Flight(batch, self._runner.launch(batch, after.launched if after else None))
        except EngineFault as fault:
            return Flight(batch, fault=fault)
        except Exception as error:  # noqa: BLE001 - whatever the device says
            return Flight(batch, fault=_fault(error))


def followers(running: Iterable[Sequence], before: Batch) -> list[Sequence]:
    """Who goes on behind a step whose draws are not known. Nobody, where anything else than one token for each may be due, and
    seals: a prompt, an edit; or where a draw depends on the tokens before it, or a state could not be cut back by one."""
    if not all(work.decodes and work.sample and not work.drafted for work in before.rows):
        return []
    under_way, going = {work.seq_id for work in before.rows}, []
    for seq in running:
        if seq.seq_id not in under_way or not _steady(seq):
            return []
        if seq.num_generated + 1 < seq.max_tokens:
            going.append(seq)
    return going


def _steady(seq: Sequence) -> bool:
    state = seq.state
    if state is None or seq.seal_at or seq.pending_edits or seq.history is not None or seq.allowed is not None:
        return False
    return not state.form.mutable


def _checked(batch: Batch, drawn: list[int | None]) -> list[int | None]:
    if [token is not None for token in drawn] != [work.sample for work in batch.rows]:
        raise EngineFault("the runner did not sample the rows it was asked to")
    if any(len(work.later) != work.drafted for work in batch.rows):
        raise EngineFault("the runner did not draw behind every guess")
    return drawn


def _fault(error: Exception) -> EngineFault:
    fault = EngineFault(f"a step failed: {type(error).__name__}: {error}")
    fault.__cause__ = error
    return fault
