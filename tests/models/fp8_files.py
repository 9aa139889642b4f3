"""Tiny checkpoints in the published layout of block FP8, and the same weights plain, worked out in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 192,  # a block and a half
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "eos_token_id": None,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}


def coded(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(e4m3 codes, float32 scales by block of 128 x 128, what both stand for in float64), block by block."""
    outs, ins = weight.shape
    codes = torch.empty(outs, ins, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-outs // 128), -(-ins // 128))
    plain = torch.empty(outs, ins, dtype=torch.float64)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            place = (slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
            scale = (weight[place].abs().max() / 448).bfloat16().float()  # some publishers store bfloat16
            codes[place] = (weight[place] / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            plain[place] = codes[place].double() * scale.double()
            scales[row, column] = scale
    return codes, scales, plain


def write_pair(
    folder: Path, family: str, kept: tuple[str, ...] = (), scale_dtype: torch.dtype = torch.float32, **sizes: Any
) -> tuple[Path, Path]:
    """(FP8 directory, plain float64 directory) of random weights. family: qwen3 or qwen3_moe; kept: modules left plain."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(4)
    given = SIZES | (EXPERTS if family == "qwen3_moe" else {}) | sizes
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **given))
    model.save_pretrained(folder / "drawn")
    coarse: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "drawn" / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if name.endswith("_proj.weight") and module not in kept:
            coarse[name], scales, plain[name] = coded(tensor)
            coarse[f"{name}_scale_inv"] = scales.to(scale_dtype)
        else:
            drawn = tensor * (1 + 0.2 * torch.randn_like(tensor)) if tensor.dim() == 1 else tensor
            coarse[name], plain[name] = drawn, drawn.double()
    config = json.loads((folder / "drawn" / "config.json").read_text())
    said = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    said["modules_to_not_convert"] = ["lm_head", *kept]
    for name, tensors, changes in (("fp8", coarse, {"quantization_config": said}), ("plain", plain, {"dtype": "float64"})):
        (folder / name).mkdir()
        save_file(tensors, folder / name / "model.safetensors", metadata={"format": "pt"})
        (folder / name / "config.json").write_text(json.dumps(config | changes))
    return folder / "fp8", folder / "plain"
