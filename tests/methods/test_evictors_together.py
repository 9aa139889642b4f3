"""Evicting methods beside each other in one engine, in the same steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evicted import Engine, prompt

from agentkv import methods
from agentkv.engine.core import EngineConfig, Request
from agentkv.engine.llm import LLM
from agentkv.engine.loader import load_model
from agentkv.engine.runner import ModelRunner
from agentkv.types import Sampling

OPTIONS: dict[str, dict[str, Any]] = {
    "dense": {},
    "streamingllm": {"sinks": 4, "recent": 20},
    "snapkv": {"capacity": 40, "window": 8},
    "adakv": {"capacity": 50, "window": 20},
}


def test_each_draws_what_it_draws_alone(folder: Path) -> None:
    config = EngineConfig(64 << 20, 2000, max_rows=8, step_tokens=50)
    runner = ModelRunner(load_model(folder, dtype="float64"), config, [methods.get(name, **OPTIONS[name]) for name in OPTIONS])
    llm = LLM(config, runner, reuse="chain")
    prompts = [prompt(70 + 20 * form, seed=form) for form in range(4)]
    seqs = [
        llm.add(Request(ids, Sampling(max_tokens=30, temperature=0), form=form, chain_id=f"{form} {copy}"))
        for copy in range(2)
        for form, ids in enumerate(prompts)
    ]
    while llm.has_work:
        llm.step()
        llm.check()
    for seq, ids, name in zip(seqs, prompts * 2, [*OPTIONS] * 2, strict=True):
        assert seq.fault is None
        assert seq.token_ids[len(ids) :] == Engine(folder, name, **OPTIONS[name]).turn(ids, count=30).tokens
