"""The largest batch that is told is the one that an engine takes."""

from __future__ import annotations

import pytest
import torch

from agentkv import methods
from agentkv.bench.batches import largest_batch
from agentkv.bench.injected import drawn_engine
from agentkv.bench.shapes import draw_model
from agentkv.engine.core import Status


@pytest.mark.parametrize("text", ["dense", "snapkv:capacity=64,window=16", "kivi:group=16,residual=32", "quest:budget=64"])
def test_so_many_decode_together_and_one_more_waits(text: str) -> None:
    """Requests come one after another, each when the one before has been sealed, to an engine of that memory."""
    loaded, method = draw_model("tiny", torch.device("cpu"), torch.float32), methods.parse(text)
    arena, new = 600 << 10, 24
    llm, _, requests = drawn_engine(loaded, method, [300] * 24, new_tokens=0, memory=arena)
    said = largest_batch(loaded, method, arena, 300, new, llm.config.step_tokens)
    assert 2 <= said < 24
    sequences = []
    for request in requests:
        sequences.append(llm.add(request))
        for _ in range(2):
            llm.step()
        if sequences[-1].status is Status.WAITING:
            break
    llm.check()
    assert len(sequences) - 1 == said
    assert llm.scheduler.tally.preemptions == 0
