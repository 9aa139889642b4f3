"""Gemma 3 270M (the base model), real weights: `make models` fetches them; without them these tests are skipped."""

from __future__ import annotations

import argparse
import inspect
from typing import Any

import gguf
import pytest
import torch
from fetch_models import GEMMA3

from agentkv.engine.loader import load_model

pytestmark = [
    pytest.mark.skipif(not GEMMA3.path.is_file(), reason=f"{GEMMA3.name} is not in .models/: run make models"),
    pytest.mark.timeout(1200),
]
LENGTH = 700
"""Tokens of the text: 15 of 18 layers see the last 512."""


@pytest.fixture(scope="module")
def file() -> gguf.GGUFReader:
    return gguf.GGUFReader(GEMMA3.path)


@pytest.fixture(scope="module")
def ours() -> Any:
    return load_model(GEMMA3.path.parent)


@pytest.fixture(scope="module")
def theirs(file: gguf.GGUFReader) -> Any:
    """transformers' model, filled by hand; that transformers reads such files alike is shown with a tiny one (test_gguf)."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    sizes = {"hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18, "vocab_size": 262144}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256}
    config = Gemma3TextConfig(**sizes, **heads, sliding_window=512, max_position_embeddings=32768, eos_token_id=None)
    with torch.device("meta"):
        model = Gemma3ForCausalLM(config)
    model.to_empty(device="cpu")
    model.init_weights()  # what is computed, not stored: the scale of embeddings, rotary frequencies
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, 18)
    tensors = {each.name: each for each in file.tensors}
    for name, parameter in model.named_parameters():
        found = tensors.pop(names.get_name(name, (".weight",)))
        values = torch.tensor(gguf.quants.dequantize(found.data, found.tensor_type))
        parameter.data.copy_(values - 1 if name.endswith("norm.weight") else values)
    assert not tensors
    return model.eval()


@pytest.fixture(scope="module")
def tokens(file: gguf.GGUFReader) -> list[int]:
    """Source text in the file's own pieces, the longest first: near enough to its tokenizer for text that the model knows."""
    ids = {piece: index for index, piece in enumerate(file.fields["tokenizer.ggml.tokens"].contents())}
    text, found = inspect.getsource(argparse).replace(" ", "\u2581"), [2]
    while len(found) < LENGTH:
        piece = next(text[:size] for size in range(24, 0, -1) if text[:size] in ids)
        found.append(ids[piece])
        text = text[len(piece) :]
    return found


def test_logits_equal_transformers_past_the_window(tokens: list[int], ours: Any, theirs: Any, host: Any) -> None:
    """In float32, of logits up to 31."""
    with torch.inference_mode():
        want = theirs(torch.tensor([tokens]), logits_to_keep=40).logits[0]
    mine = host(ours, 128, max_rows=1, pages_a_row=6)
    for start, end in ((0, 500), (500, 501), (501, LENGTH - 40)):
        mine.runner.execute(mine.batch({0: tokens[start:end]}))
    got = mine.chunked(0, tokens[-40:], [30] + [1] * 10)
    worst = float((got - want).abs().max())
    print(f"logits within {worst:.1e}, the largest {float(want.abs().max()):.0f}")
    assert worst <= 2e-4
    assert torch.equal(got.argmax(-1), want.argmax(-1))


def test_64_greedy_tokens_over_the_window_edge(tokens: list[int], ours: Any, theirs: Any, host: Any) -> None:
    prompt = tokens[:480]
    inputs = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.long)}
    options = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    want = theirs.generate(**inputs, **options)[0, len(prompt) :].tolist()
    assert host(ours, 128, max_rows=1, pages_a_row=6).greedy(0, prompt, 64) == want
