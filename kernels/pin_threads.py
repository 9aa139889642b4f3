"""One core for each thread of a CPU step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentkv.kernels.native import compiled


def pin_threads(cores: Sequence[int]) -> bool:
    """Bind the calling thread to the first core and the helpers that OpenMP gives it to the others, one each, until it ends.

    The helpers are those of `len(cores)` threads; they belong to the calling thread alone. False, and nothing is bound, where
    the compiled kernels or the system cannot do it. Linux only.
    """
    wanted = torch.tensor(list(cores), dtype=torch.int32)
    pin = compiled("pin", wanted)
    if pin is None:
        return False
    bound = torch.zeros(1, dtype=torch.int32)
    pin(wanted.data_ptr(), len(cores), bound.data_ptr())
    return bool(bound)
