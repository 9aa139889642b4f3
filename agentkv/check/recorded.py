"""A graph for a CPU: every operation of a captured step is recorded, and run again on the same tensors.

So whatever the host put into the step other than by its inputs stays what it was, as it would on a GPU. What does not go
through torch's dispatcher (the CPU's compiled kernels) is not seen: float64 has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from agentkv.check.outcome import Failed
from agentkv.check.waiting import NoReading, NoWaiting

FROZEN = ("lift_fresh", "lift_fresh_copy")
"""Operations that bring lists of the host into the step, where they stay as they were."""

Call = tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]


class RecordedDevice:
    """The CPU as a device with graphs. A capture runs the work once more, and takes back what it wrote."""

    device = torch.device("cpu")

    def capture(self, work: Callable[[], None]) -> RecordedGraph:
        """Every operation that torch dispatches, with its arguments and results. Failed for what a GPU could not capture."""
        recorder = _Recorder()
        try:
            with NoReading(), NoWaiting(), recorder:  # type: ignore[no-untyped-call]
                work()
        finally:
            recorder.take_back()
        return RecordedGraph(recorder.calls)

    def held_bytes(self) -> int:
        """Nothing is counted."""
        return 0


class RecordedGraph:
    """Runs what was recorded: whatever the host computed meanwhile is as it was."""

    def __init__(self, calls: list[Call]) -> None:
        self._calls = calls

    @torch.inference_mode()
    def replay(self) -> None:
        """Results go to where those of the capture lie. Views see them there, and what is written in place is there."""
        for function, args, kwargs, results in self._calls:
            for result, again in zip(results, _tensors(function(*args, **kwargs)), strict=True):
                if result.data_ptr() != again.data_ptr():
                    result.copy_(again)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is dispatched."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def take_back(self) -> None:
        """Whatever was written in place is as it was."""
        for storage, before in self._before.values():
            storage.copy_(before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and note it."""
        name = func.overloadpacket.__name__
        if name in FROZEN and args[0].dim():
            raise Failed(f"{name} carries numbers of the host into a captured step")
        self._keep(func, args, kwargs or {})
        made = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, _tensors(made)))
        return made

    def _keep(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copy what the operation is about to write into, the first time."""
        for place, parameter in enumerate(func._schema.arguments):
            given = kwargs.get(parameter.name) if place >= len(args) else args[place]
            if parameter.alias_info is not None and parameter.alias_info.is_write and isinstance(given, Tensor):
                storage = given.untyped_storage()
                self._before.setdefault(storage.data_ptr(), (storage, storage.clone()))  # type: ignore[no-untyped-call]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]
