"""What the engine's host side makes of a request's sampling; the draws themselves are tested in tests/models."""

from __future__ import annotations

import pytest
from fake_engine import engine, run

from agentkv.engine.core import Request
from agentkv.errors import BadRequest
from agentkv.types import Sampling


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    llm = engine()
    with pytest.raises(BadRequest) as raised:
        llm.add(Request(token_ids=[1], sampling=Sampling(logit_bias={5: 1.0})))
    assert raised.value.param == "logit_bias"
    assert not llm.has_work
    assert llm.add(Request(token_ids=[1], sampling=Sampling(logit_bias={4: 1.0}))).history is None


def test_a_penalised_sequence_has_a_history_that_grows_with_it() -> None:
    llm = engine()
    seq = llm.add(Request(token_ids=[1, 2, 3], sampling=Sampling(frequency_penalty=0.5, max_tokens=4)))
    assert seq.history is not None
    run(llm)
    assert seq.history.token_ids is seq.token_ids
    assert (seq.history.num_prompt, len(seq.token_ids)) == (3, 7)
