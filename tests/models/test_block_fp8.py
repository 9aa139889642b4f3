"""Published block-FP8 checkpoints: logits of the same weights worked out in float64, bytes that they take, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_files import write_pair
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from agentkv import methods
from agentkv.engine import sizing
from agentkv.engine.config import read_config
from agentkv.engine.core import EngineConfig
from agentkv.engine.loader import load_model
from agentkv.engine.preparation import Preparation
from agentkv.errors import BadModel

FAMILIES = ["qwen3", "qwen3_moe"]
KEPT = ("model.layers.1.mlp.down_proj", "model.layers.2.self_attn.q_proj", "model.layers.2.self_attn.k_proj")
KEPT += ("model.layers.2.self_attn.v_proj", "model.layers.0.mlp.gate")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """family -> (FP8 directory, plain float64 directory), made once. Some modules are plain, scales are stored in bfloat16."""
    made: dict[str, tuple[Path, Path]] = {}

    def get(family: str) -> tuple[Path, Path]:
        if family not in made:
            made[family] = write_pair(tmp_path_factory.mktemp(family), family, KEPT, torch.bfloat16)
        return made[family]

    return get


def tokens_of(count: int, seed: int = 3) -> list[int]:
    return torch.randint(0, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits_by(path: Path, tokens: list[int], **options: Any) -> torch.Tensor:
    """transformers' logits in the directory's dtype."""
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        twin = AutoModelForCausalLM.from_pretrained(path, experts_implementation="eager", **options).eval()
        return twin(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-9), ("float32", 1e-4)])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_weights_in_float64(pair: Any, host: Any, family: str, dtype: str, tolerance: float) -> None:
    coarse, plain = pair(family)
    tokens = tokens_of(33)
    want = logits_by(plain, tokens, dtype=torch.float64)
    assert want.std() > 0.2
    loaded = load_model(coarse, dtype=dtype)
    for chunks in ([], [1] * 9, [15, 2]):
        assert (host(loaded, 16).chunked(0, tokens, chunks) - want).abs().max() <= tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_on_a_gpu(tmp_path: Path, host: Any, family: str) -> None:
    """Decodes, chunks of few tokens, and one of more than 128, in float32; `test_block_fp8_rounding` has bfloat16."""
    coarse, plain = write_pair(tmp_path, family, hidden_size=256)
    tokens = tokens_of(230)
    want = logits_by(plain, tokens, dtype=torch.float64)
    loaded = load_model(coarse, device="cuda", dtype="float32")
    for chunks in ([100, 100, *[1] * 29], [200]):
        got = host(loaded, 16).chunked(0, tokens, chunks).cpu()
        assert (got - want).abs().max() <= 2e-3 * want.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_the_same_layout(tmp_path: Path, host: Any, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are whole blocks here: others it spreads the scales of evenly."""
    from transformers import FineGrainedFP8Config
    from transformers.quantizers import quantizer_finegrained_fp8

    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)  # asked for, and not needed here
    coarse, _ = write_pair(tmp_path, family, hidden_size=256)
    tokens = tokens_of(20)
    want = logits_by(coarse, tokens, dtype=torch.float32, quantization_config=FineGrainedFP8Config(dequantize=True))
    assert (host(load_model(coarse), 16).chunked(0, tokens, [7]) - want).abs().max() <= 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_take_the_bytes_of_the_file(pair: Any, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes stay one byte each and plain weights take the model's dtype; the memory plan starts from that."""
    coarse, _ = pair(family)
    want = 0
    with safe_open(coarse / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - no mapping
            tensor = file.get_tensor(name)
            want += tensor.numel() * (1 if tensor.dtype == torch.float8_e4m3fn else 4)
    loaded = load_model(coarse)
    assert loaded.weight_bytes == want
    assert load_model(coarse, contents=False).weight_bytes == want
    monkeypatch.setattr(sizing, "usable_memory", lambda device: 1 << 30)
    config = EngineConfig(memory=0, window=64, page_size=4, max_rows=4, step_tokens=16)
    plan = sizing.plan_memory(loaded, config, methods.get("dense"))
    assert plan.weights == want
    assert plan.arena <= (plan.usable - want - plan.step) * sizing.CPU_SHARE


def test_preparations_see_plain_projections(pair: Any) -> None:
    coarse, plain = pair("qwen3")
    tensors = load_file(plain / "model.safetensors")
    got = Preparation(load_model(coarse)).key(0).weight.double()
    want = tensors["model.layers.0.self_attn.k_proj.weight"]
    assert (got - want).abs().max() < 1e-6


def edited(folder: Path, coarse: Path, **changes: Any) -> Path:
    """A copy of an FP8 directory whose quantization_config has changes; None removes a key."""
    config = json.loads((coarse / "config.json").read_text())
    said = config["quantization_config"] | changes
    config["quantization_config"] = {key: value for key, value in said.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").symlink_to(coarse / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_method": "gptq"}, ["quantized by 'gptq'"]),
        ({"quant_method": None}, ["quantized by None"]),
        ({"weight_block_size": None}, ["weight_block_size None", "[128, 128]"]),
        ({"weight_block_size": [64, 128]}, ["weight_block_size [64, 128]"]),
        ({"activation_scheme": "static"}, ["activation_scheme 'static'"]),
        ({"fmt": "e5m2"}, ["fmt 'e5m2'"]),
        ({"scale_fmt": "ue8m0"}, ["scale_fmt 'ue8m0'"]),
        ({"modules_to_not_convert": "lm_head"}, ["no list of names"]),
        ({"modules_to_not_convert": ["lm_head", "model.layers.0.self_attn.q_proj"]}, ["q_proj", "some plain"]),
        ({"modules_to_not_convert": [*KEPT, "lm_head", "layers.0"]}, ["float8_e4m3fn", "asks for plain weights"]),
        ({"modules_to_not_convert": ["lm_head"]}, ["down_proj.weight", "float32", "asks for FP8 weights"]),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    pair: Any, tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(BadModel) as caught:
        load_model(edited(tmp_path, pair("qwen3")[0], **changes))
    assert all(word in str(caught.value) for word in words), caught.value
    assert caught.value.hint


def test_files_that_do_not_fit_their_config_are_refused(pair: Any, tmp_path: Path) -> None:
    coarse, _ = pair("qwen3")
    config, tensors = json.loads((coarse / "config.json").read_text()), load_file(coarse / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"

    def refused(changes: dict[str, torch.Tensor | None], word: str, **said: Any) -> None:
        given = {key: value for key, value in (tensors | changes).items() if value is not None}
        save_file(given, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(config | said))
        with pytest.raises(BadModel, match=word) as caught:
            load_model(tmp_path)
        assert caught.value.hint

    refused({f"{name}_scale_inv": None}, "lack .*down_proj.weight_scale_inv")
    refused({f"{name}_scale_inv": torch.ones(2, 3)}, r"has shape \[2, 3\], the config asks for \[2, 2\]")
    refused({name: tensors[name].float()}, "float32, the config asks for FP8")
    refused({name: tensors[name].to(torch.float8_e5m2)}, "float8_e5m2, the config asks for FP8")
    refused({}, "float8_e4m3fn, the config asks for plain", quantization_config=None)
    refused({}, "blocks of 128 do not fit", num_key_value_heads=1)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"num_experts_per_tok": 7}, "7 active of 6 experts"),
        ({"num_experts_per_tok": 0}, "0 active"),
        ({"moe_intermediate_size": 0}, "0 inner units"),
        ({"moe_intermediate_size": "wide"}, "wrong kind"),
        ({"mlp_only_layers": 3}, "wrong kind"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"hidden_act": "relu"}, "relu"),
    ],
)
def test_configs_of_experts_that_make_no_sense(pair: Any, changes: dict[str, Any], word: str) -> None:
    raw = json.loads((pair("qwen3_moe")[0] / "config.json").read_text())
    with pytest.raises(BadModel, match=word):
        read_config(raw | changes)


def test_experts_lie_in_the_layers_that_the_config_says(pair: Any) -> None:
    raw = json.loads((pair("qwen3_moe")[0] / "config.json").read_text()) | {"num_hidden_layers": 8}
    shape = read_config(raw | {"decoder_sparse_step": 3, "mlp_only_layers": [5]}).experts
    assert shape is not None
    assert (shape.layers, shape.count, shape.active, shape.inner_size, shape.normed) == ((2,), 6, 2, 128, True)
    published = {key: value for key, value in raw.items() if key != "num_local_experts"} | {"num_experts": 6}
    assert read_config(published) == read_config(raw)
    assert read_config(raw | {"mlp_only_layers": list(range(8))}).experts is None
