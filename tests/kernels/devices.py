"""Running a kernel in Triton's interpreter, and noticing when an operation waits for the device."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
only_interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by another test, in a process where Triton is interpreted")
only_without_gpu = pytest.mark.skipif(CUDA or INTERPRETED, reason="for machines without a GPU")


def numpy_scalars(patch: pytest.MonkeyPatch) -> None:
    """This release's interpreter takes loop bounds by int(array of one element), which numpy 2.4 refuses."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: type, scope: object) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # type: ignore[attr-defined]

    patch.setattr(interpreter, "_patch_lang_tensor", patched)


def pass_interpreted(file: str, count: int) -> None:
    """Run `file` in a child with the interpreter on (Triton decides when it is first imported): `count` tests pass."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "interpreter", file]
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"{count} passed" in done.stdout


class NoWaiting(TorchDispatchMode):
    """Raises where the host would have to wait for a value: item, tolist, nonzero, bool of a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"):
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))
