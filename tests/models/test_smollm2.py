"""SmolLM2-135M-Instruct, real weights: `make models` fetches them; without them these tests are skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fetch_models import SMOLLM2
from gguf_files import read_by_transformers

from agentkv.engine.loader import load_model
from agentkv.engine.tokenizer import Tokenizer

pytestmark = pytest.mark.skipif(not SMOLLM2.path.is_file(), reason=f"{SMOLLM2.name} is not in .models/: run make models")
TEXT = "def add(a, b):\n    return a + b\n\n\ndef mul(a, b):\n    return a * 12345\n\nThe capital of France is"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(SMOLLM2.path)


@pytest.fixture(scope="module")
def ours() -> Any:
    return load_model(SMOLLM2.path.parent)


@pytest.fixture(scope="module")
def theirs() -> Any:
    return read_by_transformers(SMOLLM2.path)


def test_logits_equal_transformers(tokenizer: Tokenizer, ours: Any, theirs: Any, host: Any) -> None:
    tokens = tokenizer.encode(TEXT)
    with torch.inference_mode():
        want = theirs(torch.tensor([tokens])).logits[0]
    got = host(ours, 16, max_rows=1).chunked(0, tokens, [15, 1, 5])
    assert (got - want).abs().max() <= 1e-4
    assert torch.equal(got.argmax(-1), want.argmax(-1))


def test_64_greedy_tokens_equal_transformers_generate(tokenizer: Tokenizer, ours: Any, theirs: Any, host: Any) -> None:
    messages = [{"role": "user", "content": "Write a Python function that reads a JSON file."}]
    prompt = tokenizer.encode(tokenizer.apply_template(messages), special=True)
    inputs = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.long)}
    options = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    want = theirs.generate(**inputs, **options)[0, len(prompt) :].tolist()
    assert host(ours, 128, max_rows=1, pages_a_row=2).greedy(0, prompt, 64) == want
    assert "json" in tokenizer.decode(want)


def test_the_chat_template_and_the_vocabulary(tokenizer: Tokenizer, ours: Any) -> None:
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    rendered = tokenizer.apply_template([{"role": "user", "content": "hi"}])
    assert rendered == (f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode(rendered, special=True)[:2] == [1, 9690]
    assert tokenizer.eos_ids == {tokenizer.end_of_turn_id} == {2}
    assert tokenizer.vocab_size == ours.config.vocab_size == 49152
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_a_session_on_it() -> None:
    from agentkv import Runtime

    with Runtime(str(SMOLLM2.path), db=None, window=1024, memory="64MiB") as rt, rt.session(system="Be brief.") as session:
        session.add_user("What is the capital of France?")
        first = session.generate(max_tokens=16, temperature=0.0)
        assert "Paris" in first.text
        session.add_user("And of Italy?")
        second = session.generate(max_tokens=16, temperature=0.0)
        assert second.usage.cached_tokens > 0
        assert second.miss is None
