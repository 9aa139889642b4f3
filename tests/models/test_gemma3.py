"""Gemma 3 270M (the base model), real weights: `make models` fetches them; without them these tests are skipped."""

from __future__ import annotations

import argparse
import inspect
from typing import Any

import gguf
import pytest
import torch
from fetch_models import GEMMA3
from gguf_files import read_by_transformers

from agentkv.engine.loader import load_model

pytestmark = pytest.mark.skipif(not GEMMA3.path.is_file(), reason=f"{GEMMA3.name} is not in .models/: run make models")
LENGTH = 700
"""Tokens of the text: 15 of 18 layers see the last 512."""


@pytest.fixture(scope="module")
def ours() -> Any:
    return load_model(GEMMA3.path.parent)


@pytest.fixture(scope="module")
def theirs() -> Any:
    from transformers import Gemma3TextConfig

    sizes = {"hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18, "vocab_size": 262144}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256}
    return read_by_transformers(GEMMA3.path, Gemma3TextConfig(**sizes, **heads, sliding_window=512, eos_token_id=None))


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    """Source text in the file's own pieces, the longest first: near enough to its tokenizer for text that the model knows."""
    pieces = gguf.GGUFReader(GEMMA3.path).fields["tokenizer.ggml.tokens"].contents()
    ids = {piece: index for index, piece in enumerate(pieces)}
    text, found = inspect.getsource(argparse).replace(" ", "\u2581"), [2]
    while len(found) < LENGTH:
        piece = next(text[:size] for size in range(24, 0, -1) if text[:size] in ids)
        found.append(ids[piece])
        text = text[len(piece) :]
    return found


def test_logits_equal_transformers_past_the_window(tokens: list[int], ours: Any, theirs: Any, host: Any) -> None:
    """In float32, of logits up to 31."""
    with torch.inference_mode():
        want = theirs(torch.tensor([tokens]), logits_to_keep=60).logits[0]
    mine = host(ours, 128, max_rows=1, pages_a_row=6)
    for start, end in ((0, 500), (500, 501), (501, LENGTH - 60)):
        mine.runner.execute(mine.batch({0: tokens[start:end]}))
    got = mine.chunked(0, tokens[-60:], [40] + [1] * 20)
    assert (got - want).abs().max() <= 2e-4
    assert torch.equal(got.argmax(-1), want.argmax(-1))


def test_64_greedy_tokens_over_the_window_edge(tokens: list[int], ours: Any, theirs: Any, host: Any) -> None:
    prompt = tokens[:480]
    inputs = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.long)}
    options = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    want = theirs.generate(**inputs, **options)[0, len(prompt) :].tolist()
    assert len(set(want)) > 5
    assert host(ours, 128, max_rows=1, pages_a_row=6).greedy(0, prompt, 64) == want
