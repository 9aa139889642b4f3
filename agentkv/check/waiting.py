"""Noticing on a CPU what would make the host wait for a GPU, and which operations hooks run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from agentkv.check.outcome import Failed
from agentkv.check.watch import IN_A_STEP, Watcher

WAIT = frozenset(
    {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique_dim", "_unique", "_unique2", "bincount"}
)
"""Operations that give the host a value, or a shape that depends on values."""
READ = frozenset({"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__", "nonzero"})
"""Tensor methods that do, some of them without an operation."""


class NoWaiting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Failed where an operation waits."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = func.overloadpacket.__name__, kwargs or {}
        if name in WAIT or _masks(name, args) or _sums(func, given):
            raise Failed(f"{name} waits for the device")
        with self:  # in inference mode, operations that are made of others come here whole
            parts = func.decompose(*args, **given)
        return func(*args, **given) if parts is NotImplemented else parts


class NoReading(TorchFunctionMode):
    """Failed where a tensor is read on the host, or a number of the host is copied to the places that a tensor names."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READ:
            raise Failed(f"{name} of a tensor waits for the device")
        if name == "__setitem__" and _copies(*args[1:]):
            raise Failed(f"{name} of a plain number waits for the device, to which it is copied: give a tensor that is there")
        return func(*args, **(kwargs or {}))


def _copies(places: Any, value: Any) -> bool:
    """Is a number written where a tensor says? On a GPU it becomes a tensor of the host first."""
    named = places if isinstance(places, tuple) else (places,)
    return not isinstance(value, torch.Tensor) and any(isinstance(each, torch.Tensor) for each in named)


def _masks(name: str, args: Any) -> bool:
    """Is a tensor indexed by booleans?"""
    if name not in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return False
    return any(isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8) for each in args[1] or ())


def _sums(func: Any, given: Any) -> bool:
    """Is the size of what comes out the sum of a tensor?"""
    of_tensor = func.overloadpacket.__name__ == "repeat_interleave" and func._overloadname != "self_int"
    return of_tensor and given.get("output_size") is None


class WaitWatcher(Watcher):
    """Runs hooks where nothing may wait. failures: what waited, whatever the engine made of it."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    def around(self, hook: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Make the call under guard."""
        try:
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("error")
            with NoReading(), NoWaiting():  # type: ignore[no-untyped-call]
                return call(*args)
        except Failed as failed:
            self.failures.append(f"{hook}: {failed}")
            raise
        finally:
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("default")


class OperationWatcher(Watcher):
    """Writes down which operations the hooks of each decode step run. steps: one list of names a step."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = []

    def around(self, hook: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Make the call, and note it."""
        batch = args[-1]
        if hook not in IN_A_STEP or batch.prefill:
            return call(*args)
        if hook == "on_step_begin":
            self.steps.append([])
        with _Noting(self.steps[-1]):
            return call(*args)


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, names: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))
