"""A method that cannot say what it keeps: its sequence ends with that, others go on, and the accounts hold."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from agentkv import methods
from agentkv.bench.shapes import draw_model, random_prompts
from agentkv.engine.core import EngineConfig, Request, Sequence
from agentkv.engine.form import Held
from agentkv.engine.llm import LLM
from agentkv.engine.runner import ModelRunner
from agentkv.engine.sparse import Keep
from agentkv.errors import EngineFault
from agentkv.methods.h2o import H2O
from agentkv.types import Sampling


@dataclass(frozen=True)
class Undecided(H2O):
    """at: tokens from which on it fails, once the prompt has been read, or at its end (`in_prompt`); how: by an error of its
    own, or by an answer that cannot be."""

    heavy: float = 16
    recent: float = 16
    interval: int = 8
    at: int = 70
    in_prompt: bool = False
    how: str = "raise"

    def keep(self, held: Held) -> Keep | None:
        if held.tokens >= self.at and held.prompt_end is self.in_prompt:
            if self.how == "raise":
                raise ZeroDivisionError("a budget of nothing")
            return Keep(held.tokens + 1, 4)
        return super().keep(held)


def finished(llm: LLM, sequences: list[Sequence]) -> None:
    for _ in range(200):
        if not llm.has_work:
            break
        llm.step()
        llm.check()
    for sequence in sequences:
        if sequence.fault is None:
            llm.commit(sequence, sequence.token_ids[sequence.num_prompt_tokens :])


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("in_prompt", [False, True])
@pytest.mark.parametrize("how", ["raise", "beyond"])
def test_it_ends_its_own_sequence(ahead: bool, in_prompt: bool, how: str) -> None:
    loaded = draw_model("tiny", torch.device("cpu"), torch.float32)
    served = methods.get("dense"), Undecided(at=60 if in_prompt else 70, in_prompt=in_prompt, how=how)
    config = EngineConfig(4 << 20, 256, page_size=16, max_rows=4, step_tokens=64)
    runner = ModelRunner(loaded, config, served)
    runner.ahead = ahead
    llm = LLM(config, runner, reuse="chain")
    free = llm.stats().bytes["free"]
    prompts = random_prompts(3, 60, loaded.config.vocab_size, seed=1)
    sampling = Sampling(temperature=0.0, max_tokens=30)
    alone = llm.add(Request(prompts[0], sampling))
    finished(llm, [alone])
    beside = [llm.add(Request(prompts[0], sampling)), llm.add(Request(prompts[1], sampling, form=1))]
    finished(llm, beside)
    whole, broken = beside
    assert whole.token_ids == alone.token_ids
    assert isinstance(broken.fault, EngineFault)
    assert ("ZeroDivisionError: a budget of nothing" if how == "raise" else "outside what is held") in str(broken.fault)
    assert len(broken.token_ids) < 90
    llm.check()
    again = llm.add(Request(prompts[2][:20], Sampling(temperature=0.0, max_tokens=4), form=1))
    finished(llm, [again])
    assert again.fault is None
    assert llm.stats().bytes["free"] == free
