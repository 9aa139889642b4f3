"""What start-up sets aside for steps, beside prompts that fill the window and are really read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from six_shapes import PAGE, VOCAB, drawn, method_of

from agentkv.engine.core import EngineConfig, Request
from agentkv.engine.llm import LLM
from agentkv.engine.runner import ModelRunner
from agentkv.engine.sizing import measure_step, measured
from agentkv.types import Sampling

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["dense", "quest", "snapkv", "adakv", "h2o", "kivi", "fp8_kv", "palu", "kvzip"])
def test_a_prompt_of_a_whole_window_takes_no_more(name: str) -> None:
    loaded = drawn("qwen3-128-4", "cuda", torch.bfloat16)
    method = method_of(name, loaded)
    assert method is not None
    config = EngineConfig(1 << 30, 24_577, page_size=PAGE, max_rows=4, step_tokens=1024)
    planned = measure_step(loaded, config, method)
    llm = LLM(config, ModelRunner(loaded, replace(config, graphs=False), method), reuse="chain")
    sequence = llm.add(Request([at % VOCAB for at in range(24_576)], Sampling(max_tokens=1, temperature=0.0)))
    with measured(loaded.device) as peak:
        while llm.has_work:
            llm.step()
    assert sequence.fault is None
    print(f"{name}: {peak.bytes / 2**20:.1f} of {planned / 2**20:.1f} MiB")
    assert peak.bytes <= planned
