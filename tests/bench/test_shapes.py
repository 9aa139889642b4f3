"""Named shapes: sizes by hand, and what is drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agentkv.bench.shapes import SHAPES, draw_model, write_model
from agentkv.engine import models
from agentkv.engine.config import read_config
from agentkv.errors import BadRequest

CPU = torch.device("cpu")


def by_hand(name: str) -> int:
    """Parameters by the published sizes."""
    c = SHAPES[name]
    hidden, dim, heads, kv = c["hidden_size"], c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"]
    attention = hidden * dim * (2 * heads + 2 * kv) + (2 * dim if "qwen3" in c["model_type"] else 0)
    if "num_experts" in c:
        mlp = c["num_experts"] * (3 * hidden * c["moe_intermediate_size"] + hidden)
    else:
        mlp = 3 * hidden * c["intermediate_size"]
    embeddings = c["vocab_size"] * hidden * (1 if c["tie_word_embeddings"] else 2)
    return embeddings + hidden + c["num_hidden_layers"] * (attention + mlp + 2 * hidden)


@pytest.mark.parametrize(
    ("name", "billions"), [("qwen3-4b", 4.02), ("llama-3.1-8b", 8.03), ("qwen3-30b-a3b", 30.53), ("qwen3-30b-a3b-fp8", 30.53)]
)
def test_sizes_are_those_of_the_models(name: str, billions: float) -> None:
    model = models.build(read_config(SHAPES[name]))
    count = sum(each.numel() for path, each in model.named_parameters() if not path.endswith("weight_scale_inv"))
    assert count == by_hand(name)
    assert round(count / 1e9, 2) == billions


@pytest.mark.parametrize("name", ["tiny", "tiny-experts-fp8"])
def test_drawn_weights(name: str) -> None:
    model, again = (draw_model(name, CPU, torch.float32).model for _ in range(2))
    for (path, parameter), twin in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(parameter.float(), twin.float()), path
        assert (parameter.dtype == torch.float8_e4m3fn) == (
            name != "tiny" and path.endswith("_proj.weight") and path.startswith("layers")
        )
    layer = model.layers[0]
    weight = layer.mlp.experts.gate_up_proj.plain() if name != "tiny" else layer.mlp.gate_up_proj.weight
    assert 0.018 < weight.std() < 0.023
    assert layer.input_layernorm.weight.eq(1).all()


def test_shapes_that_are_only_drawn(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="drawn on a device"):
        write_model("llama-3.1-8b", tmp_path)
    assert not list(tmp_path.iterdir())
