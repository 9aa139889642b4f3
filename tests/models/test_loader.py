"""Bad model directories fail at load, with the file and what to do; good ones in either spelling load alike."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from agentkv.engine import loader
from agentkv.engine.config import read_config
from agentkv.engine.loader import load_model
from agentkv.errors import BadModel, UnknownModel


@pytest.fixture
def folder(checkpoint: Any, tmp_path: Path) -> Path:
    """A private copy of a sharded checkpoint."""
    return Path(shutil.copytree(checkpoint("qwen3"), tmp_path / "model"))


def shards(folder: Path) -> list[Path]:
    found = sorted(folder.glob("model-*.safetensors"))
    assert len(found) > 1
    return found


def edit(path: Path, **changes: Any) -> None:
    loaded = json.loads(path.read_text())
    loaded.update(changes)
    path.write_text(json.dumps({name: value for name, value in loaded.items() if value is not None}))


def refused(folder: Path, *words: str) -> BadModel:
    with pytest.raises(BadModel) as caught:
        load_model(folder)
    for word in words:
        assert word in str(caught.value)
    assert caught.value.hint
    return caught.value


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="nowhere"):
        load_model(tmp_path / "nowhere")


def test_missing_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    refused(folder, "config.json is missing")


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_broken_config(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    refused(folder, "config.json")


def test_an_unknown_architecture_names_the_served_ones(folder: Path) -> None:
    edit(folder / "config.json", architectures=["BertModel"])
    refused(folder, "BertModel", "LlamaForCausalLM", "Qwen3ForCausalLM")
    edit(folder / "config.json", architectures=[])
    refused(folder, "no architecture", "LlamaForCausalLM")


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"])
def test_a_config_without_a_size(folder: Path, name: str) -> None:
    edit(folder / "config.json", **{name: None})
    refused(folder, name)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"num_attention_heads": "many"}, "wrong kind"),
        ({"num_hidden_layers": 0}, "below 1"),
        ({"num_key_value_heads": 4}, "divide"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "sliding"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}, "by layer type"),
        ({"rope_parameters": ["default"]}, "wrong kind"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial"),
    ],
)
def test_configs_that_would_be_computed_wrongly(folder: Path, changes: dict[str, Any], word: str) -> None:
    edit(folder / "config.json", **changes)
    refused(folder, word)


@pytest.mark.parametrize("use", [True, False])
@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("first", [0, 2, 3, 28])
def test_layers_slide_where_transformers_has_them_slide(use: bool, window: int | None, first: int) -> None:
    from transformers import Qwen2Config

    said = {"use_sliding_window": use, "sliding_window": window, "max_window_layers": first, "num_hidden_layers": 3}
    raw = Qwen2Config(**said).to_dict() | said | {"architectures": ["Qwen2ForCausalLM"]}
    kinds = raw.pop("layer_types")
    assert ("sliding_attention" in kinds) == (use and window is not None and first < 3)
    want = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    assert read_config(raw).sliding == (want if any(want) else ())
    raw["architectures"] = ["LlamaForCausalLM"]  # where transformers knows of no such thing
    assert read_config({key: value for key, value in raw.items() if "window" not in key}).sliding == ()


@pytest.mark.parametrize("count", [5, 6, 18])
def test_both_spellings_of_gemma_are_one(count: int) -> None:
    """What checkpoints were published with, what transformers 5 makes of it, and nothing but the sizes."""
    from transformers import Gemma3TextConfig

    named = {"architectures": ["Gemma3ForCausalLM"]}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 97}
    sizes |= {"num_hidden_layers": count, "max_position_embeddings": 512, "rms_norm_eps": 1e-6}
    old = {"sliding_window_pattern": 6, "sliding_window": 4096, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    old |= {"query_pre_attn_scalar": 256, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh"}
    twin = Gemma3TextConfig(**sizes)
    bare, published, new = (read_config(each | named) for each in (sizes, sizes | old, twin.to_dict()))
    assert bare == published == new
    assert new.sliding == tuple(4096 if kind == "sliding_attention" else None for kind in twin.layer_types)
    assert (new.rope.theta, new.local_rope.theta, new.tied, new.attention_scale) == (1e6, 1e4, True, 1 / 16)
    linear = {"rope_type": "linear", "factor": 8.0}
    scaled = read_config(sizes | old | named | {"rope_scaling": linear})
    assert scaled == read_config(Gemma3TextConfig(**sizes, rope_scaling=linear).to_dict() | named)
    assert (scaled.rope.factor, scaled.local_rope.kind) == (8.0, "default")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"layer_types": ["full_attention"] * 2}, "2 layers"),
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "chunked_attention"),
        ({"sliding_window": "null"}, "sliding_window is 'null'"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ({"query_pre_attn_scalar": "many"}, "wrong kind"),
        ({"hidden_activation": "relu"}, "relu"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "not by layer type"),
        ({"architectures": ["LlamaForCausalLM"]}, "by layer type, unlike those of Llama"),
        ({"architectures": ["LlamaForCausalLM"], "rope_parameters": None}, "not served for LlamaForCausalLM"),
    ],
)
def test_gemma_configs_that_contradict_themselves(checkpoint: Any, tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    folder = Path(shutil.copytree(checkpoint("gemma3"), tmp_path / "model"))
    load_model(folder)
    edit(folder / "config.json", **changes)
    refused(folder, word)


def test_a_truncated_shard(folder: Path) -> None:
    path = shards(folder)[1]
    path.write_bytes(path.read_bytes()[:-100])
    refused(folder, path.name, "truncated", "again")


def test_a_shard_of_garbage(folder: Path) -> None:
    path = shards(folder)[0]
    path.write_bytes(b"\0" * 50)
    refused(folder, path.name)


def test_a_missing_shard(folder: Path) -> None:
    path = shards(folder)[-1]
    path.unlink()
    refused(folder, path.name, "missing")


def test_no_weights_at_all(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    refused(folder, "no safetensors weights")
    (folder / "pytorch_model.bin").touch()
    refused(folder, "other weight formats")


def test_an_index_that_lies(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    mapping = json.loads(index.read_text())["weight_map"]
    name = "model.layers.1.mlp.up_proj.weight"
    others = [path.name for path in shards(folder) if path.name != mapping[name]]
    edit(index, weight_map=mapping | {name: others[0]})
    refused(folder, name, others[0])
    edit(index, weight_map={key: value for key, value in mapping.items() if key != name})
    refused(folder, "lack", name)
    index.write_text("{}")
    refused(folder, "weight_map")


@pytest.mark.parametrize(
    ("changes", "tensor"),
    [({"num_key_value_heads": 3}, "k_proj"), ({"intermediate_size": 79}, "gate_proj"), ({"vocab_size": 98}, "embed_tokens")],
)
def test_a_wrong_shape(folder: Path, changes: dict[str, Any], tensor: str) -> None:
    edit(folder / "config.json", **changes)
    refused(folder, tensor, "shape")


def test_an_untied_head_that_is_not_there(folder: Path) -> None:
    edit(folder / "config.json", tie_word_embeddings=False)
    refused(folder, "lm_head.weight")


def test_a_single_file_gives_the_same_weights_as_shards(folder: Path, model: Any) -> None:
    from safetensors.torch import load_file, save_file

    merged: dict[str, torch.Tensor] = {}
    for path in shards(folder):
        merged |= load_file(path)
        path.unlink()
    (folder / "model.safetensors.index.json").unlink()
    save_file(merged, folder / "model.safetensors")
    mine, theirs = load_model(folder), model("qwen3", "float32")
    assert mine.config == theirs.config
    for (name, a), (_, b) in zip(mine.model.named_parameters(), theirs.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_dtypes(folder: Path) -> None:
    assert load_model(folder).dtype == torch.float32
    assert load_model(folder, dtype="float64").model.norm.weight.dtype == torch.float64
    assert load_model(folder, dtype=torch.bfloat16).model.norm.weight.dtype == torch.bfloat16
    assert loader.resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    with pytest.raises(BadModel, match="int3") as caught:
        load_model(folder, dtype="int3")
    assert "float32" in caught.value.hint


def test_both_spellings_of_rope_are_one(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw.pop("rope_parameters", None)
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 128
    old = read_config(raw | {"rope_theta": 5e5, "rope_scaling": scaling})
    new = read_config(raw | {"rope_parameters": scaling | {"rope_theta": 5e5}})
    assert old.rope == new.rope
    assert (old.rope.theta, old.rope.kind, old.rope.original_window) == (5e5, "llama3", 128)
    assert read_config(raw | {"rope_theta": 5e5, "rope_scaling": None}).rope.kind == "default"


@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
def test_angles_equal_transformers_bit_for_bit(kind: str) -> None:
    """At position 60,000 one unit in the last place of a frequency would already be seen."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from agentkv.engine.layers import Rotary

    rope = {"rope_type": kind, "rope_theta": 5e5}
    rope |= {"factor": 8.0} if kind != "default" else {}
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=2, head_dim=128, rope_parameters=rope, max_position_embeddings=65536
    )
    positions = torch.tensor([0, 1, 17, 4096, 60_000])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=torch.float32), positions.unsqueeze(0))
    raw = config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    mine = Rotary(read_config(raw).rope, 128).angles(positions, torch.float32)
    assert torch.equal(mine[0].squeeze(1), cos[0, :, :64])
    assert torch.equal(mine[1].squeeze(1), sin[0, :, :64])


def test_the_fingerprint_follows_config_and_weights(folder: Path, model: Any) -> None:
    first = load_model(folder).fingerprint
    assert first == model("qwen3", "float64").fingerprint
    path = shards(folder)[0]
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    second = load_model(folder).fingerprint
    edit(folder / "config.json", rms_norm_eps=1e-5)
    assert len({first, second, load_model(folder).fingerprint}) == 3


def test_facts_of_a_loaded_model(model: Any) -> None:
    loaded = model("qwen3", "float32")
    assert loaded.window == 512
    assert loaded.groups(16)[0].stripe_bytes == 3 * 2 * 2 * 16 * 12 * 4
    assert loaded.weight_bytes == 4 * sum(each.numel() for each in loaded.model.state_dict().values())
